"""Where a packing function moves elements: learnt from it, and boxes read where they went."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from weightsync.adapters.vllm.packing import Packing, _split, learn
from weightsync.adapters.vllm.packing import _learn_all as learn_in_full
from weightsync.adapters.vllm.readable import _boxes, _padded
from weightsync.box import Box
from weightsync.regions import RegionTable, digest


def blocked(weight: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """Tiles of that size one after the other, row by row of tiles; columns outermost in a tile."""
    experts, rows, columns = weight.shape
    tiles = weight.reshape(experts, rows // high, high, columns // wide, wide)
    return tiles.permute(0, 1, 3, 4, 2).reshape(weight.shape).contiguous()


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Pairs of columns beside each other, for sixteen rows at a time: as AMX kernels want it."""
    experts, rows, columns = weight.shape
    found = weight.reshape(experts, rows // 16, 16, columns // 2, 2)
    return found.permute(0, 1, 3, 2, 4).reshape(weight.shape).contiguous()


def shuffled(weight: torch.Tensor) -> torch.Tensor:
    """No blocked layout at all."""
    numel = weight[0].numel()
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(5))
    return weight.flatten(1)[:, order].reshape(weight.shape)


PACKS = {
    "plain": lambda w: w.clone(),
    "transposed": lambda w: w.transpose(1, 2).reshape(w.shape).contiguous(),
    "columns of sixteen rows": lambda w: blocked(w, 16, w.shape[2]),
    "tiles": lambda w: blocked(w, 8, 4),
    "interleaved": interleaved,
    "shuffled": shuffled,
}
BOXES = [
    ((0, 3), (0, 48), (0, 20)),
    ((1, 1), (0, 48), (0, 20)),
    ((0, 3), (5, 30), (3, 9)),
    ((2, 1), (16, 16), (0, 20)),
    ((1, 2), (47, 1), (19, 1)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pack", PACKS)
def test_any_box_is_read_where_packing_put_it(pack: str, dtype: torch.dtype) -> None:
    shape = (3, 48, 20)
    drawn = torch.Generator().manual_seed(1)
    nbytes = 3 * 48 * 20 * dtype.itemsize
    weight = torch.randint(0, 256, (nbytes,), generator=drawn).to(torch.uint8)
    weight = weight.view(dtype).reshape(shape)
    packing = learn(PACKS[pack], 48, 20, dtype)
    assert isinstance(packing, Packing)
    assert (packing.gather is None) == (pack != "shuffled")
    memory = packing.plain(PACKS[pack](weight.view(torch.uint8 if dtype.itemsize == 1 else dtype)))
    for experts, rows, columns in BOXES:
        box = Box(*zip(experts, rows, columns, strict=True))
        spans = [
            (first, n, s)
            for (first, n), s in zip((experts, rows, columns), (960, 20, 1), strict=True)
        ]
        start = sum(first * step for first, _, step in spans)
        pieces = list(packing.pieces(*spans, start))
        table = RegionTable([piece.placed(0, memory) for piece in pieces], 1)
        part = weight[tuple(slice(o, o + n) for o, n in (experts, rows, columns))]
        expected = digest(part, box, shape, 99)
        assert table.digest(np.array([99], np.uint64)).tolist() == [
            [expected.first, expected.second]
        ]
        assert sum(piece.view(memory).numel() for piece in pieces) == box.numel


def reversed_bits(weight: torch.Tensor) -> torch.Tensor:
    """Of the numbers of 256 elements: a blocked layout, of as many blocks as there can be."""
    return weight.reshape(-1, *[2] * 8).permute(0, *range(8, 0, -1)).reshape(weight.shape).clone()


def test_a_packing_of_more_blocks_than_a_region_has_dimensions_is_gathered() -> None:
    packing = learn(reversed_bits, 16, 16, torch.float32)
    assert isinstance(packing, Packing)
    weight = torch.randn(3, 16, 16)
    memory = packing.plain(reversed_bits(weight))
    pieces = packing.pieces((0, 3, 256), (0, 16, 16), (0, 16, 1), 0)
    table = RegionTable([piece.placed(0, memory) for piece in pieces], 1)
    expected = digest(weight, Box.whole((3, 16, 16)), (3, 16, 16), 7)
    assert table.digest([7]).tolist() == [[expected.first, expected.second]]


@pytest.mark.parametrize("pack", ["plain", "columns of sixteen rows", "tiles", "interleaved"])
def test_a_large_expert_is_packed_no_more_than_once(pack: str) -> None:
    """An engine waits while its packing is learnt: that must not take many times what packing
    takes, nor many times the memory of the experts."""
    sizes = []

    def counted(weight: torch.Tensor) -> torch.Tensor:
        sizes.append(weight.numel())
        return PACKS[pack](weight)

    found = learn(counted, 4096, 64, torch.bfloat16)
    assert isinstance(found, Packing) and found.gather is None
    assert sum(size >= 4096 * 64 for size in sizes) <= 1
    assert found == learn_in_full(PACKS[pack], 4096, 64, torch.bfloat16)


def otherwise_when_large(weight: torch.Tensor) -> torch.Tensor:
    return PACKS["tiles" if weight.shape[1] > 128 else "interleaved"](weight)


@pytest.mark.parametrize("pack", [PACKS["transposed"], PACKS["shuffled"], otherwise_when_large])
def test_what_few_rows_say_is_not_believed_of_all(pack) -> None:
    found = learn(pack, 256, 16, torch.bfloat16)
    full = learn_in_full(pack, 256, 16, torch.bfloat16)
    assert isinstance(found, Packing) and isinstance(full, Packing) and found == full
    assert (found.gather is None) == (full.gather is None)
    if found.gather is not None and full.gather is not None:
        assert torch.equal(found.gather, full.gather)


def drops(weight: torch.Tensor) -> torch.Tensor:
    found = weight.clone()
    found[:, 3, 4] = found[:, 0, 0]
    return found


REFUSED = {
    "drops one": (drops, "than to move"),
    "mixes experts": (lambda w: w.flip(0), "than to move"),
    "computes": (lambda w: w * 2, "than to move"),
    "casts": (lambda w: w.double(), "changes the shape or the dtype"),
    "pads": (lambda w: torch.nn.functional.pad(w, (0, 4)), "changes the shape or the dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_more_than_move_elements_is_refused(case: str) -> None:
    pack, why = REFUSED[case]
    found = learn(pack, 16, 8, torch.float32)
    assert isinstance(found, str) and why in found


@pytest.mark.parametrize("extents", [(7,), (4, 3), (2, 3, 4)])
def test_ranges_fall_apart_into_boxes_of_digits(extents: tuple[int, ...]) -> None:
    from weightsync.adapters.vllm.packing import Digit

    radix = [Digit(extent, 0) for extent in extents]
    units = [int(np.prod(extents[:d])) for d in range(len(extents))]
    total = int(np.prod(extents))
    for low, high in itertools.combinations(range(total + 1), 2):
        numbers = [
            sum(value * unit for value, unit in zip(values, units, strict=True))
            for digits in _split(low, high - low, radix)
            for values in itertools.product(*(range(f, f + n) for f, n in digits))
        ]
        assert sorted(numbers) == list(range(low, high))


def test_rows_that_padding_drives_apart_are_followed() -> None:
    """A gate and an up of four rows each, padded to six; rows two to seven of a tensor of its own
    layout, ten elements from row to row."""
    shape, padded = (2, 8, 4), (2, 12, 4)
    found = _padded("w13_weight", shape, padded)
    assert found is not None
    blocks, added = found
    experts, columns = (0, 2, 100), (0, 4, 1)
    assert list(_boxes((experts, (2, 6, 10), columns), 20, blocks)) == [
        (experts, (2, 2, 10), columns, 20),
        (experts, (6, 4, 10), columns, 40),
    ]
    assert added == [((4, 2, 0), (0, 4, 0)), ((10, 2, 0), (0, 4, 0))]
    assert _padded("w2_weight", (2, 4, 4), (2, 4, 6)) == ([(0, 4, 0)], [((0, 4, 0), (4, 2, 0))])
    assert _padded("w2_weight", (2, 4, 4), (2, 6, 4)) is None
    assert _padded("w13_weight", shape, (2, 12, 6)) is None
