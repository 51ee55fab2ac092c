"""What a model holds is read back where its loader put it: every slice of it, whatever its layout,
proves its part of the whole tensor, and a change of any of it shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from test_trace import CHECKPOINT, VOCAB, Engine, H, Weights, manifest_of, real_tensors, twin_of
from torch import nn

from weightsync.box import Box, tiles_exactly, union_numel
from weightsync.digest import derive_seeds, digest_tensors
from weightsync.held import HeldCopies, covered_box
from weightsync.manifest import Manifest
from weightsync.plan.trace import Region, trace_loader
from weightsync.regions import digest as digest_of
from weightsync.surroundings import Pinned, Surroundings, pads, remaining, written

SEED = 0x1234_5678_9ABC_DEF0


def held_by(
    engine: nn.Module, twin: nn.Module, manifest: Manifest, **arguments: object
) -> HeldCopies:
    trace = trace_loader(twin, twin.load_weights, manifest)
    return HeldCopies(manifest, trace, lambda: named(engine), **arguments)


def named(engine: nn.Module) -> dict[str, torch.Tensor]:
    return dict(engine.named_parameters()) | dict(engine.named_buffers())


def engine_of(rank: int, size: int, tensors: Mapping[str, torch.Tensor], **kind: bool) -> Engine:
    engine = Engine(rank, size, **kind)
    engine.load_weights(tensors.items())
    return engine


def expected(
    held: HeldCopies, manifest: Manifest, tensors: Mapping[str, torch.Tensor], seeds: np.ndarray
) -> np.ndarray:
    """By the definition: each box of the trainer's tensor."""
    rows = []
    for holding in held.holdings:
        spec = manifest.tensors[holding.index]
        part = tensors[spec.name][
            tuple(slice(o, o + n) for o, n in zip(holding.offsets, holding.lengths, strict=True))
        ]
        digest = digest_of(part, holding.box, spec.shape, int(seeds[holding.index]))
        rows.append((digest.first, digest.second))
    return np.array(rows, np.uint64)


def checked(
    rank: int, size: int, **kind: bool
) -> tuple[Engine, HeldCopies, Manifest, dict[str, torch.Tensor], np.ndarray]:
    manifest, tensors = manifest_of(CHECKPOINT), real_tensors(CHECKPOINT)
    if kind.get("tied"):
        tensors["lm_head.weight"] = tensors["embed.weight"]
    engine = engine_of(rank, size, tensors, **kind)
    held = held_by(engine, twin_of(lambda: Engine(rank, size, **kind)), manifest)
    return engine, held, manifest, tensors, derive_seeds(SEED, manifest.identities)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_every_part_that_was_loaded_is_read_back_as_what_it_is(
    rank: int, size: int, tied: bool
) -> None:
    _, held, manifest, tensors, seeds = checked(rank, size, tied=tied)
    assert held.unproven == ()
    assert {holding.index for holding in held.holdings} == set(range(len(manifest)))
    found = held.digest(seeds)
    assert not held.unread and not held.faults
    assert np.array_equal(found, expected(held, manifest, tensors, seeds))


def test_digests_of_all_ranks_add_up_to_those_of_the_whole_tensors() -> None:
    manifest, tensors = manifest_of(CHECKPOINT), real_tensors(CHECKPOINT)
    seeds = derive_seeds(SEED, manifest.identities)
    sums = np.zeros((len(manifest), 2), np.uint64)
    boxes: dict[int, dict[Box, None]] = defaultdict(dict)
    for rank in range(2):
        _, held, *_ = checked(rank, 2)
        for holding, digest in zip(held.holdings, held.digest(seeds), strict=True):
            if holding.box not in boxes[holding.index]:  # replicated: norms, the transposed conv
                sums[holding.index] += digest
            boxes[holding.index][holding.box] = None
    assert all(tiles_exactly(list(boxes[i]), spec.shape) for i, spec in enumerate(manifest.tensors))
    addresses = np.array([tensors[s.name].data_ptr() for s in manifest.tensors], np.uint64)
    assert np.array_equal(sums, digest_tensors(addresses, manifest.nbytes, seeds))


def test_a_change_of_any_element_changes_the_digest_of_its_holding_and_of_no_other() -> None:
    engine, held, _, _, seeds = checked(1, 2)
    before = held.digest(seeds).copy()
    for name, parameter in named(engine).items():
        flat = parameter.detach().reshape(-1)
        assert flat.data_ptr() == parameter.data_ptr()
        for at in range(flat.numel()):
            flat.view(torch.int32)[at] ^= 1
            rows = np.nonzero((held.digest(seeds) != before).any(axis=1))[0]
            flat.view(torch.int32)[at] ^= 1
            padded = name in ("embed.weight", "lm_head.weight") and at >= (VOCAB - 6) * H
            assert [held.holdings[row].holder for row in rows] == ([] if padded else [name])
    assert np.array_equal(held.digest(seeds), before)


def test_swapped_experts_halves_and_transposes_are_told_apart() -> None:
    engine, held, manifest, _, seeds = checked(0, 1)
    before = held.digest(seeds).copy()

    def differing() -> set[str]:
        rows = np.nonzero((held.digest(seeds) != before).any(axis=1))[0]
        return {manifest.tensors[held.holdings[row].index].name for row in rows}

    layer = engine.layers[0]
    w13 = layer["experts"].w13.data
    w13.copy_(torch.cat([w13[:, 6:], w13[:, :6]], dim=1))
    assert differing() == {f"layers.0.experts.{e}.{w}" for e in range(3) for w in ("w1", "w3")}
    w13.copy_(torch.cat([w13[:, 6:], w13[:, :6]], dim=1))
    assert differing() == set()
    w2 = layer["experts"].w2.data
    w2.copy_(w2[[1, 0, 2]])
    assert differing() == {"layers.0.experts.0.w2", "layers.0.experts.1.w2"}


def test_a_parameter_that_is_replaced_moved_or_restrided_is_read_where_it_is_now() -> None:
    engine, held, manifest, tensors, seeds = checked(0, 2)
    right = expected(held, manifest, tensors, seeds)
    assert np.array_equal(held.digest(seeds), right)
    qkv = engine.layers[0]["attn"]["qkv_proj"]
    old = qkv.weight
    qkv.weight = nn.Parameter(old.detach().clone(), requires_grad=False)
    old.data.fill_(float("nan"))
    assert np.array_equal(held.digest(seeds), right)
    for parameter in list(engine.parameters()):
        parameter.data = (
            torch.empty(parameter.shape[::-1])
            .permute(*reversed(range(parameter.dim())))
            .copy_(parameter.detach())
        )
        assert parameter.dim() < 2 or not parameter.is_contiguous() or 1 in parameter.shape
    assert np.array_equal(held.digest(seeds), right)
    assert not held.faults
    engine.layers[0]["mlp"]["down_proj"].weight.data[0, 0] += 1
    differs = (held.digest(seeds) != right).any(axis=1)
    assert [held.holdings[i].holder for i in np.nonzero(differs)[0]] == [
        "layers.0.mlp.down_proj.weight"
    ]


def test_a_parameter_of_another_shape_or_dtype_is_a_fault_and_its_holdings_unread() -> None:
    engine, held, _, _, seeds = checked(0, 1)
    experts = engine.layers[0]["experts"]
    experts.w13 = nn.Parameter(experts.w13.detach().unflatten(1, (2, 6)), requires_grad=False)
    engine.norm.weight = nn.Parameter(engine.norm.weight.detach().half(), requires_grad=False)
    del engine.layers[0]["attn"]["qkv_proj"]._parameters["bias"]
    digests = held.digest(seeds)
    assert [(f.kind, f.name) for f in held.faults] == [
        ("missing", "layers.0.attn.qkv_proj.bias"),
        ("shape", "layers.0.experts.w13"),
        ("dtype", "norm.weight"),
    ]
    assert {held.holdings[i].holder for i in held.unread} == {f.name for f in held.faults}
    assert (digests[sorted(held.unread)] == 0).all()
    assert held.holdings[0].holder == "embed.weight" and (digests[0] != 0).any()


class Odd(nn.Module):
    """Casts, computes, writes twice, writes through a transpose or flat, and takes steps."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (
            ("cast", (4,)),
            ("scaled", (4,)),
            ("twice", (4, 6)),
            ("across", (6, 4)),
            ("flat", (4, 6)),
            ("steps", (4, 3)),
            ("mixed", (2, 6)),
        ):
            dtype = torch.bfloat16 if name == "cast" else torch.float32
            data = torch.zeros(shape, dtype=dtype)
            self.register_parameter(name, nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            target = self.get_parameter(name).data
            if name == "scaled":
                target.copy_(weight * 2)
            elif name == "twice":
                target.copy_(weight)
                target.copy_(weight)
            elif name == "across":
                target.t().copy_(weight)
            elif name == "flat":
                target.view(-1).copy_(weight.view(2, 12).reshape(-1))
            elif name == "steps":
                target.copy_(weight[:, ::2])
            elif name == "mixed":
                target.copy_(weight[2:] + 1)
                target[0].copy_(weight[0])
            else:
                target.copy_(weight)


ODD = {
    n: (4,) if n in ("cast", "scaled") else (4, 6)
    for n in ("cast", "scaled", "twice", "across", "flat", "steps", "mixed")
}


def test_what_is_no_copy_is_named_with_its_reason_and_the_rest_is_read() -> None:
    manifest, tensors = manifest_of(ODD), real_tensors(ODD)
    engine = Odd()
    engine.load_weights(tensors.items())
    held = held_by(engine, twin_of(Odd), manifest)
    assert {manifest.tensors[i].name: why for i, why in held.unproven} == {
        "cast": "is cast from float32 to bfloat16 while it is loaded",
        "scaled": "goes through arithmetic in the engine's loader",
        "steps": "is taken apart by the engine's loader, in steps or repeats that make no box",
        "mixed": "goes through arithmetic in the engine's loader",
    }
    assert [(h.holder, h.offsets, h.lengths) for h in held.holdings] == [
        ("twice", (0, 0), (4, 6)),
        ("across", (0, 0), (4, 6)),
        ("flat", (0, 0), (4, 6)),
        ("mixed", (0, 0), (1, 6)),
    ]
    seeds = derive_seeds(SEED, manifest.identities)
    assert np.array_equal(held.digest(seeds), expected(held, manifest, tensors, seeds))


class Interleaved(nn.Module):
    """One tensor in every second row, the other in between; one written flat; one head by head."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("rows", (4, 6)), ("flat", (4, 6)), ("heads", (4, 6))):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "flat":
                self.flat.data.view(-1).copy_(weight.view(-1))
            elif name == "heads":
                self.heads.data.view(2, 2, 6).copy_(weight.view(2, 2, 6).transpose(0, 1))
            else:
                self.rows.data[0 if name == "even" else 1 :: 2].copy_(weight)


def test_steps_follow_a_parameter_into_other_strides_and_what_runs_across_does_not() -> None:
    shapes = {"even": (2, 6), "odd": (2, 6), "flat": (4, 6), "heads": (4, 6)}
    manifest, tensors = manifest_of(shapes), real_tensors(shapes)
    engine = Interleaved()
    engine.load_weights(tensors.items())
    held = held_by(engine, twin_of(Interleaved), manifest)
    assert [(h.holder, h.lengths) for h in held.holdings] == [
        ("rows", (2, 6)),
        ("rows", (2, 6)),
        ("flat", (4, 6)),
        ("heads", (4, 6)),
    ]
    seeds = derive_seeds(SEED, manifest.identities)
    right = expected(held, manifest, tensors, seeds)
    assert np.array_equal(held.digest(seeds), right)
    for parameter in engine.parameters():
        parameter.data = torch.empty(6, 4).t().copy_(parameter.detach())
    now = held.digest(seeds)
    assert [(f.kind, f.name) for f in held.faults] == [("engine", "flat")]
    assert list(held.unread) == [2]
    assert np.array_equal(np.delete(now, 2, 0), np.delete(right, 2, 0))


def test_parameters_that_are_read_another_way_are_left_out() -> None:
    engine, _, manifest, _, _ = checked(0, 1)
    held = held_by(
        engine, twin_of(Engine), manifest, skip={"layers.0.attn.qkv_proj.weight", "norm.weight"}
    )
    names = {manifest.tensors[h.index].name for h in held.holdings}
    assert set(CHECKPOINT) - names == {
        "norm.weight",
        *(f"layers.0.attn.{p}_proj.weight" for p in "qkv"),
    }
    assert held.unproven == ()


def test_a_tied_head_that_the_loader_skips_is_held_where_the_embedding_is() -> None:
    _, held, manifest, *_ = checked(0, 1, tied=True)
    head = [h for h in held.holdings if manifest.tensors[h.index].name == "lm_head.weight"]
    assert [(h.holder, h.lengths) for h in head] == [("embed.weight", (VOCAB, H))]


@pytest.mark.parametrize(
    ("shape", "region", "box"),
    [
        ((3, 4), (((4, 3), (1, 4), 0)), Box((0, 0), (3, 4))),
        ((3, 4), (((12,), (1,), 0)), Box((0, 0), (3, 4))),
        ((3, 4), (((2, 2), (1, 4), 5)), Box((1, 1), (2, 2))),
        ((3, 4), (((4,), (1,), 2)), None),
        ((3, 4), (((3, 2), (4, 2), 0)), None),
        ((3, 4), (((3, 4), (4, 0), 0)), None),
        ((2, 3, 4), (((4, 2, 3), (1, 12, 4), 0)), Box((0, 0, 0), (2, 3, 4))),
        ((6, 4), (((2, 3, 4), (12, 4, 1), 0)), Box((0, 0), (6, 4))),
        ((6, 4), (((3, 2, 4), (4, 12, 1), 0)), Box((0, 0), (6, 4))),
        ((4, 1, 3), (((3, 2), (1, 3), 6)), Box((2, 0, 0), (2, 1, 3))),
        ((), (((), (), 0)), Box((), ())),
        ((0, 4), (((0, 4), (4, 1), 0)), Box((0, 0), (0, 4))),
    ],
)
def test_a_region_covers_a_box_whatever_its_order(shape, region, box) -> None:
    assert covered_box(shape, Region(*region, None)) == box


# Surroundings


def test_pads_are_what_no_tensor_goes_to_and_a_change_of_one_shows() -> None:
    engine, *_ = checked(1, 2)
    twin = twin_of(lambda: Engine(1, 2))
    trace = trace_loader(twin, twin.load_weights, manifest_of(CHECKPOINT))
    boxes = written(trace)

    def padding() -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in named(engine).items():
            found.update(pads(name, parameter, boxes[name] or ()))
        return found

    assert {n: tuple(t.shape) for n, t in padding().items()} == {
        "embed.weight[4:6, 0:8]": (2, H),
        "lm_head.weight[4:6, 0:8]": (2, H),
    }
    around = Surroundings(padding)
    assert around.changed() == []
    around.note()
    engine.norm.weight.data += 1
    engine.embed.weight.data[3] += 1
    assert around.changed() == []
    engine.embed.weight.data[5, 7] = -0.0
    assert [(p.kind, p.name) for p in around.changed()] == [("changed", "embed.weight[4:6, 0:8]")]
    around.note()
    assert around.changed() == []


def test_what_is_left_of_a_box_is_disjoint_and_all_of_it() -> None:
    whole = Box.whole((5, 6, 4))
    boxes = [Box((0, 0, 0), (2, 6, 4)), Box((1, 2, 1), (4, 2, 2)), Box((4, 5, 3), (1, 1, 1))]
    left = remaining(whole, boxes)
    assert tiles_exactly([*left, *remaining(whole, left)], whole.lengths), (
        "disjoint, and nothing is lost"
    )
    assert sum(box.numel for box in left) == whole.numel - union_numel(boxes)
    assert all(one.intersect(two) is None for one in left for two in boxes)
    assert remaining(whole, []) == [whole] and remaining(whole, [whole]) == []


def test_surroundings_notice_what_is_gone_retyped_or_of_other_bytes() -> None:
    whole = torch.arange(12).reshape(3, 4)
    tensors = {
        "nan": torch.tensor([float("nan"), 0.0]),
        "steps": whole[:, ::2],
        "gone": torch.ones(2),
        "kind": torch.ones(2),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
    }
    around = Surroundings(lambda: dict(tensors))
    around.note()
    assert around.changed() == []
    whole[0, 1] = 99  # between the steps
    assert around.changed() == []
    tensors["nan"].view(torch.int32)[0] ^= 1  # another NaN
    tensors["steps"][2, 1] = 7
    del tensors["gone"]
    tensors["kind"] = torch.ones(2, dtype=torch.float64)
    assert [p.name for p in around.changed()] == ["nan", "steps", "gone", "kind"]


def test_pinned_tensors_may_change_but_not_move() -> None:
    model = nn.Linear(3, 2)
    pinned = Pinned(lambda: dict(model.named_parameters()))
    model.weight.data.fill_(7)
    assert pinned.moved() == []
    kept = model.weight.data
    model.weight.data = kept.clone()
    assert [(p.kind, p.name) for p in pinned.moved()] == [("moved", "weight")]
    model.weight.data = kept
    del model.bias
    assert [(p.kind, p.name) for p in pinned.moved()] == [("moved", "bias")]
