"""What an engine's output is compared with: transformers, one forward pass per prompt.

    rollouts = vllm_rollouts(llm.generate(prompts, sampling))     # temperature 0, logprobs=1
    comparison = score(load_trainer("qwen2", "B"), PROMPTS, rollouts)
    print(comparison)                                # 64 of 64 greedy tokens, |dlogprob| <= 2.4e-06

`score` forces the engine's own tokens through the reference model, so one early difference does not
make all later ones count. It says whether the engine computes what the trainer would; that its
weights are the trainer's byte for byte is for digests to say.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PROMPTS: list[list[int]] = [
    [257, 72, 101, 108, 108, 111, 44, 32],
    [257, 3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 26],
]
"""Two short prompts. All ids are below 258 and so exist in every test model."""

LONG_PROMPT: list[int] = [257, *((17 * i * i + 91 * i + 7) // 3 % 256 for i in range(320))]
"""321 ids: two whole prefix-cache blocks of a CPU engine (128 tokens each) and a rest. Only a
prompt of more than one block can show that an engine kept its cache over an update."""


@dataclass(frozen=True)
class Rollout:
    """Tokens generated for one prompt, and the log-probability of each when it was chosen."""

    token_ids: list[int]
    logprobs: list[float]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.token_ids)} token ids, but {len(self.logprobs)} log-probabilities"
            )


@dataclass(frozen=True)
class Comparison:
    """How far rollouts are from what a reference model says of the same tokens."""

    greedy_matches: int
    """Tokens that are the reference's first choice too, given all tokens before."""
    tokens: int
    max_abs_logprob_difference: float
    """NaN if any log-probability was."""

    def __str__(self) -> str:
        return (
            f"{self.greedy_matches} of {self.tokens} greedy tokens, "
            f"|dlogprob| <= {self.max_abs_logprob_difference:.1e}"
        )


def score(
    model: "torch.nn.Module", prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout]
) -> Comparison:
    """Compare rollouts with what `model` gives for the same tokens in the same places.

    Args:
        model: A transformers causal language model, in eval mode.
        prompts: Token ids, one sequence per rollout.
        rollouts: What an engine generated, in the order of the prompts.

    Raises:
        ValueError: The two differ in number, or there is nothing to compare.
    """
    import torch

    if len(prompts) != len(rollouts):
        raise ValueError(f"{len(prompts)} prompts, but {len(rollouts)} rollouts")
    matches = 0
    differences = []
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        if not prompt or not rollout.token_ids:
            raise ValueError("an empty prompt or rollout cannot be compared")
        expected = _logprobs(model, [*prompt, *rollout.token_ids])[len(prompt) - 1 : -1]
        chosen = torch.tensor(rollout.token_ids)
        matches += int((expected.argmax(-1) == chosen).sum())
        of_chosen = expected.gather(1, chosen[:, None])[:, 0]
        differences.append((of_chosen - torch.tensor(rollout.logprobs)).abs())
    if not differences:
        raise ValueError("no prompts")
    every = torch.cat(differences)
    return Comparison(matches, len(every), float(every.max()))


def greedy(
    model: "torch.nn.Module", prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[Rollout]:
    """Decode greedily, each token by one forward pass over all before it: slow, and beyond doubt.

    An end-of-sequence token does not end it, as with an engine's `ignore_eos`.
    """
    rollouts = []
    for prompt in prompts:
        token_ids: list[int] = []
        logprobs: list[float] = []
        for _ in range(max_new_tokens):
            value, index = _logprobs(model, [*prompt, *token_ids])[-1].max(-1)
            token_ids.append(int(index))
            logprobs.append(float(value))
        rollouts.append(Rollout(token_ids, logprobs))
    return rollouts


def vllm_rollouts(request_outputs: Iterable[Any]) -> list[Rollout]:
    """Take rollouts out of vLLM's `RequestOutput` objects (the first completion of each).

    Raises:
        ValueError: The request did not ask for log-probabilities.
    """
    rollouts = []
    for request_output in request_outputs:
        completion = request_output.outputs[0]
        if completion.logprobs is None:
            raise ValueError("no log-probabilities: ask for them with SamplingParams(logprobs=1)")
        token_ids = [int(token_id) for token_id in completion.token_ids]
        logprobs = [
            float(candidates[token_id].logprob)
            for token_id, candidates in zip(token_ids, completion.logprobs, strict=True)
        ]
        rollouts.append(Rollout(token_ids, logprobs))
    return rollouts


def completions_rollouts(json_body: Mapping[str, Any]) -> list[Rollout]:
    """Take rollouts out of the decoded answer of a vLLM server's `/v1/completions`.

    The request must have carried `"logprobs": 1` and `"return_token_ids": true`. One request may
    carry several prompts, with `"n": 1`. vLLM writes a log-probability below -9999 as -9999.

    Raises:
        ValueError: The answer is an error, or lacks token ids or log-probabilities.
    """
    choices = json_body.get("choices")
    if not choices:
        raise ValueError(f"not an answer of /v1/completions: {str(json_body)[:500]}")
    rollouts = []
    for choice in sorted(choices, key=lambda choice: int(choice["index"])):
        token_ids = choice.get("token_ids")
        logprobs = choice.get("logprobs")
        if token_ids is None or logprobs is None:
            raise ValueError(
                'no token ids or log-probabilities: send "return_token_ids": true and "logprobs": 1'
            )
        rollouts.append(
            Rollout([int(i) for i in token_ids], [float(x) for x in logprobs["token_logprobs"]])
        )
    return rollouts


def prompt_logprobs(model: "torch.nn.Module", prompt: Sequence[int]) -> list[float]:
    """What a model says of each token of a prompt after the first, given all before it: what a
    `weightsync.Canary` is made of.

    Args:
        model: A transformers causal language model, in eval mode.
        prompt: Token ids, two at least.
    """
    import torch

    found = _logprobs(model, prompt)[:-1]
    return [float(x) for x in found.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]]


def _logprobs(model: "torch.nn.Module", token_ids: Sequence[int]) -> "torch.Tensor":
    """Log-probabilities after each token, float32 on the CPU: [token, vocabulary]."""
    import torch

    device = next(model.parameters()).device
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids], device=device), use_cache=False).logits[0]
        logprobs: torch.Tensor = logits.float().log_softmax(-1).cpu()
    return logprobs
