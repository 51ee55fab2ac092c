"""The engine's own loader, traced: the trace says exactly what it copies, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.box import Box
from weightsync.errors import PlanRefused, Problem, ProtocolError
from weightsync.manifest import Manifest, TensorSpec
from weightsync.messages import Described, Partial, WireProblem
from weightsync.plan import trace as trace_file
from weightsync.plan.lint import lint
from weightsync.plan.match import check_descriptions
from weightsync.plan.trace import Trace, trace_loader
from weightsync.target import Description

Weights = Iterable[tuple[str, torch.Tensor]]
Shapes = Mapping[str, tuple[int, ...]]

H, HEADS, KV, DIM, INNER, VOCAB, PADDED, EXPERTS = 8, 4, 2, 3, 6, 10, 12, 3
Q, K = HEADS * DIM, KV * DIM

CHECKPOINT: Shapes = {
    "embed.weight": (VOCAB, H),
    "layers.0.attn.q_proj.weight": (Q, H),
    "layers.0.attn.k_proj.weight": (K, H),
    "layers.0.attn.v_proj.weight": (K, H),
    "layers.0.attn.q_proj.bias": (Q,),
    "layers.0.attn.k_proj.bias": (K,),
    "layers.0.attn.v_proj.bias": (K,),
    "layers.0.attn.o_proj.weight": (H, Q),
    "layers.0.mlp.gate_proj.weight": (INNER, H),
    "layers.0.mlp.up_proj.weight": (INNER, H),
    "layers.0.mlp.down_proj.weight": (H, INNER),
    **{
        f"layers.0.experts.{e}.{part}": shape
        for e in range(EXPERTS)
        for part, shape in (("w1", (INNER, H)), ("w3", (INNER, H)), ("w2", (H, INNER)))
    },
    "layers.0.conv.weight": (H, INNER),
    "norm.weight": (H,),
    "scale": (),
    "lm_head.weight": (VOCAB, H),
}
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
STACKED: Mapping[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, -1.0), requires_grad=False)


class Holder(nn.Module):
    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, value)


class Engine(nn.Module):
    """Loads as inference engines do, each kind of parameter in its own way.

    Args:
        rank, size: of tensor parallelism: heads, inner dimension and vocabulary are split.
        tied: whether the head is the embedding.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, tied: bool = False) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        q, k, i = Q // size, max(K // size, DIM), INNER // size
        attention = nn.ModuleDict(
            {
                "qkv_proj": Holder(weight=parameter(q + 2 * k, H), bias=parameter(q + 2 * k)),
                "o_proj": Holder(weight=parameter(H, q)),
            }
        )
        mlp = nn.ModuleDict(
            {
                "gate_up_proj": Holder(weight=parameter(2 * i, H)),
                "down_proj": Holder(weight=parameter(H, i)),
            }
        )
        experts = Holder(w13=parameter(EXPERTS, 2 * i, H), w2=parameter(EXPERTS, H, i))
        layer = nn.ModuleDict(
            {
                "attn": attention,
                "mlp": mlp,
                "experts": experts,
                "conv": Holder(weight=parameter(INNER, H)),
            }
        )
        self.embed = Holder(weight=parameter(PADDED // size, H))
        self.layers = nn.ModuleList([layer])
        self.norm = Holder(weight=parameter(H))
        self.register_buffer("scale", torch.tensor(-1.0))
        self.lm_head = self.embed if tied else Holder(weight=parameter(PADDED // size, H))
        self.tied = tied

    def load_weights(self, weights: Weights) -> set[str]:
        parameters = dict(self.named_parameters()) | dict(self.named_buffers())
        loaded = set()
        for name, weight in weights:
            if "rotary" in name or (self.tied and name.startswith("lm_head")):
                continue
            for shard, (fused, part) in STACKED.items():
                if f".{shard}." in name:
                    name = name.replace(shard, fused)
                    self.load_part(parameters[name], weight, part)
                    break
            else:
                if ".experts." in name:
                    name = self.load_expert(parameters, name, weight)
                elif name.startswith(("embed", "lm_head")):
                    self.load_vocabulary(parameters[name], weight)
                elif name.endswith(("o_proj.weight", "down_proj.weight")):
                    self.load_row(parameters[name], weight)
                elif ".conv." in name:
                    parameters[name].data.copy_(weight.t())
                else:
                    default_loader(parameters[name], weight)
            loaded.add(name)
        return loaded

    def load_part(self, target: nn.Parameter, weight: torch.Tensor, part: str | int) -> None:
        rank, data = self.rank, target.data
        if isinstance(part, int):
            size = data.shape[0] // 2
            data = data.narrow(0, part * size, size)
        else:
            q, k = Q // self.size, max(K // self.size, DIM)
            offset, size = {"q": (0, q), "k": (q, k), "v": (q + k, k)}[part]
            data = data.narrow(0, offset, size)
            if part != "q" and self.size > KV:
                rank //= self.size // KV  # kv heads are repeated
        weight = weight.narrow(0, rank * size, size)
        assert data.shape == weight.shape
        data.copy_(weight)

    def load_row(self, target: nn.Parameter, weight: torch.Tensor) -> None:
        size = target.shape[1]
        target.data.copy_(weight.narrow(1, self.rank * size, size))

    def load_vocabulary(self, target: nn.Parameter, weight: torch.Tensor) -> None:
        size = target.shape[0]
        assert weight.shape[0] == VOCAB, f"the vocabulary is {VOCAB}"
        first = min(self.rank * size, VOCAB)
        weight = weight[first : first + size]
        target.data[: weight.shape[0]].copy_(weight)
        target.data[weight.shape[0] :].fill_(0)

    def load_expert(
        self, parameters: Mapping[str, torch.Tensor], name: str, weight: torch.Tensor
    ) -> str:
        prefix, expert, part = name.rsplit(".", 2)
        name = f"{prefix}.{'w2' if part == 'w2' else 'w13'}"
        data = parameters[name].data[int(expert)]
        size = INNER // self.size
        if part == "w2":
            data.copy_(weight.narrow(1, self.rank * size, size))
        else:
            half = data.narrow(0, 0 if part == "w1" else size, size)
            half.copy_(weight.narrow(0, self.rank * size, size))
        return name


def default_loader(target: torch.Tensor, weight: torch.Tensor) -> None:
    assert target.size() == weight.size(), f"{target.size()} against {weight.size()}"
    target.data.copy_(weight)


def manifest_of(shapes: Shapes, dtypes: Mapping[str, str] | None = None) -> Manifest:
    dtypes = dtypes or {}
    return Manifest(TensorSpec(n, dtypes.get(n, "float32"), s) for n, s in shapes.items())


def real_tensors(shapes: Shapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def twin_of(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def traced(
    make: Callable[[], nn.Module],
    manifest: Manifest,
    load: Callable[[Any, Weights], object] | None = None,
    *,
    whole: bool = True,
) -> tuple[Trace, Description]:
    twin = twin_of(make)
    before = {name: tensor._version for name, tensor in twin.named_parameters()}
    loader = (lambda weights: load(twin, weights)) if load else twin.load_weights
    trace = trace_loader(twin, loader, manifest)
    parameters = dict(twin.named_parameters(remove_duplicate=False))
    assert all(parameters[name]._version == version for name, version in before.items())
    buffers = {
        name: tensor
        for name, tensor in twin.state_dict(keep_vars=True).items()
        if not isinstance(tensor, nn.Parameter)
    }
    return trace, lint(trace, manifest, parameters, PACKED, buffers=buffers, whole=whole)


def described(
    shapes: Shapes,
    make: Callable[[], nn.Module] = Engine,
    load: Callable[[Any, Weights], object] | None = None,
    dtypes: Mapping[str, str] | None = None,
    *,
    whole: bool = True,
) -> tuple[Problem, ...]:
    return traced(make, manifest_of(shapes, dtypes), load, whole=whole)[1].problems


def replay(
    trace: Trace, manifest: Manifest, tensors: Mapping[str, torch.Tensor], engine: Any
) -> None:
    """Make the recorded copies and fills, as strided copies and by nothing else."""
    targets = dict(engine.named_parameters()) | dict(engine.named_buffers())
    for name, region, _ in trace.fills:
        view = torch.as_strided(targets[name].data, region.shape, region.stride, region.offset)
        view.fill_(0)
    for copy in trace.copies:
        assert copy.source is not None
        source = tensors[manifest.tensors[copy.index].name]
        target = targets[copy.parameter].data
        s, d = copy.source, copy.destination
        torch.as_strided(target, d.shape, d.stride, d.offset).copy_(
            torch.as_strided(source, s.shape, s.stride, s.offset)
        )


def same_bytes(one: nn.Module, other: nn.Module) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(
            a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)
        ), name


SPLITS = [(0, 1), (0, 2), (1, 2)]


# What the trace says


@pytest.mark.parametrize(("rank", "size"), SPLITS)
@pytest.mark.parametrize("tied", [False, True])
def test_replaying_the_trace_is_running_the_loader(rank: int, size: int, tied: bool) -> None:
    shapes = {n: s for n, s in CHECKPOINT.items() if not (tied and n == "lm_head.weight")}
    manifest, tensors = manifest_of(shapes), real_tensors(shapes)
    trace, description = traced(lambda: Engine(rank, size, tied=tied), manifest)
    assert description.problems == ()
    loaded, replayed = (Engine(rank, size, tied=tied) for _ in range(2))
    loaded.load_weights(tensors.items())
    assert all((tensor != -1).all() for tensor in loaded.state_dict().values()), "left as it was"
    replay(trace, manifest, tensors, replayed)
    same_bytes(loaded, replayed)


def copies_of(
    trace: Trace, manifest: Manifest, name: str
) -> list[tuple[Box | None, str, Box | None]]:
    index = manifest.index[name]
    return [
        (c.source.box if c.source else None, c.parameter, c.destination.box)
        for c in trace.copies
        if c.index == index
    ]


def test_boxes_are_those_that_the_second_of_two_ranks_takes() -> None:
    manifest = manifest_of(CHECKPOINT)
    trace, _ = traced(lambda: Engine(1, 2), manifest)
    q, k, i = Q // 2, K // 2, INNER // 2
    expected = {
        "attn.q_proj.weight": (Box((q, 0), (q, H)), "attn.qkv_proj.weight", (0, 0)),
        "attn.k_proj.weight": (Box((k, 0), (k, H)), "attn.qkv_proj.weight", (q, 0)),
        "attn.v_proj.weight": (Box((k, 0), (k, H)), "attn.qkv_proj.weight", (q + k, 0)),
        "attn.v_proj.bias": (Box((k,), (k,)), "attn.qkv_proj.bias", (q + k,)),
        "attn.o_proj.weight": (Box((0, q), (H, q)), "attn.o_proj.weight", (0, 0)),
        "mlp.up_proj.weight": (Box((i, 0), (i, H)), "mlp.gate_up_proj.weight", (i, 0)),
        "experts.2.w3": (Box((i, 0), (i, H)), "experts.w13", (2, i, 0)),
        "experts.1.w2": (Box((0, i), (H, i)), "experts.w2", (1, 0, 0)),
    }
    for name, (source, target, at) in expected.items():
        lengths = (1,) * (len(at) - len(source.lengths)) + source.lengths
        copies = copies_of(trace, manifest, f"layers.0.{name}")
        assert copies == [(source, f"layers.0.{target}", Box(at, lengths))]
    [padded] = copies_of(trace, manifest, "embed.weight")
    assert padded == (Box((6, 0), (4, H)), "embed.weight", Box((0, 0), (4, H)))
    assert [region.box for name, region, _ in trace.fills if name == "embed.weight"] == [
        Box((4, 0), (2, H))
    ]


def test_a_transposed_copy_is_recorded_as_what_it_is_and_not_as_a_box() -> None:
    manifest = manifest_of(CHECKPOINT)
    trace, _ = traced(Engine, manifest)
    [copy] = [c for c in trace.copies if c.parameter == "layers.0.conv.weight"]
    assert copy.source is not None and copy.source.box is None
    assert copy.source.shape == (INNER, H) and copy.source.stride == (1, INNER)
    assert copy.destination.box == Box.whole((INNER, H))


def test_a_repeated_kv_head_is_taken_by_several_ranks() -> None:
    part = manifest_of({n: s for n, s in CHECKPOINT.items() if n.endswith("k_proj.weight")})
    boxes = []
    for rank in range(4):
        with torch.device("meta"):
            twin = Engine(rank, 4)
        trace = trace_loader(twin, twin.load_weights, part)
        boxes += [copy.source.box for copy in trace.copies if copy.source]
    first, second = Box((0, 0), (DIM, H)), Box((DIM, 0), (DIM, H))
    assert boxes == [first, first, second, second]


def test_tied_parameters_are_one_under_the_first_name() -> None:
    trace, _ = traced(lambda: Engine(tied=True), manifest_of({"embed.weight": (VOCAB, H)}))
    assert trace.aliases["lm_head.weight"] == trace.aliases["embed.weight"] == "embed.weight"
    assert {copy.parameter for copy in trace.copies} == {"embed.weight"}


def test_what_goes_through_arithmetic_has_no_source_but_keeps_its_name() -> None:
    def doubling(engine: Engine, weights: Weights) -> None:
        engine.load_weights((n, w * 2 if n == "norm.weight" else w) for n, w in weights)

    manifest = manifest_of(CHECKPOINT)
    trace, description = traced(Engine, manifest, doubling)
    assert description.problems == ()
    [copy] = [c for c in trace.copies if c.parameter == "norm.weight"]
    assert copy.source is None and copy.index == manifest.index["norm.weight"]


@pytest.mark.parametrize(
    "spelled", [lambda w: w.bfloat16(), lambda w: w.half().view(-1).to(torch.bfloat16)]
)
def test_a_cast_that_hides_in_the_loader_is_a_problem_too(spelled) -> None:
    def casting(engine: Engine, weights: Weights) -> None:
        for name, weight in weights:
            if name == "norm.weight":
                engine.norm.weight.data.copy_(spelled(weight))
            else:
                engine.load_weights([(name, weight)])

    def engine() -> Engine:
        found = Engine()
        found.norm.weight = torch.nn.Parameter(
            torch.empty(H, dtype=torch.bfloat16, device="meta"), requires_grad=False
        )
        return found

    _, description = traced(engine, manifest_of(CHECKPOINT), casting)
    assert [(p.kind, p.name) for p in description.problems] == [("dtype", "norm.weight")]


def test_only_the_parts_that_are_not_whole_are_described_as_partial() -> None:
    manifest = manifest_of(CHECKPOINT)
    assert traced(Engine, manifest)[1].partial == ()
    partial = dict(traced(lambda: Engine(0, 2), manifest)[1].partial)
    names = {manifest.tensors[index].name for index in partial}
    assert names == CHECKPOINT.keys() - {"norm.weight", "scale", "layers.0.conv.weight"}
    assert partial[manifest.index["layers.0.attn.o_proj.weight"]] == Box((0, 0), (H, Q // 2))


def test_tracing_allocates_nothing_and_leaves_the_twin_on_meta() -> None:
    shapes = {**CHECKPOINT, "norm.weight": (H,)}
    twin = twin_of(Engine)
    trace_loader(twin, twin.load_weights, manifest_of(shapes))
    assert all(tensor.device.type == "meta" for tensor in twin.state_dict().values())


# What does not fit: a problem each, by name


def only(problems: Sequence[Problem]) -> Problem:
    assert len(problems) == 1, "\n".join(map(str, problems))
    return problems[0]


def without(*names: str) -> Shapes:
    assert CHECKPOINT.keys() >= set(names)
    return {name: shape for name, shape in CHECKPOINT.items() if name not in names}


def test_a_whole_checkpoint_has_no_problem() -> None:
    assert described(CHECKPOINT) == ()


@pytest.mark.parametrize("name", ["rotary.inv_freq", "norm.bias", "layers.7.mlp.up_proj.weight"])
def test_a_tensor_that_the_loader_skips_or_does_not_find_is_unknown(name: str) -> None:
    problem = only(described({**CHECKPOINT, name: (H,)}))
    assert (problem.kind, problem.name) == ("unknown", name)


def test_an_auto_loaders_complaint_is_an_unknown_tensor() -> None:
    def auto(engine: Engine, weights: Weights) -> None:
        def checked() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if name.startswith("visual."):
                    raise ValueError(
                        f"There is no module or parameter named {name!r} in Engine. "
                        "The available parameters are: ..."
                    )
                yield name, weight

        engine.load_weights(checked())

    problem = only(described({"visual.patch": (3,), **CHECKPOINT}, load=auto))
    assert (problem.kind, problem.name) == ("unknown", "visual.patch")


def test_a_tensor_that_nobody_sends_is_missing_under_the_engines_name() -> None:
    problem = only(described(without("norm.weight")))
    assert (problem.kind, problem.name) == ("missing", "norm.weight")
    assert "0 of 8" in problem.detail


def test_only_q_of_a_fused_qkv_is_missing_with_the_checkpoints_names() -> None:
    names = [f"layers.0.attn.{part}_proj.weight" for part in "kv"]
    problem = only(described(without(*names)))
    assert problem.kind == "missing"
    assert problem.name == "layers.0.attn.{q_proj, k_proj, v_proj}.weight"
    assert f"{Q * H} of {(Q + 2 * K) * H} elements" in problem.detail
    assert "layers.0.attn.qkv_proj.weight" in problem.detail


def test_one_expert_of_a_stack_is_missed() -> None:
    problem = only(described(without("layers.0.experts.1.w3")))
    assert (problem.kind, problem.name) == ("missing", "layers.0.experts.w13")
    assert f"{5 * INNER * H} of {6 * INNER * H}" in problem.detail


def test_a_pad_that_nobody_fills_is_missed() -> None:
    def unpadded(engine: Engine, weights: Weights) -> None:
        for name, weight in weights:
            if name == "embed.weight":
                engine.embed.weight.data[:VOCAB].copy_(weight)
            else:
                engine.load_weights([(name, weight)])

    problem = only(described(CHECKPOINT, load=unpadded))
    assert (problem.kind, problem.name) == ("missing", "embed.weight")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("norm.weight", (H + 1,)),
        ("norm.weight", (H - 1,)),
        ("norm.weight", (H, 1)),
        ("norm.weight", (1,)),
        ("scale", (2,)),
        ("embed.weight", (PADDED, H)),
        ("embed.weight", (VOCAB, H + 1)),
        ("layers.0.attn.q_proj.weight", (Q - 1, H)),
        ("layers.0.attn.q_proj.weight", (Q, H + 1)),
        ("layers.0.attn.q_proj.weight", (Q, H, 1)),
        ("layers.0.attn.q_proj.weight", (Q,)),
        ("layers.0.conv.weight", (INNER, H)),
        ("layers.0.experts.0.w2", (INNER, H)),
    ],
)
def test_another_shape_is_a_problem_of_that_tensor(name: str, shape: tuple[int, ...]) -> None:
    problems = described({**CHECKPOINT, name: shape})
    assert ("shape", name) in {(problem.kind, problem.name) for problem in problems}
    others = {problem.name for problem in problems} - {name}
    assert len(others) <= 1, "more than the tensor and the parameter that it would have filled"


def test_a_tensor_that_the_loader_would_broadcast_is_refused() -> None:
    """torch would spread one row, or one number, over the whole parameter and say nothing."""

    def careless(engine: Engine, weights: Weights) -> None:
        for name, weight in weights:
            if name == "norm.weight":
                engine.norm.weight.data.copy_(weight)
            else:
                engine.load_weights([(name, weight)])

    assert described(CHECKPOINT, load=careless) == ()
    real = Engine()
    careless(real, [("norm.weight", torch.ones(1))])
    assert (real.norm.weight == 1).all(), "the loader does not broadcast after all"
    problems = described({**CHECKPOINT, "norm.weight": (1,)}, load=careless)
    assert ("shape", "norm.weight") in {(problem.kind, problem.name) for problem in problems}


def test_a_tensor_that_is_too_long_is_found_by_the_parts_that_nobody_takes() -> None:
    """Fused loaders narrow what they get; the rest of it would be dropped without a word."""
    name = "layers.0.attn.q_proj.weight"
    manifest = manifest_of({**CHECKPOINT, name: (Q + 4, H)})
    _, description = traced(Engine, manifest)
    assert description.problems == ()
    with pytest.raises(PlanRefused) as caught:
        check_descriptions("toy", manifest, [("toy/0", on_the_wire(description))])
    problem = only(caught.value.problems)
    assert (problem.kind, problem.name) == ("shape", name)
    assert f"takes {Q * H} of {(Q + 4) * H}" in problem.detail


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int32"])
def test_another_dtype_is_a_problem_even_though_the_loader_would_cast(dtype: str) -> None:
    name = "layers.0.mlp.up_proj.weight"
    problem = only(described(CHECKPOINT, dtypes={name: dtype}))
    assert (problem.kind, problem.name) == ("dtype", name)
    assert f"torch.{dtype}" in problem.detail and "torch.float32" in problem.detail


def forgiving(engine: Engine, weights: Weights) -> None:
    """Takes the last norm under another name as well."""
    engine.load_weights((n.replace("final_norm", "norm"), w) for n, w in weights)


def takes_both(engine: Engine, weights: Weights) -> None:
    """Writes a tied head over its embedding instead of skipping it."""
    engine.tied = False
    names = {"lm_head.weight": "embed.weight"}
    engine.load_weights((names.get(n, n), w) for n, w in weights)


@pytest.mark.parametrize(
    ("extra", "tied", "load", "other"),
    [
        ("lm_head.weight", True, None, "embed.weight"),
        ("lm_head.weight", True, takes_both, "embed.weight"),
        ("final_norm.weight", False, forgiving, "norm.weight"),
    ],
    ids=["skipped", "written over", "another name"],
)
def test_a_second_tensor_for_the_same_memory_is_tied_to_the_first(
    extra: str, tied: bool, load, other: str
) -> None:
    """Whether it may be left out is for who has the bytes to say."""
    manifest = manifest_of(CHECKPOINT | {extra: CHECKPOINT[other]})
    _, description = traced(lambda: Engine(tied=tied), manifest, load)
    assert description.problems == ()
    assert description.tied == ((manifest.index[extra], manifest.index[other]),)


def test_a_tied_head_of_another_shape_or_without_its_embedding_is_unknown() -> None:
    for shapes in ({**CHECKPOINT, "lm_head.weight": (VOCAB, 1)}, without("embed.weight")):
        problems = described(shapes, lambda: Engine(tied=True))
        assert ("unknown", "lm_head.weight") in {(p.kind, p.name) for p in problems}


def test_a_tensor_that_fills_only_a_part_of_anothers_place_is_a_duplicate() -> None:
    def overlapping(engine: Engine, weights: Weights) -> None:
        for name, weight in weights:
            if name == "norm.head":
                engine.norm.weight.data[: weight.shape[0]].copy_(weight)
            else:
                engine.load_weights([(name, weight)])

    problem = only(described({**CHECKPOINT, "norm.head": (3,)}, load=overlapping))
    assert (problem.kind, problem.name) == ("duplicate", "norm.weight")


def test_a_persistent_buffer_that_no_tensor_goes_to_is_named() -> None:
    _, description = traced(Engine, manifest_of(without("scale")))
    assert description.untouched == ("scale",) and description.problems == ()
    assert traced(Engine, manifest_of(CHECKPOINT))[1].untouched == ()


# A part of a model, declared as such


PART = {
    name: CHECKPOINT[name]
    for name in CHECKPOINT
    if name.startswith(("layers.0.mlp.down_proj", "norm", "layers.0.attn.o_proj"))
}


def test_a_declared_part_may_leave_other_modules_alone() -> None:
    assert described(PART, whole=False) == ()
    assert {problem.kind for problem in described(PART)} == {"missing"}


@pytest.mark.parametrize(
    ("extra", "missing"),
    [
        ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.{gate_proj, up_proj}.weight"),
        ("layers.0.experts.1.w3", "layers.0.experts.w13"),
        ("layers.0.attn.q_proj.bias", "layers.0.attn.{q_proj, k_proj, v_proj}.weight"),
        ("layers.7.norm.weight", "layers.7.norm.weight"),
    ],
    ids=["half of a fused pair", "one expert", "a bias without its weight", "unknown"],
)
def test_a_declared_part_never_touches_a_part_of_a_module(extra: str, missing: str) -> None:
    shapes = {**PART, extra: CHECKPOINT.get(extra, (H,))}
    problems = described(shapes, whole=False)
    assert missing in {problem.name for problem in problems}, problems
    assert all(p.name != "norm.weight" and "o_proj" not in p.name for p in problems)


def test_all_problems_are_reported_at_once_and_spoil_no_other_tensor() -> None:
    shapes = dict(without("layers.0.mlp.down_proj.weight"))
    shapes = {"aaa.first": (1,), **shapes, "zzz.last": (1,), "norm.weight": (H + 1,)}
    manifest = manifest_of(shapes, {"lm_head.weight": "float16"})
    trace, description = traced(Engine, manifest)
    found = {(problem.kind, problem.name) for problem in description.problems}
    assert found >= {
        ("unknown", "aaa.first"),
        ("unknown", "zzz.last"),
        ("shape", "norm.weight"),
        ("dtype", "lm_head.weight"),
        ("missing", "layers.0.mlp.down_proj.weight"),
    }
    assert {name for kind, name in found} == {
        "aaa.first", "zzz.last", "norm.weight", "lm_head.weight", "layers.0.mlp.down_proj.weight",
    }  # fmt: skip
    assert {manifest.tensors[index].name for index in trace.failures} == {
        "aaa.first", "zzz.last", "norm.weight",
    }  # fmt: skip
    tensors = {
        n: t for n, t in real_tensors(shapes).items() if manifest.index[n] not in trace.failures
    }
    good = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    loaded, replayed = Engine(), Engine()
    loaded.load_weights(good.items())
    good_trace = Trace(
        copies=[c for c in trace.copies if manifest.tensors[c.index].name in good],
        fills=[fill for fill in trace.fills if fill[0] != "lm_head.weight"],
    )
    replay(good_trace, manifest, good, replayed)
    same_bytes(loaded, replayed)


def test_a_loader_that_chokes_on_everything_ends_and_says_what_it_did_not_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace_file, "MAX_RESTARTS", 4)

    def broken(_: Engine, weights: Weights) -> None:
        for name, _weight in weights:
            raise RuntimeError(f"no {name}")

    trace, description = traced(Engine, manifest_of(CHECKPOINT), broken)
    names = list(CHECKPOINT)
    assert len(trace.failures) == 4 and len(trace.unlooked) == len(names) - 4
    [problem] = [problem for problem in description.problems if problem.kind == "loader"]
    assert problem.name == names[4] and f"{len(names) - 5} more" in problem.detail


def test_a_loader_that_fails_before_its_first_tensor_is_not_blamed_on_one() -> None:
    def broken(_: Engine, weights: Weights) -> None:
        raise RuntimeError("no config")

    with pytest.raises(RuntimeError, match="no config"):
        traced(Engine, manifest_of(CHECKPOINT), broken)


# What all workers of an engine say together


def on_the_wire(description: Description, rank: int = 0) -> Described:
    return Described(
        rank=rank,
        manifest_hash="",
        problems=tuple(WireProblem(p.kind, p.name, p.detail) for p in description.problems),
        partial=tuple(Partial(i, b.offsets, b.lengths) for i, b in description.partial),
        tied=description.tied,
        also=description.also,
        untouched=description.untouched,
        seconds=0.0,
    )


def says(*parts: tuple[int, tuple[int, ...], tuple[int, ...]], rank: int = 0) -> Described:
    return Described(rank, "", (), tuple(Partial(*part) for part in parts), (), (), (), 0.0)


def match(shape: tuple[int, ...], *workers: Described) -> None:
    manifest = manifest_of({"first": (2,), "w": shape})
    check_descriptions("toy", manifest, [(f"toy/{i}", worker) for i, worker in enumerate(workers)])


def test_two_ranks_take_the_whole_checkpoint_together() -> None:
    manifest = manifest_of(CHECKPOINT)
    both = [on_the_wire(traced(lambda r=r: Engine(r, 2), manifest)[1], r) for r in range(2)]  # type: ignore[misc]
    check_descriptions("toy", manifest, [("toy/0", both[0]), ("toy/1", both[1])])
    with pytest.raises(PlanRefused):
        check_descriptions("toy", manifest, [("toy/0", both[0]), ("toy/1", both[0])])


@pytest.mark.parametrize(
    "workers",
    [
        [says()],
        [says(), says()],
        [says((1, (0, 0), (3, 4)), (1, (3, 0), (3, 4)))],
        [says((1, (0, 0), (3, 4))), says((1, (3, 0), (3, 4)))],
        [says((1, (0, 0), (6, 2))), says((1, (0, 2), (6, 2)))],
        [says((1, (0, 0), (4, 4))), says((1, (2, 0), (4, 4)))],
        [says((1, (0, 0), (3, 4))), says((1, (0, 0), (3, 4))), says((1, (3, 0), (3, 4)))],
        [says((1, (0, 0), (1, 4))), says()],
    ],
    ids=["whole", "both whole", "halves", "rows", "columns", "overlap", "repeated", "one whole"],
)
def test_what_is_covered_is_accepted(workers: list[Described]) -> None:
    match((6, 4), *workers)


@pytest.mark.parametrize(
    ("workers", "taken"),
    [
        ([says((1, (0, 0), (3, 4)))], 12),
        ([says((1, (0, 0), (3, 4))), says((1, (0, 0), (3, 4)))], 12),
        ([says((1, (0, 0), (3, 4))), says((1, (4, 0), (2, 4)))], 20),
        ([says((1, (0, 0), (4, 4))), says((1, (1, 0), (4, 4)))], 20),
        ([says((1, (0, 0), (6, 3))), says((1, (0, 0), (5, 4)))], 23),
        ([says((1, (0, 0), (0, 4)))], 0),
    ],
    ids=["half", "the same half", "a gap", "overlap hides a gap", "a corner", "nothing"],
)
def test_what_is_left_untaken_is_refused_by_name(workers: list[Described], taken: int) -> None:
    with pytest.raises(PlanRefused) as caught:
        match((6, 4), *workers)
    problem = only(caught.value.problems)
    assert (problem.kind, problem.name) == ("shape", "w")
    assert f"takes {taken} of 24" in problem.detail and caught.value.engine == "toy"


@pytest.mark.parametrize(
    "part",
    [
        (2, (0, 0), (1, 1)),
        (-1, (0, 0), (1, 1)),
        (2**62, (0,), (1,)),
        (1, (0,), (1,)),
        (1, (0, 0), (7, 4)),
        (1, (6, 0), (1, 4)),
        (1, (-1, 0), (2, 4)),
        (1, (0, 0), (-1, 4)),
        (1, (0, 0), (6,)),
        (1, (2**62, 0), (2**62, 1)),
    ],
)
def test_a_part_that_the_manifest_does_not_have_is_a_protocol_error(
    part: tuple[int, tuple[int, ...], tuple[int, ...]],
) -> None:
    with pytest.raises(ProtocolError, match="toy/1"):
        match((6, 4), says(), says(part))


def test_a_problem_of_all_workers_is_told_once_and_one_of_some_names_them() -> None:
    everywhere, somewhere = WireProblem("unknown", "a", "?"), WireProblem("missing", "b", "?")
    workers = [
        Described(0, "", (everywhere,), (), (), (), (), 0.0),
        Described(1, "", (everywhere, somewhere), (), (), (), (), 0.0),
    ]
    with pytest.raises(PlanRefused) as caught:
        match((6, 4), *workers)
    assert [(p.name, p.workers) for p in caught.value.problems] == [("a", ()), ("b", ("toy/1",))]
    assert "nothing has moved" in str(caught.value) and caught.value.remedy


def test_the_remedy_of_a_dtype_problem_is_the_cast_to_declare() -> None:
    manifest = manifest_of(CHECKPOINT, dict.fromkeys(CHECKPOINT, "float64"))
    described = on_the_wire(traced(Engine, manifest)[1])
    with pytest.raises(PlanRefused) as caught:
        check_descriptions("toy", manifest, [("toy/0", described)])
    assert caught.value.remedy is not None
    assert "ModuleSource(model, dtype=torch.float32)" in caught.value.remedy
    assert f"{len(CHECKPOINT) - PlanRefused.SHOWN} more" in str(caught.value)
