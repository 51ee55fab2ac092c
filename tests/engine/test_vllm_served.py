"""What a real vLLM's live model holds after an update is read back, and what is wrong with it is
named. One engine start per model."""

from __future__ import annotations

import functools
import json
import os
import secrets
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from test_vllm_models import Served, served

import weightsync as ws
from weightsync.adapters.vllm import probe
from weightsync.adapters.vllm.target import VllmTarget
from weightsync.box import Box
from weightsync.digest import derive_seeds, reference_digest_at
from weightsync.errors import EnginePoisoned, Problem
from weightsync.holding import Holding, spot_columns
from weightsync.regions import reference_positions
from weightsync.target import Description
from weightsync.testing import build_checkpoint, load_trainer

EMBEDDING = "model.embed_tokens.weight"

FAMILIES = [
    ("qwen2", "float32"),
    ("qwen2_tied", "bfloat16"),
    ("qwen3", "float32"),
    ("llama", "bfloat16"),
    ("gemma3", "float32"),
    ("qwen3_moe", "bfloat16"),
    ("qwen3_moe_padded", "float32"),
    ("qwen2_moe", "float32"),
    ("mixtral", "float32"),
]


@dataclass
class Found:
    """What a look at a model found, against a checkpoint.

    Attributes:
        wrong: tensor -> where it is held otherwise.
        unread: tensor -> why it could not be read.
        right: holdings that are what they should be.
    """

    wrong: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    unread: dict[str, str] = field(default_factory=dict)
    faults: tuple[Problem, ...] = ()
    right: list[Holding] = field(default_factory=list)

    @property
    def nothing(self) -> bool:
        return not (self.wrong or self.unread or self.faults)


class Looked:
    """The target of an engine's only worker, asked directly.

    Attributes:
        manifest: of the model's checkpoints, in the engine's dtype.
        said: by the target of it.
    """

    def __init__(self, engine: Served) -> None:
        self.engine = engine
        self.manifest = self.source("A").manifest()
        (self.target,) = engine.llm.collective_rpc(_target)
        self.said: Description = self.target.describe(self.manifest, whole=True)
        assert not self.said.problems

    def source(self, variant: str) -> ws.SafetensorsSource:
        path = build_checkpoint(self.engine.name, variant)
        return ws.SafetensorsSource(path, dtype=self.engine.dtype)

    def sync(self, variant: str) -> None:
        with ws.WeightSender(self.source(variant), [ws.engine(self.engine.llm)]) as sender:
            sender.sync(variant)

    @functools.cache  # noqa: B019
    def tensors(self, variant: str) -> Mapping[str, torch.Tensor]:
        from safetensors.torch import load_file

        path = build_checkpoint(self.engine.name, variant)
        found: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            found |= {n: t.to(self.engine.dtype) for n, t in load_file(file).items()}
        return found

    def against(self, variant: str | Mapping[str, torch.Tensor]) -> Found:
        values = self.tensors(variant) if isinstance(variant, str) else variant
        seed = secrets.randbits(64)
        seeds = derive_seeds(seed, self.manifest.identities)
        answer = self.target.served(self.manifest, seed, seeds)
        assert answer.digests.shape == (len(self.said.holdings), 2)
        found = Found(faults=answer.faults)
        for number, holding in enumerate(self.said.holdings):
            name = self.manifest.tensors[holding.index].name
            if number in answer.unread:
                found.unread[name] = answer.unread[number]
                continue
            expected = digest(values[name], holding, seed, int(seeds[holding.index]))
            if tuple(map(int, answer.digests[number])) == expected:
                found.right.append(holding)
            else:
                found.wrong[name].add(holding.holder)
        return found

    def parameter(self, name: str) -> torch.Tensor:
        return dict(self.target._model.named_parameters(remove_duplicate=False))[name]


def _target(worker) -> VllmTarget:
    return worker.weight_transfer_engine.weightsync_side._target


def digest(tensor: torch.Tensor, holding: Holding, seed: int, tensor_seed: int) -> tuple[int, int]:
    """By the definition: bytes of a checkpoint, one by one."""
    first = np.zeros(2, np.uint64)
    columns = [(0, holding.lengths[-1])]
    if holding.level == "spot":
        drawn = spot_columns(seed, holding.holder, holding.lengths[-1])
        columns = [(column, 1) for column in drawn]
    for column, length in columns:
        offsets = (*holding.offsets[:-1], holding.offsets[-1] + column)
        box = Box(offsets, (*holding.lengths[:-1], length))
        spans = [slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)]
        part = tensor[tuple(spans)].clone()
        if holding.by_value:
            part[part.abs() < torch.finfo(part.dtype).tiny] = 0.0
        data = part.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        positions = reference_positions(box, tensor.shape, tensor.element_size())
        found = reference_digest_at(data, positions.reshape(-1), seed=tensor_seed)
        first += np.array([found.first, found.second], np.uint64)
    return int(first[0]), int(first[1])


def share(looked: Looked) -> Counter[str]:
    """Bytes by the lowest level at which any of their holdings is proven; ``-`` where none is."""
    said, found = looked.said, Counter()
    unproven = {index for index, _ in said.unproven}
    for index, spec in enumerate(looked.manifest.tensors):
        levels = {holding.level for holding in said.holdings if holding.index == index}
        level = "-" if index in unproven or not levels else min(levels, key="spot served".index)
        found[level] += spec.nbytes
    return found


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: "-".join(family))
def looked(request: pytest.FixtureRequest) -> Iterator[Looked]:
    name, dtype = request.param
    with served(name, dtype=dtype) as engine:
        yield Looked(engine)


@pytest.fixture
def fresh(looked: Looked) -> Looked:
    """Updated to variant B, and so seen to hold it."""
    looked.sync("B")
    assert looked.against("B").nothing
    return looked


def test_all_of_a_model_is_read_back_after_every_update(looked: Looked) -> None:
    assert looked.against("A").nothing  # as it was started
    for variant in "BAB":
        looked.sync(variant)
        found = looked.against(variant)
        assert found.nothing, (found.wrong, found.unread, found.faults)
        assert len(found.right) == len(looked.said.holdings)
    levels = share(looked)
    print(looked.engine.name, dict(levels))
    assert looked.said.unproven == ()
    assert levels == {"served": sum(spec.nbytes for spec in looked.manifest.tensors)}


def test_every_tensor_of_other_weights_is_told_apart(fresh: Looked) -> None:
    found = fresh.against("A")
    a, b = fresh.tensors("A"), fresh.tensors("B")
    assert found.wrong.keys() == {name for name in a if not torch.equal(a[name], b[name])}
    assert not found.unread and not found.faults


def test_columns_that_are_drawn_prove_a_packed_layer(
    fresh: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What large models get."""
    from weightsync.adapters.vllm import readable

    monkeypatch.setattr(readable, "LAYER_BUDGET", 0)
    before = fresh.said
    try:
        fresh.said = fresh.target.describe(fresh.manifest, whole=True)
        spots = [holding for holding in fresh.said.holdings if holding.level == "spot"]
        assert spots == [h for h in fresh.said.holdings if h.by_value]
        assert fresh.against("B").nothing
        assert {h.holder for h in spots} <= set().union(*fresh.against("A").wrong.values())
    finally:
        monkeypatch.undo()
        fresh.said = fresh.target.describe(fresh.manifest, whole=True)
    assert fresh.said == before


def flip(tensor: torch.Tensor, element: int, bit: int = 0) -> None:
    """One bit of one element, where it lies."""
    size = tensor.element_size()
    flat = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // size,), (1,), 0)
    flat.view({2: torch.int16, 4: torch.int32}[size])[element] ^= 1 << bit


@pytest.mark.parametrize("name", ["model.norm.weight", EMBEDDING])
def test_one_flipped_bit_of_what_lies_as_it_was_loaded_is_named(fresh: Looked, name: str) -> None:
    flip(fresh.parameter(name), 77)
    assert fresh.against("B").wrong == {name: {name}}
    flip(fresh.parameter(name), 77)
    assert fresh.against("B").nothing


@contextmanager
def packed_anew(layer: torch.nn.Module, weight: torch.Tensor) -> Iterator[None]:
    """For the length of the block, a linear layer computes from another weight."""
    good = layer.cpu_linear
    sample = torch.nn.Module()
    sample.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.quant_method.process_weights_after_loading(sample)
    layer.cpu_linear = sample.cpu_linear
    try:
        yield
    finally:
        layer.cpu_linear = good


def test_one_stale_tile_of_a_packed_linear_is_named(fresh: Looked) -> None:
    """Sixteen rows by sixteen columns of an old weight, in one of the fused tensors."""
    name = "model.layers.1.self_attn.k_proj.weight"
    layer = fresh.target._model.get_submodule("model.layers.1.self_attn.qkv_proj")
    attention = [fresh.tensors("B")[name.replace("k_proj", p)] for p in ("q_proj", "k_proj")]
    attention.append(fresh.tensors("B")[name.replace("k_proj", "v_proj")])
    weight = torch.cat(attention)
    first = len(attention[0]) + 16
    weight[first : first + 16, 16:32] = fresh.tensors("A")[name][16:32, 16:32]
    with packed_anew(layer, weight):
        found = fresh.against("B")
    assert found.wrong == {name: {"model.layers.1.self_attn.qkv_proj.cpu_linear"}}
    assert not found.unread and fresh.against("B").nothing


def test_a_weight_that_is_not_finite_is_said_to_be_unreadable_and_spoils_no_other(
    fresh: Looked,
) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    layer = fresh.target._model.get_submodule("model.layers.0.self_attn.o_proj")
    weight = fresh.tensors("B")[name].clone()
    weight[3, 5] = torch.inf
    with packed_anew(layer, weight):
        found = fresh.against("B")
    assert found.unread == {name: probe.NOT_FINITE} and not found.wrong


def test_a_layer_that_computes_otherwise_than_described_is_unread(fresh: Looked) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    layer = fresh.target._model.get_submodule("model.layers.0.self_attn.o_proj")
    good = layer.cpu_linear
    layer.cpu_linear = torch.nn.functional.linear  # of a weight that was let go of
    try:
        found = fresh.against("B")
    finally:
        layer.cpu_linear = good
    assert found.unread.keys() == {name} and not found.wrong


def test_a_buffer_that_an_update_changes_is_named_and_poisons_until_it_is_what_it_was(
    fresh: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightsync.adapters.vllm import reload

    buffers = dict(fresh.target._model.named_buffers())
    (cache, *_) = (name for name in buffers if "cos_sin_cache" in name or "inv_freq" in name)
    original = reload.reload_whole

    def careless(*arguments):
        seconds = original(*arguments)
        buffers[cache].view(-1)[0] += 1
        return seconds

    with monkeypatch.context() as patch, pytest.raises(EnginePoisoned, match=cache):
        patch.setattr(reload, "reload_whole", careless)
        fresh.sync("B")
    # No update brings it back, so none cures the engine; not a new sender's either.
    for _ in range(2):
        with pytest.raises(EnginePoisoned, match=cache):
            fresh.sync("B")
    buffers[cache].view(-1)[0] -= 1
    fresh.sync("B")
    assert fresh.against("B").nothing


def test_a_head_that_shares_its_embedding_no_longer_is_named(fresh: Looked) -> None:
    head = fresh.target._model.lm_head
    if head.weight is not fresh.target._model.model.embed_tokens.weight:
        pytest.skip("the head has weights of its own")
    shared = head.weight
    head.weight = torch.nn.Parameter(shared.detach().clone(), requires_grad=False)
    found = fresh.against("B")
    head.weight = shared
    assert [(fault.kind, fault.name) for fault in found.faults] == [("stale", "lm_head.weight")]
    assert fresh.against("B").nothing


def experts(looked: Looked) -> list[str]:
    found = [name for name in looked.tensors("B") if ".experts." in name and "layers.1" in name]
    if not found:
        pytest.skip("a dense model")
    return found


def expert_layer(looked: Looked) -> torch.nn.Module:
    (layer,) = (
        layer
        for name, layer in looked.target._model.named_modules()
        if "layers.1." in name and "w13_weight" in layer._parameters
    )
    return layer


def test_one_flipped_bit_of_packed_experts_is_named(fresh: Looked) -> None:
    names = experts(fresh)
    layer = expert_layer(fresh)
    per_expert = layer.w2_weight[0].numel()
    flip(layer.w2_weight, 3 * per_expert + 40, bit=2)
    found = fresh.against("B")
    flip(layer.w2_weight, 3 * per_expert + 40, bit=2)
    (wrong,) = found.wrong
    assert wrong in names and ".experts.3." in wrong, wrong
    assert fresh.against("B").nothing


def test_experts_that_are_packed_twice_or_not_at_all_are_named(fresh: Looked) -> None:
    names = set(experts(fresh))
    layer = expert_layer(fresh)
    kernel = layer.quant_method.moe_kernel.fused_experts
    from vllm._custom_ops import cpu_prepack_moe_weight

    layer.w2_weight.data = cpu_prepack_moe_weight(layer.w2_weight, kernel.isa)
    twice = fresh.against("B").wrong.keys()
    assert len(twice) == 8 and twice <= names
    fresh.sync("B")
    found = fresh.against("B")
    assert found.nothing, found.wrong


@pytest.mark.parametrize(("leaf", "row", "column"), [("w13_weight", 127, 5), ("w2_weight", 5, 50)])
def test_padding_of_experts_that_is_not_zero_is_named(
    fresh: Looked, leaf: str, row: int, column: int
) -> None:
    if fresh.engine.name != "qwen3_moe_padded":
        pytest.skip("its experts are not padded")
    from vllm._custom_ops import cpu_prepack_moe_weight

    layer = expert_layer(fresh)
    parameter = getattr(layer, leaf)
    one = torch.zeros_like(parameter)
    one[2, row, column] = 1.0
    packed = cpu_prepack_moe_weight(one, layer.quant_method.moe_kernel.fused_experts.isa)
    parameter.data += packed
    found = fresh.against("B")
    parameter.data -= packed
    assert not found.wrong and not found.unread
    (fault,) = found.faults
    assert fault.kind == "changed" and leaf in fault.name
    assert fresh.against("B").nothing


def test_stacked_experts_are_read_back_as_one_tensor(fresh: Looked) -> None:
    """Under the names that transformers has in memory."""
    experts(fresh)
    if fresh.engine.name == "mixtral":
        pytest.skip("vLLM knows no such names of it")
    models = {variant: load_trainer(fresh.engine.name, variant) for variant in "AB"}
    tensors = {
        variant: {name: t.detach().to(fresh.engine.dtype) for name, t in model.state_dict().items()}
        for variant, model in models.items()
    }
    per_expert, said = fresh.manifest, fresh.said
    try:
        fresh.manifest = ws.StateDictSource(tensors["B"]).manifest()
        fresh.said = fresh.target.describe(fresh.manifest, whole=True)
        assert not fresh.said.unproven
        assert any(name.endswith("experts.gate_up_proj") for name in tensors["B"])
        assert fresh.against(tensors["B"]).nothing
        assert len(fresh.against(tensors["A"]).wrong) == len(fresh.manifest)
    finally:
        fresh.manifest, fresh.said = per_expert, said


def test_vllms_own_reload_is_seen_to_leave_stale_tensors(fresh: Looked) -> None:
    """It reports success. Last, since it leaves the model as it is."""
    name = fresh.engine.name
    path = str(build_checkpoint(name, "A"))
    if name == "qwen3_moe_padded":
        pytest.skip("vLLM's own reload raises there")
    fresh.engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    found = fresh.against("A")
    assert not found.unread and not found.faults
    if name in ("qwen2_tied", "gemma3"):
        assert found.wrong == {EMBEDDING: {"lm_head.cpu_linear"}}
    elif ".experts." in "".join(fresh.tensors("A")):
        assert found.wrong.keys() == {name for name in fresh.tensors("A") if ".experts." in name}
    else:
        assert not found.wrong
    fresh.sync("A")
    assert fresh.against("A").nothing


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_moe"])
def test_started_with_noise_every_tensor_is_told_apart(name: str) -> None:
    with served(name, load_format="dummy") as engine:
        looked = Looked(engine)
        found = looked.against("A")
        assert len(found.wrong) > 0.7 * len(looked.manifest)  # noise leaves norms at one
        looked.sync("A")
        assert looked.against("A").nothing


def test_what_vllm_quantizes_is_unproven_by_name_and_the_rest_is_proven() -> None:
    with served("qwen2_tied", dtype="bfloat16", quantization="fp8_per_channel") as engine:
        looked = Looked(engine)
        for variant in "BA":
            looked.sync(variant)
            assert looked.against(variant).nothing
        unproven = {looked.manifest.tensors[index].name: why for index, why in looked.said.unproven}
        assert unproven.keys() == {name for name in looked.tensors("A") if "_proj." in name}
        assert all("form of its own" in why for why in unproven.values())
        held = {holding.index for holding in looked.said.holdings}
        assert held.isdisjoint(index for index, _ in looked.said.unproven)
        assert len(held) + len(unproven) == len(looked.manifest)


def test_a_part_of_a_model_is_read_back_alone() -> None:
    from weightsync.manifest import Manifest

    with served("qwen3_moe") as engine:
        looked = Looked(engine)
        chosen = [
            s for s in looked.manifest.tensors if "layers.1.mlp" in s.name or "norm" in s.name
        ]
        looked.manifest = Manifest(tuple(chosen))
        looked.said = looked.target.describe(looked.manifest, whole=False)
        assert not looked.said.problems and not looked.said.unproven
        assert {h.index for h in looked.said.holdings} == set(range(len(chosen)))
        assert looked.against("A").nothing
        assert len(looked.against("B").wrong) == len(chosen)


def test_what_a_partial_update_leaves_alone_must_stay_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a full update, which writes all of it, cures."""
    from weightsync.adapters.vllm import reload

    original = reload.reload_whole
    with served("qwen3_moe") as engine:
        looked = Looked(engine)
        parameters = [name for name, _ in looked.target._model.named_parameters()]
        experts = next(name for name in parameters if name.endswith("w2_weight"))
        for name in (EMBEDDING, experts):

            def careless(*arguments, name=name):
                seconds = original(*arguments)
                looked.parameter(name).data.view(-1)[0] += 1
                return seconds

            with ws.WeightSender(looked.source("A"), [ws.engine(engine.llm)]) as sender:
                sender.sync("norms", only=["*norm*"])
                with monkeypatch.context() as patch, pytest.raises(EnginePoisoned, match=name):
                    patch.setattr(reload, "reload_whole", careless)
                    sender.sync("careless", only=["*norm*"])
                sender.sync("B")
            looked.sync("B")
            assert looked.against("B").nothing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_odd_values_of_a_trainer_are_proven_as_far_as_they_can_be(dtype: str) -> None:
    """What a product cannot give back is no reason to refuse it; what lies open is told bit for
    bit."""
    with served("qwen3_moe", dtype=dtype) as engine:
        looked = Looked(engine)
        state = {name: tensor.clone() for name, tensor in looked.tensors("B").items()}
        tiny = torch.finfo(engine.dtype).tiny
        zeros, infinite = (f"model.layers.{n}.self_attn.o_proj.weight" for n in (0, 1))
        state[zeros][0, :3] = torch.tensor([-0.0, tiny / 4, -tiny / 4]).to(engine.dtype)
        state[infinite][3, 5] = -torch.inf
        for name in ("model.norm.weight", "model.layers.0.mlp.experts.3.up_proj.weight"):
            flip(state[name], 7, bit=1)
            state[name].view(-1)[9:11] = torch.tensor([torch.nan, -0.0]).to(engine.dtype)
        with ws.WeightSender(ws.StateDictSource(state), [ws.engine(engine.llm)]) as sender:
            receipt = sender.sync("odd")
        (worker,) = receipt.engines[0].workers
        assert worker.proof is not None and worker.proof.unproven.keys() == {infinite}
        assert receipt.levels["served"].tensors == len(state) - 1
        found = looked.against(state)
        assert found.unread == {infinite: probe.NOT_FINITE} and not found.wrong
        state[zeros][0, 0] = tiny
        assert looked.against(state).wrong.keys() == {zeros}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_padding_of_a_vocabulary_is_watched(
    load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is zeroed by the engine's loader: noise that it was started with must not stay."""
    from vllm import LLM

    from weightsync.adapters.vllm import reload

    model = load_trainer("qwen2_tied", "A")
    model.resize_token_embeddings(500)  # vLLM pads to 512
    model.save_pretrained(tmp_path)
    llm = LLM(
        model=str(tmp_path),
        load_format=load_format,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        weight_transfer_config={"backend": "weightsync"},
    )
    original = reload.reload_whole

    def careless(model: torch.nn.Module, *arguments):
        seconds = original(model, *arguments)
        flip(model.model.embed_tokens.weight, -1)
        return seconds

    with ws.WeightSender(ws.ModuleSource(model), [ws.engine(llm)]) as sender:
        assert sender.sync("right").proven == "served"
        monkeypatch.setattr(reload, "reload_whole", careless)
        with pytest.raises(EnginePoisoned, match=r"changed: model\.embed_tokens\.weight\[500:512"):
            sender.sync("wrong")
    llm.llm_engine.engine_core.shutdown()


ELSEWHERE = """
import json, sys
from test_vllm_models import served
from test_vllm_served import Looked, share
name, options = json.loads(sys.argv[1])
with served(name, **options) as engine:
    looked = Looked(engine)
    looked.sync("B")
    found = looked.against("B")
    kind = type(looked.target._model).__name__
print(json.dumps([kind, found.nothing, dict(share(looked)), looked.said.unproven]))
"""


@pytest.mark.parametrize("options", [{"model_impl": "transformers"}, {"enforce_eager": False}])
def test_other_models_of_the_engine_are_read_back_too(options: dict[str, object]) -> None:
    """Elsewhere: vLLM changes transformers' classes, and nothing is compiled in this process."""
    answer = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps(["qwen2_tied", options])],
        cwd=Path(__file__).parent,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    kind, right, levels, unproven = json.loads(answer.stdout.splitlines()[-1])
    assert kind.startswith("Transformers") == ("model_impl" in options)
    assert right and not unproven and list(levels) == ["served"]


SPECIAL = {
    torch.float32: (0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF),
    torch.bfloat16: (0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F),
    torch.float16: (0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF),
}
"""-0.0, denormals, the smallest normal number, the largest ones."""


@pytest.mark.parametrize("level", ["served", "spot"])
@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("dtype", SPECIAL)
@pytest.mark.parametrize(("rows", "width"), [(96, 160), (7, 5), (1200, 608)])
def test_packed_weights_come_back_by_value(
    rows: int,
    width: int,
    dtype: torch.dtype,
    level: str,
    along: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In vLLM's own kernels, whatever finite number stands there; some at a time; parts of two
    wider tensors in one weight, one below the other or side by side."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    monkeypatch.setattr(probe, "CHUNK_BYTES", 3 * (rows + width) * dtype.itemsize)
    drawn = torch.Generator().manual_seed(rows)
    words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    whole = torch.randint(-(1 << 31), 1 << 31, (rows, 2 * width), generator=drawn).to(words)
    whole = whole.view(dtype)
    whole[~whole.isfinite()] = 1.0
    patterns = torch.from_numpy(
        np.array(SPECIAL[dtype], f"u{dtype.itemsize}").view(f"i{dtype.itemsize}")
    )
    whole.view(words)[:, 0].narrow(0, 0, len(patterns)).copy_(patterns)
    layer = torch.nn.Module()
    if along == "rows":
        first = rows // 3
        weight = torch.cat([whole[:first, :width], whole[first:, width:]])
        places = [
            ((0, 0), (first, width), (0, 0)),
            ((first, width), (rows - first, width), (first, 0)),
        ]
    else:
        first = width // 3
        weight = torch.cat([whole[:, first : 2 * first], whole[:, width : 2 * width - first]], 1)
        places = [
            ((0, first), (rows, first), (0, 0)),
            ((0, width), (rows, width - first), (0, first)),
        ]
    layer.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
    UnquantizedLinearMethod().process_weights_after_loading(layer)
    parts = []
    for index, (offsets, lengths, at) in enumerate(places):
        holding = Holding(index, "here", offsets, lengths, level, by_value=True)
        start = offsets[0] * 2 * width + offsets[1]
        parts.append(probe.Part(holding, *at, *lengths, 2 * width, 1, start))
    packed = probe.PackedLayer(layer, rows, width, dtype, tuple(parts))
    seeds = np.array([secrets.randbits(64), secrets.randbits(64)], np.uint64)
    digests, unread = probe.Probe([packed]).digest(77, seeds)
    assert not unread
    for part, got in zip(parts, digests, strict=True):
        expected = digest(whole, part.holding, 77, int(seeds[part.holding.index]))
        assert tuple(map(int, got)) == expected
    assert probe.inexact(UnquantizedLinearMethod, (rows, width), dtype) is None


def test_a_kernel_that_does_not_give_back_what_it_packed_is_found_out() -> None:
    """As one would that rounds what it multiplies."""

    class Rounding:
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            weight = layer.weight.bfloat16().float()
            layer.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight, bias)

    class Broken:
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            raise RuntimeError("no such kernel")

    assert "does not give back" in (probe.inexact(Rounding, (64, 32), torch.float32) or "")
    assert "no such kernel" in (probe.inexact(Broken, (64, 32), torch.float32) or "")


def test_the_example_finds_what_vllms_own_reload_leaves_stale() -> None:
    script = Path(__file__).parents[2] / "examples" / "find_silent_corruption.py"
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if line.startswith(("qwen", "    model"))] == [
        "qwen2_tied: vLLM's own reload raised nothing",
        "qwen2_tied: but 1 of 26 tensors are not the checkpoint's:",
        "    model.embed_tokens.weight, held at lm_head.cpu_linear, [0:512, 0:128]",
        "qwen2_tied: synced, 1.4 MB proven as 'served'",
        "qwen3_moe: vLLM's own reload raised nothing",
        "qwen3_moe: but 48 of 69 tensors are not the checkpoint's:",
        *(
            f"    model.layers.0.mlp.experts.{expert}.down_proj.weight, held at "
            "model.layers.0.mlp.experts.routed_experts.w2_weight, [0:128, 0:64]"
            for expert in range(3)
        ),
        "qwen3_moe: synced, 2.5 MB proven as 'served'",
    ]
