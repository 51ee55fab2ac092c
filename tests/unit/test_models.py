"""Test models: whole or absent on disk, the same every time, and fit to compare engines with."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from weightsync.testing import (
    LONG_PROMPT,
    MODELS,
    PROMPTS,
    Comparison,
    Rollout,
    build_checkpoint,
    completions_rollouts,
    greedy,
    load_trainer,
    models,
    score,
    vllm_rollouts,
)

TINY = [name for name, spec in MODELS.items() if spec.dtype == "float32"]
CHILD_DEADLINE_S = 120

Build = Callable[[str, str], Path]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine OpenMP's threads wait for each other by spinning: ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def build(cache: Path) -> Build:
    return lambda name, variant: build_checkpoint(name, variant, cache_dir=cache)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_importing_the_package_imports_nothing_heavy() -> None:
    child = python(
        "import sys, weightsync.testing\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    output, errors = child.communicate(timeout=CHILD_DEADLINE_S)
    assert output.strip() == "[]", errors


# The cache


def test_second_build_is_a_look_into_the_cache(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build("qwen2", "A")
    monkeypatch.setattr(models, "_save_model", lambda *_: pytest.fail("built again"))
    assert build("qwen2", "A") == first


def test_cache_directory_comes_from_the_environment(
    build: Build, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = build("qwen2", "A")
    monkeypatch.setenv("WEIGHTSYNC_TEST_CACHE", str(cache))
    assert build_checkpoint("qwen2") == expected


def test_another_spec_or_builder_is_another_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {models._key(spec) for spec in MODELS.values()}
    assert len(keys) == len(MODELS)
    monkeypatch.setattr(models, "BUILDER_VERSION", models.BUILDER_VERSION + 1)
    assert keys.isdisjoint(models._key(spec) for spec in MODELS.values())


@pytest.mark.parametrize(("name", "variant"), [("gpt5", "A"), ("qwen2", "a"), ("qwen2", "../A")])
def test_unknown_names_and_variants_are_refused(name: str, variant: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gpt5|variant"):
        build_checkpoint(name, variant, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["_save_model", "_save_tokenizer"])
def test_failed_build_leaves_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_half(_: object, *rest: object) -> None:
        directory = rest[-1]
        assert isinstance(directory, Path)
        (directory / "config.json").write_text("{}")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(models, step, save_half)
        with pytest.raises(OSError, match="disk full"):
            build_checkpoint("qwen2", cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    assert len(tensors(build_checkpoint("qwen2", cache_dir=tmp_path))) == 27


def test_killed_build_is_never_taken_for_whole_and_is_cleaned_up(tmp_path: Path) -> None:
    child = python(
        "import os, pathlib, sys\n"
        "from weightsync.testing import models\n"
        "models._save_tokenizer = lambda *_: os.kill(os.getpid(), 9)\n"
        "models.build_checkpoint('qwen2', cache_dir=pathlib.Path(sys.argv[1]))",
        tmp_path,
    )
    _, errors = child.communicate(timeout=CHILD_DEADLINE_S)
    assert child.returncode == -signal.SIGKILL, errors
    (left,) = tmp_path.iterdir()
    assert (left / "model.safetensors").exists(), "killed too early to show anything"

    checkpoint = build_checkpoint("qwen2", cache_dir=tmp_path)
    assert checkpoint != left
    assert list(tmp_path.iterdir()) == [checkpoint]


def test_running_build_is_left_alone(tmp_path: Path) -> None:
    final = tmp_path / "qwen2-A-0"
    with models._private_directory(final) as work:
        models._remove_abandoned(final)
        assert work.is_dir()
    assert not work.exists()


def test_two_processes_building_at_once_end_with_one_whole_checkpoint(
    build: Build, tmp_path: Path
) -> None:
    # Both wait at a pipe between their last write and the rename, so that both are past the look
    # into the cache and neither is first by chance.
    code = (
        "import pathlib, sys\n"
        "from weightsync.testing import models\n"
        "save = models._save_tokenizer\n"
        "def save_then_wait(*arguments):\n"
        "    save(*arguments)\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "models._save_tokenizer = save_then_wait\n"
        "print(models.build_checkpoint('qwen2', cache_dir=pathlib.Path(sys.argv[1])))"
    )
    children = [python(code, tmp_path) for _ in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    assert len(list(tmp_path.iterdir())) == 2
    answers = [child.communicate("go\n", timeout=CHILD_DEADLINE_S) for child in children]
    (checkpoint,) = tmp_path.iterdir()
    assert [output.strip() for output, _ in answers] == [str(checkpoint)] * 2, answers
    assert _files(checkpoint) == _files(build("qwen2", "A"))


def _files(checkpoint: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in checkpoint.iterdir()}


# The weights


@pytest.mark.parametrize("name", TINY)
def test_same_bytes_every_time(name: str, build: Build, tmp_path: Path) -> None:
    again = build_checkpoint(name, "A", cache_dir=tmp_path)
    assert _files(again) == _files(build(name, "A"))


@pytest.mark.parametrize("name", TINY)
def test_variants_differ_in_every_tensor(name: str, build: Build) -> None:
    a, b = tensors(build(name, "A")), tensors(build(name, "B"))
    assert a.keys() == b.keys()
    assert not [key for key in a if torch.equal(a[key], b[key])]


@pytest.mark.parametrize("name", TINY)
def test_head_is_in_the_checkpoint_unless_tied(name: str, build: Build) -> None:
    tied = MODELS[name].config["tie_word_embeddings"]
    assert ("lm_head.weight" in tensors(build(name, "A"))) is not tied


def test_mixtral_experts_have_their_names_on_disk(build: Build) -> None:
    assert "model.layers.0.block_sparse_moe.experts.7.w1.weight" in tensors(build("mixtral", "A"))


def test_large_checkpoints_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_shards = dataclasses.replace(MODELS["qwen2"], max_shard_size="300KB")
    monkeypatch.setitem(MODELS, "sharded", small_shards)
    checkpoint = build_checkpoint("sharded", cache_dir=tmp_path)
    assert len(list(checkpoint.glob("*.safetensors"))) >= 4
    assert (checkpoint / "model.safetensors.index.json").exists()
    assert len(tensors(checkpoint)) == 27


def test_tokenizer_round_trips_bytes_and_knows_every_id(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = AutoTokenizer.from_pretrained(build("qwen2", "A"), local_files_only=True)
    text = "weights, Δ = 0.5\n"
    token_ids = tokenizer(text)["input_ids"]
    assert len(token_ids) == len(text.encode())
    assert tokenizer.decode(token_ids) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        256,
        257,
        258,
    )
    assert all(tokenizer.decode([token_id]) for token_id in range(256, 512))


@pytest.mark.parametrize("name", TINY)
def test_greedy_output_is_varied_decided_and_of_its_variant(name: str, build: Build) -> None:
    prompts = [*PROMPTS, LONG_PROMPT]
    rollouts = {}
    for variant in "AB":
        model = load_trainer(build(name, variant))
        assert next(model.parameters()).dtype == torch.float32
        rollouts[variant] = greedy(model, prompts, 32)
        for prompt, rollout in zip(prompts, rollouts[variant], strict=True):
            assert len(set(rollout.token_ids)) >= 10
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *rollout.token_ids]])).logits[0]
            first, second = logits[len(prompt) - 1 : -1].topk(2).values.unbind(-1)
            assert float((first - second).min()) > 1e-3
    for ours, theirs in zip(rollouts["A"], rollouts["B"], strict=True):
        same = sum(a == b for a, b in zip(ours.token_ids, theirs.token_ids, strict=True))
        assert same <= 4


def test_output_depends_on_the_far_end_of_a_long_prompt(build: Build) -> None:
    # Otherwise a prefix cache kept over an update could not be seen.
    model = load_trainer(build("qwen2", "A"))
    other_start = [*LONG_PROMPT[100:128], *LONG_PROMPT[:100], *LONG_PROMPT[128:]]
    (one,), (other,) = greedy(model, [LONG_PROMPT], 8), greedy(model, [other_start], 8)
    assert one.token_ids != other.token_ids


# The comparison


def test_model_agrees_with_itself_and_not_with_another(build: Build) -> None:
    a, b = load_trainer(build("qwen2", "A")), load_trainer(build("qwen2", "B"))
    rollouts = greedy(a, PROMPTS, 32)
    same = score(a, PROMPTS, rollouts)
    assert (same.greedy_matches, same.tokens) == (64, 64)
    assert same.max_abs_logprob_difference < 1e-5
    different = score(b, PROMPTS, rollouts)
    assert different.greedy_matches <= 4
    assert different.max_abs_logprob_difference > 1


def test_nan_in_a_rollout_is_not_lost(build: Build) -> None:
    model = load_trainer(build("qwen2", "A"))
    (rollout,) = greedy(model, PROMPTS[:1], 3)
    spoilt = Rollout(rollout.token_ids, [float("nan"), *rollout.logprobs[1:]])
    difference = score(model, PROMPTS[:1], [spoilt]).max_abs_logprob_difference
    assert difference != difference


def test_nothing_to_compare_is_an_error_not_a_success(build: Build) -> None:
    model = load_trainer(build("qwen2", "A"))
    for prompts, rollouts in [([], []), (PROMPTS, []), (PROMPTS[:1], [Rollout([], [])])]:
        with pytest.raises(ValueError, match="prompt"):
            score(model, prompts, rollouts)
    with pytest.raises(ValueError, match="2 token ids"):
        Rollout([1, 2], [0.0])


def test_comparison_reads_as_a_sentence() -> None:
    assert str(Comparison(63, 64, 2.4e-6)) == "63 of 64 greedy tokens, |dlogprob| <= 2.4e-06"


def test_rollouts_from_vllm_objects() -> None:
    class Record:
        def __init__(self, **fields: object) -> None:
            self.__dict__.update(fields)

    steps = [{4: Record(logprob=-0.5), 9: Record(logprob=-0.25)}, {5: Record(logprob=-1.0)}]
    completion = Record(token_ids=(9, 5), logprobs=steps)
    assert vllm_rollouts([Record(outputs=[completion])]) == [Rollout([9, 5], [-0.25, -1.0])]
    with pytest.raises(ValueError, match="logprobs=1"):
        vllm_rollouts([Record(outputs=[Record(token_ids=[9], logprobs=None)])])


def test_rollouts_from_a_completions_answer_are_in_the_order_of_the_prompts() -> None:
    def choice(index: int, token_id: int) -> dict[str, object]:
        logprobs = {"token_logprobs": [-0.5], "tokens": ["x"], "text_offset": [0]}
        return {"index": index, "text": "x", "token_ids": [token_id], "logprobs": logprobs}

    answer = {"choices": [choice(1, 20), choice(0, 10)]}
    assert [r.token_ids for r in completions_rollouts(answer)] == [[10], [20]]
    with pytest.raises(ValueError, match="return_token_ids"):
        completions_rollouts({"choices": [{**choice(0, 10), "token_ids": None}]})
    with pytest.raises(ValueError, match="no such model"):
        completions_rollouts({"error": {"message": "no such model"}})
