"""A small language model as an inference engine holds one, loader, caches, sleep and all.

It computes real logits, split over its workers, and has one of everything that updates have been
known to miss: fused and stacked parameters, packed copies, absorbed matrices, a tied head, a padded
vocabulary, buffers of all kinds, tensors in plain attributes, a draft model with copies of its own,
a prefix cache, addresses that a graph has captured.

    model = ToyModel(ToyConfig())
    model.load(checkpoint(seed=1).items())          # begin, load, finalize
    model.logits([3, 1, 4, 1, 5])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from weightsync.testing.toy_attention import Attention, LatentAttention
from weightsync.testing.toy_checkpoint import (
    CHOSEN,
    DIM,
    EXPERT_INNER,
    EXPERTS,
    HEADS,
    INNER,
    KV_HEADS,
    LATENT,
    PADDED,
    VOCAB,
    H,
    ToyConfig,
)
from weightsync.testing.toy_experts import Experts
from weightsync.testing.toy_layers import (
    Embedding,
    Linear,
    Ranks,
    Reloadable,
    RMSNorm,
    loader_of,
    plain_loader,
)

__all__ = ["PACKED_MODULES", "ToyModel", "plain_tensors"]

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
PACKED_MODULES = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


class Gate(Reloadable):
    """The router: its bias stays in float32, whatever the model's dtype."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.new_parameter("weight", (EXPERTS, H), torch.bfloat16, plain_loader)
        self.new_parameter("bias", (EXPERTS,), torch.float32, plain_loader)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) to what each expert counts, (tokens, experts)."""
        scores = (x.float() @ self.weight.float().t()).sigmoid()
        chosen = (scores + self.bias).topk(CHOSEN, dim=-1).indices
        return torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))


class Mixture(nn.Module):
    def __init__(self, ranks: Ranks, config: ToyConfig) -> None:
        super().__init__()
        self.gate = Gate()
        self.experts = Experts(ranks, EXPERTS, H, EXPERT_INNER, config.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        out: torch.Tensor = self.experts(x, self.gate(x))
        return out


class Dense(nn.Module):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.gate_up_proj = Linear(ranks, H, {"gate_proj": INNER, "up_proj": INNER}, "rows")
        self.down_proj = Linear(ranks, INNER, {"down_proj": H}, "columns")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return out


class Layer(nn.Module):
    def __init__(self, attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(H), RMSNorm(H)
        self.attn, self.mlp = attn, mlp

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The new hidden states, and what the attention keeps of all tokens."""
        seen, kept = self.attn(self.norm1(x), past)
        x = x + seen
        return x + self.mlp(self.norm2(x)), kept


class Draft(nn.Module):
    """Proposes the token after next; has copies of the target's embedding and last norm."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.embed = Embedding(ranks, VOCAB, PADDED, H)
        self.norm = RMSNorm(H)
        self.fc = Linear(ranks, 2 * H, {"fc": H}, "none", across=True)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens,) and (tokens, width) to hidden states (tokens, width)."""
        out: torch.Tensor = self.norm(self.fc(torch.cat([self.embed.embed(tokens), hidden], -1)))
        return out


class ToyModel(nn.Module):
    """See the module.

    Args:
        config: what kind.
        ranks: which worker's part of it.

    Attributes:
        loads: finalized loads so far.
        finalized: how often each layer was finalized in the last of them.
        asleep: how deeply; 0 when awake.
    """

    embed_scale: torch.Tensor

    def __init__(self, config: ToyConfig, ranks: Ranks | None = None) -> None:
        super().__init__()
        ranks = ranks or Ranks()
        self.config, self.ranks = config, ranks
        self.embed = Embedding(ranks, VOCAB, PADDED, H)
        self.layers = nn.ModuleList(
            [
                Layer(Attention(ranks, H, HEADS, KV_HEADS, DIM), Dense(ranks)),
                Layer(LatentAttention(ranks, H, HEADS, DIM, LATENT), Mixture(ranks, config)),
            ]
        )
        self.norm = RMSNorm(H)
        self.lm_head = Embedding(
            ranks, VOCAB, PADDED, H, head=True, tied=self.embed if config.tied else None
        )
        self.draft = Draft(ranks)
        self.register_buffer("embed_scale", torch.zeros(()))
        self.set_constants()
        self.loads = 0
        self.asleep = 0
        self._host: list[torch.Tensor] | None = None
        self.finalized: dict[str, int] = {}
        self._open: dict[str, Reloadable] = {}
        self._prefixes: dict[tuple[int, ...], list[tuple[torch.Tensor, ...]]] = {}

    # --- loading ----------------------------------------------------------------------------

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A whole load, in one bracket."""
        self.begin()
        self.load_weights(weights)
        self.finish()

    def begin(self) -> None:
        """A load begins. Layers open before the first weight that goes to them."""
        self._open = {}
        self.finalized = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load some tensors, in any order and any number of calls.

        Returns:
            Names of the parameters that were written.

        Raises:
            KeyError: a name that the model does not have.
        """
        tensors = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())
        written = set()
        for name, loaded in weights:
            for target, part in self._destinations(name):
                if target not in tensors:
                    raise KeyError(name)
                module = self.get_submodule(target.rpartition(".")[0])
                if isinstance(module, Reloadable):
                    self._opened(target.rpartition(".")[0], module)
                    loader_of(tensors[target])(tensors[target], loaded, part=part)
                else:
                    plain_loader(tensors[target], loaded, part)
                written.add(target)
        return written

    def finish(self) -> None:
        """The load is over: every layer that got something is finalized, once. A head that is tied
        to an embedding goes with it."""
        if self.config.tied and "embed" in self._open:
            self._open["lm_head"] = self.lm_head
        for name, module in self._open.items():
            module.finalize()
            self.finalized[name] = self.finalized.get(name, 0) + 1
        self._open = {}
        self.loads += 1

    def _opened(self, name: str, module: Reloadable) -> None:
        if name not in self._open:
            module.open()
            self._open[name] = module

    def _destinations(self, name: str) -> Iterator[tuple[str, str]]:
        """``(parameter, part of it)`` that a checkpoint tensor goes to."""
        path, _, leaf = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        if self.config.tied and name == "lm_head.weight":
            return
        if ".experts." in name:
            prefix, _, part = path.partition(".experts.")
            yield f"{prefix}.experts.{'w2' if last == 'down_proj' else 'w13'}", part
        elif last in FUSED:
            yield f"{parent}.{FUSED[last]}.{leaf}", last
        elif path == "mtp.fc":
            yield "draft.fc.weight", last
        else:
            yield name, last
        if name in ("embed.weight", "norm.weight"):
            yield f"draft.{name}", last

    # --- what no weight brings --------------------------------------------------------------

    def set_constants(self) -> None:
        """Everything that comes with the code: made anew in place after a deep sleep."""
        self.embed_scale.fill_(H**0.5)
        for module in self.modules():
            if isinstance(module, Attention):
                module.set_constants()

    def sleep(self, level: int) -> None:
        """Give the memory up: every byte of every tensor becomes 0xff, which is NaN in all dtypes.

        Args:
            level: 1 keeps a copy on the host, 2 keeps nothing.
        """
        memory = self._memory()
        self._host = [part.clone() for part in memory] if level == 1 else None
        for part in memory:
            part.fill_(0xFF)
        self.asleep = level
        self.reset_caches()

    def wake(self) -> None:
        """What was kept comes back, and what comes with the code; the weights only if they were
        kept."""
        if self._host is not None:
            for part, kept in zip(self._memory(), self._host, strict=True):
                part.copy_(kept)
        self.set_constants()
        self._host, self.asleep = None, 0

    def _memory(self) -> list[torch.Tensor]:
        """All bytes of all tensors, once each."""
        tensors = {**self.state(), **plain_tensors(self)}.values()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return [torch.empty(0, dtype=torch.uint8).set_(s) for s in storages.values()]

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, under all of their names."""
        found: dict[str, torch.Tensor] = dict(self.named_parameters(remove_duplicate=False))
        return found | dict(self.named_buffers(remove_duplicate=False))

    # --- computing --------------------------------------------------------------------------

    def reset_caches(self) -> None:
        """Forget what was computed with other weights."""
        self._prefixes = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """After the last of these tokens: the target's, and the draft's; (VOCAB,) float32 each.

        What the longest known prefix left is used again.
        """
        known = [p for p in self._prefixes if len(p) < len(tokens) and tuple(tokens[: len(p)]) == p]
        prefix: tuple[int, ...] = max(known, key=len, default=())
        past = self._prefixes.get(prefix, [()] * len(self.layers))
        now = torch.tensor(tokens[len(prefix) :])
        x = (self.embed.embed(now).float() * self.embed_scale).to(torch.bfloat16)
        kept = []
        for layer, before in zip(self.layers, past, strict=True):
            x, after = layer(x, before)
            kept.append(after)
        self._prefixes[tuple(tokens)] = kept
        hidden = self.norm(x)
        proposed = self.draft(now, hidden)
        return self.lm_head.logits(hidden)[-1], self.lm_head.logits(proposed)[-1]


def plain_tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Tensors in plain attributes of a model's modules, by dotted name."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
