"""Digests of boxes in memory of any layout: they equal the definition, add up, and show faults."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightsync import _native
from weightsync.box import Box
from weightsync.digest import Digest, digest_bytes, reference_digest, reference_digest_at
from weightsync.regions import Placed, RegionTable, digest, placed, reference_positions

U64_MAX = 2**64 - 1
SEED = 0x0123456789ABCDEF
ISAS = [pytest.param(isa, id=_native.isa_name(isa)) for isa in range(_native.isa() + 1)]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex128,
]

seeds_64 = st.integers(0, U64_MAX)


def filled(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of random bytes, NaNs and all."""
    item = torch.empty(0, dtype=dtype).element_size()
    n = int(np.prod(shape, dtype=np.int64)) * item
    data = np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)
    if dtype == torch.bool:
        data &= 1
    return torch.from_numpy(data).view(dtype).reshape(tuple(shape))


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """(numel, itemsize): the row-major bytes of a tensor, put in order by torch."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().reshape(flat.numel(), flat.element_size())


def of_copy(whole: torch.Tensor, seed: int = SEED) -> Digest:
    """The digest of a whole tensor by way of a contiguous copy and the kernels of spans."""
    return digest_bytes(np.ascontiguousarray(as_bytes(whole)), seed=seed)


def of_definition(part: torch.Tensor, box: Box, shape: Sequence[int], seed: int = SEED) -> Digest:
    """Byte by byte, each at its place in the whole."""
    positions = reference_positions(box, shape, part.element_size()).reshape(-1)
    return reference_digest_at(as_bytes(part).tobytes(), positions, seed=seed)


def in_place(
    part: torch.Tensor,
    box: Box,
    shape: Sequence[int],
    *,
    seed: int = SEED,
    isa: int = -1,
    threads: int = 1,
) -> Digest:
    rows = RegionTable([placed(0, part, box, shape)], 1).seeded([seed])
    table = _native.digest_regions(rows, 1, isa, threads)
    return Digest(int(table[0, 0]), int(table[0, 1]))


def whole_in_place(tensor: torch.Tensor, **options: int) -> Digest:
    shape = tuple(tensor.shape)
    return in_place(tensor, Box.whole(shape), shape, **options)


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for d, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        tensor = tensor.narrow(d, offset, length)
    return tensor


@st.composite
def shapes(draw: st.DrawFn, limit: int = 3000) -> tuple[int, ...]:
    ndim = draw(st.integers(0, 5))
    sides, room = [], limit
    for _ in range(ndim):
        side = draw(st.one_of(st.integers(1, 9), st.integers(1, 200)))
        side = min(side, room)
        sides.append(side)
        room //= side
    return tuple(draw(st.permutations(sides)))


@st.composite
def layouts(draw: st.DrawFn, whole: torch.Tensor) -> torch.Tensor:
    """The same values in other memory: any order of dimensions, gaps, an offset."""
    ndim = whole.ndim
    order = draw(st.permutations(range(ndim)))
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=ndim, max_size=ndim))
    gap = draw(st.integers(0, 3))
    offset = draw(st.integers(0, 5))
    sizes = [whole.shape[d] * step for d, step in zip(order, steps, strict=True)]
    padded = [*sizes[:-1], sizes[-1] + gap] if sizes else []
    n = int(np.prod(padded, dtype=np.int64))
    memory = torch.zeros(n + offset, dtype=whole.dtype)[offset:].reshape(padded)
    if sizes:
        memory = memory.narrow(-1, 0, sizes[-1])
    view = memory[tuple(slice(None, None, step) for step in steps)]
    view = view.permute([order.index(d) for d in range(ndim)])
    view.copy_(whole)
    return view


def split(draw: st.DrawFn, box: Box, depth: int) -> Iterator[Box]:
    """Any partition: a box is cut along some dimension, and so are its halves."""
    if depth == 0 or not box.lengths or draw(st.integers(0, 4)) == 0:
        yield box
        return
    d = draw(st.integers(0, len(box.lengths) - 1))
    at = draw(st.integers(0, box.lengths[d]))  # empty parts are parts
    low, high = list(box.lengths), list(box.lengths)
    low[d], high[d] = at, box.lengths[d] - at
    offsets = list(box.offsets)
    offsets[d] += at
    yield from split(draw, Box(box.offsets, tuple(low)), depth - 1)
    yield from split(draw, Box(tuple(offsets), tuple(high)), depth - 1)


# --- every kernel computes the definition, whatever the layout ----------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(shape=shapes(), data=st.data(), seed=seeds_64)
def test_any_layout_of_any_box_equals_the_bytewise_definition(
    dtype: torch.dtype, shape: tuple[int, ...], data: st.DataObject, seed: int
) -> None:
    whole = filled(shape, dtype, seed & 0xFFFF)
    lengths = tuple(data.draw(st.integers(min(1, side), side)) for side in shape)
    offsets = tuple(
        data.draw(st.integers(0, side - n)) for side, n in zip(shape, lengths, strict=True)
    )
    box = Box(offsets, lengths)
    part = data.draw(layouts(narrowed(whole, box)))
    expected = of_definition(narrowed(whole, box), box, shape, seed)
    for isa in range(_native.isa() + 1):
        assert in_place(part, box, shape, seed=seed, isa=isa) == expected, _native.isa_name(isa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=30, deadline=None)
@given(shape=shapes(), data=st.data())
def test_any_layout_of_a_whole_tensor_equals_its_contiguous_copy(
    dtype: torch.dtype, shape: tuple[int, ...], data: st.DataObject
) -> None:
    whole = filled(shape, dtype)
    assert whole_in_place(data.draw(layouts(whole))) == of_copy(whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("height, width", [(64, 64), (65, 63), (1, 700), (700, 1), (33, 2080)])
def test_a_transposed_matrix_and_its_slices_equal_their_copies(
    isa: int, dtype: torch.dtype, height: int, width: int
) -> None:
    matrix = filled((height, width), dtype)
    assert whole_in_place(matrix.t(), isa=isa) == of_copy(matrix.t())
    for step in (2, 3, 64):
        stepped = matrix[:, ::step]
        assert whole_in_place(stepped, isa=isa) == of_copy(stepped)
        assert whole_in_place(stepped.t(), isa=isa) == of_copy(stepped.t())


def test_runs_longer_than_every_buffer_equal_their_copies() -> None:
    matrix = filled((9, 40_000), torch.bfloat16)
    for view in (matrix[:, :20_001], matrix[::2, 1:], matrix[:, ::2], matrix.t(), matrix.t()[1:]):
        for isa in range(_native.isa() + 1):
            assert whole_in_place(view, isa=isa) == of_copy(view)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_tensors_repeat_their_elements(dtype: torch.dtype) -> None:
    row, column = filled((1, 37), dtype), filled((29, 1), dtype)
    one, cube = filled((), dtype), filled((5, 1, 8), dtype)
    for view in (
        row.expand(40, 37),
        column.expand(29, 41),
        row.expand(40, 37).t(),
        one.expand(7, 3, 5),
        cube.expand(5, 6, 8),
        cube.expand(5, 6, 8).permute(2, 0, 1),
    ):
        for isa in range(_native.isa() + 1):
            assert whole_in_place(view, isa=isa) == of_copy(view)


def test_memory_may_run_backwards() -> None:
    array = np.random.default_rng(0).integers(0, 2**16, (37, 24), dtype=np.uint16)
    base = Placed(0, array.ctypes.data, 2, (37, 24), (24, 1), (24, 1), 0)
    for flipped in (array[::-1], array[:, ::-1], array[::-1, ::-1]):
        region = dataclasses.replace(
            base,
            address=flipped.ctypes.data,
            stride=tuple(step // 2 for step in flipped.strides),
        )
        table = RegionTable([region], 1).digest([SEED])
        expected = digest_bytes(np.ascontiguousarray(flipped), seed=SEED)
        assert table.tolist() == [[expected.first, expected.second]]


@pytest.mark.parametrize("isa", ISAS)
def test_addresses_need_no_alignment(isa: int) -> None:
    for item, skip in itertools.product((2, 4, 8, 16), range(9)):
        data = np.random.default_rng(item).integers(0, 256, 4096, dtype=np.uint8)
        address = data.ctypes.data + skip
        kept = np.ascontiguousarray(data[skip : skip + 60 * item].reshape(6, 10, item))
        turned = np.ascontiguousarray(kept.transpose(1, 0, 2))
        regions = [
            Placed(0, address, item, (6, 10), (10, 1), (10, 1), 0),
            Placed(1, address, item, (10, 6), (1, 10), (6, 1), 0),
        ]
        table = _native.digest_regions(RegionTable(regions, 2).seeded([SEED, SEED]), 2, isa)
        for row, copy in zip(table, (kept, turned), strict=True):
            expected = digest_bytes(copy, seed=SEED)
            assert row.tolist() == [expected.first, expected.second]


def test_positions_near_the_end_of_64_bits_wrap_nowhere() -> None:
    data = np.arange(64, dtype=np.uint8)
    start = 2**64 - 64
    region = Placed(0, data.ctypes.data, 8, (8,), (1,), (1,), start // 8)
    table = RegionTable([region], 1).digest([U64_MAX])
    expected = reference_digest(data.tobytes(), start=start, seed=U64_MAX)
    assert table.tolist() == [[expected.first, expected.second]]


GUARDED = """
import ctypes, mmap
import numpy as np
from weightsync import _native
from weightsync.regions import Placed, RegionTable

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 4 * page)
base = np.frombuffer(memory, dtype=np.uint8).ctypes.data
for guard in (base, base + 3 * page):
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), page, 0) == 0
low, high = base + page, base + 3 * page
for item in (1, 2, 4, 8, 16):
    for height, width in ((1, 1), (3, 5), (16, 9), (40, 11), (1, 301), (7, 64)):
        dims = (height, width)
        turned = (width, height)
        for address in (low, high - height * width * item):
            regions = [
                Placed(0, address, item, dims, (width, 1), (width, 1), 0),
                Placed(0, address, item, dims, (width, 1), (1000, 1), 3),
                Placed(0, address, item, turned, (1, width), (height, 1), 0),
                Placed(0, address, item, turned, (1, width), (104, 1), 1),
                Placed(0, address, item, turned, (1, width), (105, 1), 1),
                Placed(0, address, item, dims, (width, 1), (2000, 2), 1),
            ]
            rows = RegionTable(regions, 1).seeded([1])
            for isa in range(_native.isa() + 1):
                _native.digest_regions(rows, 1, isa)
print("done")
"""


def test_nothing_is_read_before_the_first_or_after_the_last_element() -> None:
    """Between pages that nobody may read; a fault ends the process."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False
    )
    assert done.stdout == "done\n", done.stderr


# --- boxes add up -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(shape=shapes(), data=st.data(), seed=seeds_64)
def test_any_partition_into_boxes_adds_up_to_the_whole(
    dtype: torch.dtype, shape: tuple[int, ...], data: st.DataObject, seed: int
) -> None:
    whole = filled(shape, dtype)
    boxes = list(split(data.draw, Box.whole(shape), depth=4))
    held = data.draw(layouts(whole))
    regions = [placed(0, narrowed(held, box), box, shape) for box in boxes]
    table = RegionTable(regions, 1).digest([seed])
    expected = of_copy(whole, seed)
    assert table.tolist() == [[expected.first, expected.second]]


def test_a_box_that_is_left_out_or_given_twice_changes_the_sum() -> None:
    whole = torch.zeros(12, 40, dtype=torch.bfloat16)  # zeros add nothing but their number
    boxes = [Box((r, c), (6, 20)) for r in (0, 6) for c in (0, 20)]
    regions = [placed(0, narrowed(whole, box), box, whole.shape) for box in boxes]
    complete = RegionTable(regions, 1).digest([SEED])
    assert complete.tolist() == [[of_copy(whole).first, of_copy(whole).second]]
    for number in range(4):
        fewer = [region for k, region in enumerate(regions) if k != number]
        assert (RegionTable(fewer, 1).digest([SEED]) != complete).any()
        assert (RegionTable([*regions, regions[number]], 1).digest([SEED]) != complete).any()


# --- threads and tables -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128], ids=str)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    matrix = filled((1111, 2049), dtype)
    views = [
        matrix,
        matrix.t(),
        matrix[:, 5:1000],
        matrix[::3, ::2],
        matrix[:, :1].expand(1111, 2049),
    ]
    regions = [
        placed(out, view, Box.whole(tuple(view.shape)), tuple(view.shape))
        for out, view in enumerate(views)
    ]
    table = RegionTable(regions, len(views))
    seeds = list(range(len(views)))
    once = table.digest(seeds)
    for row, view, seed in zip(once, views, seeds, strict=True):
        assert row.tolist() == [of_copy(view, seed).first, of_copy(view, seed).second]
    for threads in range(2, 6):
        np.testing.assert_array_equal(table.digest(seeds, threads=threads), once)


def several_regions() -> tuple[list[torch.Tensor], list[Placed]]:
    tensors = [filled((6, 10), torch.float32, k) for k in range(3)]
    half = Box((0, 5), (6, 5))
    regions = [
        placed(2, tensors[0].t(), Box.whole((10, 6)), (10, 6)),
        placed(0, tensors[1][:, :5], Box((0, 0), (6, 5)), (6, 10)),
        placed(0, tensors[1][:, 5:], half, (6, 10)),
    ]
    return tensors, regions


def test_regions_add_to_the_digest_they_name_under_its_seed() -> None:
    tensors, regions = several_regions()
    table = RegionTable(iter(regions), 4)
    found = table.digest([11, 12, 13, 14])
    assert found.shape == (4, 2) and found.dtype == np.uint64
    first, third = of_copy(tensors[1], 11), of_copy(tensors[0].t(), 13)
    assert found.tolist() == [
        [first.first, first.second],
        [0, 0],
        [third.first, third.second],
        [0, 0],
    ]
    assert table.out.tolist() == [2, 0, 0]
    assert table.nbytes.tolist() == [240, 120, 120]
    assert len(table) == 3 and table.n_out == 4


def test_a_table_used_again_equals_a_fresh_one() -> None:
    _, regions = several_regions()
    used = RegionTable(regions, 3)
    before = used.digest([1, 2, 3])
    again = used.digest(np.array([U64_MAX, 5, 6], dtype=np.uint64))
    np.testing.assert_array_equal(again, RegionTable(regions, 3).digest([U64_MAX, 5, 6]))
    assert (again[[0, 2]] != before[[0, 2]]).all()
    np.testing.assert_array_equal(used.digest([1, 2, 3]), before)


def test_a_moved_table_reads_the_new_addresses_and_leaves_the_old_one() -> None:
    tensors, regions = several_regions()
    table = RegionTable(regions, 3)
    before = table.digest([1, 2, 3])
    copies = [tensor.clone() for tensor in tensors]
    copies[0].view(torch.int32)[0, 0] ^= 1
    column = [copies[0].data_ptr(), copies[1].data_ptr(), copies[1][:, 5:].data_ptr()]
    moved = table.moved(column).digest([1, 2, 3])
    assert (moved[2] != before[2]).all() and (moved[0] == before[0]).all()
    np.testing.assert_array_equal(table.digest([1, 2, 3]), before)
    with pytest.raises(ValueError, match="3 addresses"):
        table.moved(column[:2])
    with pytest.raises(ValueError, match="null"):
        table.moved([0, *column[1:]])


def test_rows_are_read_only_and_signed_rows_are_the_same() -> None:
    _, regions = several_regions()
    table = RegionTable(regions, 3)
    with pytest.raises(ValueError, match="read-only"):
        table.rows[0, 0] = 1
    rows = table.seeded([1, 2, 3])
    assert rows.shape == (3, 30) and rows.flags.c_contiguous
    np.testing.assert_array_equal(
        _native.digest_regions(rows.view(np.int64), 3), _native.digest_regions(rows, 3)
    )


# --- nothing and little -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalars_and_empty_tensors(dtype: torch.dtype) -> None:
    scalar = filled((), dtype)
    assert digest(scalar, Box((), ()), (), SEED) == of_copy(scalar)
    for shape in ((0,), (3, 0), (0, 3), (2, 0, 4)):
        empty = torch.empty(shape, dtype=dtype)
        assert digest(empty, Box.whole(shape), shape, SEED) == Digest(0, 0)
    whole = filled((4, 6), dtype)
    nothing = Box((2, 3), (0, 2))
    assert digest(narrowed(whole, nothing), nothing, (4, 6), SEED) == Digest(0, 0)


def test_tables_of_nothing() -> None:
    assert RegionTable([], 0).digest([]).shape == (0, 2)
    assert RegionTable([], 2).digest([1, 2]).tolist() == [[0, 0], [0, 0]]
    far = Placed(0, 0, 4, (0, 7), (2**50, 1), (7, 1), 0)
    assert RegionTable([far], 1).digest([1]).tolist() == [[0, 0]]


def test_eight_dimensions_are_fine() -> None:
    whole = filled((2, 3, 1, 2, 2, 3, 2, 2), torch.bfloat16)
    turned = whole.permute(7, 2, 5, 0, 3, 1, 6, 4)
    assert digest(turned, Box.whole(turned.shape), turned.shape, SEED) == of_copy(turned)


# --- faults show --------------------------------------------------------------------------------

HEIGHT, WIDTH = 512, 520


def flip(row: int, column: int, bit: int) -> Callable[[torch.Tensor], None]:
    def fault(matrix: torch.Tensor) -> None:
        bits = matrix.view(torch.int16)
        bits[row, column] ^= torch.tensor(-(1 << 15) if bit == 15 else 1 << bit, dtype=torch.int16)

    return fault


def swap(one: tuple[slice, slice], other: tuple[slice, slice]) -> Callable[[torch.Tensor], None]:
    def fault(matrix: torch.Tensor) -> None:
        kept = matrix[one].clone()
        matrix[one] = matrix[other]
        matrix[other] = kept

    return fault


def transpose_square(matrix: torch.Tensor) -> None:
    matrix[:, :HEIGHT] = matrix[:, :HEIGHT].t().clone()


ALL = slice(None)
FAULTS = {
    **{
        f"bit {bit} of {row},{column}": flip(row, column, bit)
        for row, column in ((0, 0), (HEIGHT // 2, WIDTH // 2), (HEIGHT - 1, WIDTH - 1))
        for bit in (0, 7, 15)
    },
    "rows": swap((slice(3, 4), ALL), (slice(4, 5), ALL)),
    "columns": swap((ALL, slice(3, 4)), (ALL, slice(4, 5))),
    "words": swap((slice(7, 8), slice(8, 12)), (slice(7, 8), slice(12, 16))),
    "blocks of 256 columns": swap((ALL, slice(0, 256)), (ALL, slice(256, 512))),
    "transposed square": transpose_square,
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_the_digest(name: str, turned: bool, isa: int) -> None:
    matrix = filled((HEIGHT, WIDTH), torch.bfloat16)
    view = matrix.t() if turned else matrix
    before = whole_in_place(view, isa=isa)
    data = matrix.view(torch.int16).clone()
    FAULTS[name](matrix)
    assert not torch.equal(matrix.view(torch.int16), data), "the fault changed nothing"
    assert whole_in_place(view, isa=isa) != before


# --- bad arguments are refused ------------------------------------------------------------------


def good_row() -> NDArray[np.uint64]:
    row = np.zeros((1, 30), dtype=np.uint64)
    row[0, :6] = (2**20, 2, 2, 8, SEED, 0)
    row[0, 6:14] = (3, 4, 1, 1, 1, 1, 1, 1)
    row[0, 14:16] = (2, 6)
    row[0, 22:24] = (8, 2)
    return row


@pytest.mark.parametrize(
    "changes, message",
    [
        ({1: 0}, "itemsize"),
        ({1: 3}, "itemsize"),
        ({1: 32}, "itemsize"),
        ({2: 9}, "ndim"),
        ({2: U64_MAX}, "ndim"),
        ({2: 1}, "unused"),
        ({8: 2}, "unused"),
        ({16: 2}, "unused"),
        ({24: 2}, "unused"),
        ({6: U64_MAX}, "negative length"),
        ({7: 2**63}, "negative length"),
        ({5: 1}, "out 1 is not below n_out 1"),
        ({5: U64_MAX}, "not below"),
        ({0: 0}, "null"),
        ({3: 2**64 - 8}, "start"),
        ({3: 7}, "start must be a multiple"),
        ({22: 9}, "multiples"),
        ({22: 2**63}, "whole tensor exceeds"),
        ({6: 2**62, 22: 2**62}, "whole tensor exceeds"),
        ({22: 6}, "overlap"),
        ({22: 0}, "overlap"),
        ({23: 1}, "overlap"),
        ({14: 2**62}, "address space"),
        ({14: 2**64 - 2**62}, "address space"),
        ({14: 2**64 - 2**19}, "address"),
        ({0: U64_MAX - 3}, "address"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes: dict[int, int], message: str) -> None:
    rows = good_row()
    _native.check_regions(rows, 1)
    for column, value in changes.items():
        rows[0, column] = value
    for refuses in (_native.check_regions, _native.digest_regions):
        with pytest.raises(ValueError, match=rf"row 1: .*{message}"):
            refuses(np.concatenate([idle_row(), rows]), 1)


def idle_row() -> NDArray[np.uint64]:
    row = good_row()
    row[0, 6] = 0
    return row


def test_rows_of_another_shape_dtype_or_order_are_refused() -> None:
    rows = np.repeat(idle_row(), 4, axis=0)
    _native.digest_regions(rows, 1)
    for bad in (
        rows[:, :29].copy(),
        rows[0],
        rows.astype(np.float64),
        rows.astype(np.uint32),
        np.asfortranarray(rows),
        rows[::2],
    ):
        with pytest.raises(ValueError, match="rows must"):
            _native.digest_regions(bad, 1)
    for isa in (-2, 3):
        with pytest.raises(ValueError, match="isa"):
            _native.digest_regions(rows, 1, isa)
    for threads in (0, 1025):
        with pytest.raises(ValueError, match="threads"):
            _native.digest_regions(rows, 1, -1, threads)
    with pytest.raises(ValueError, match="n_out"):
        _native.check_regions(rows, -1)


def test_regions_that_do_not_fit_are_refused_when_the_table_is_built() -> None:
    _, regions = several_regions()
    good = regions[0]
    for change, message in (
        ({"out": 3}, "not below"),
        ({"out": -1}, "out"),
        ({"address": 0}, "null"),
        ({"address": -8}, "address"),
        ({"itemsize": 5}, "itemsize"),
        ({"lengths": (-1, 6)}, "negative length"),
        ({"start": -1}, "start"),
        ({"start": 2**63}, "start"),
        ({"stride": (2**63, 1)}, "stride"),
        ({"whole_stride": (-6, 1)}, "stride"),
        ({"whole_stride": (5, 1)}, "overlap"),
    ):
        with pytest.raises(ValueError, match=message):
            RegionTable([dataclasses.replace(good, **change)], 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as many strides"):
        dataclasses.replace(good, stride=(1,))
    with pytest.raises(ValueError, match="at most 8"):
        Placed(0, 8, 1, (1,) * 9, (1,) * 9, (1,) * 9, 0)


def test_seeds_that_do_not_fit_are_refused() -> None:
    _, regions = several_regions()
    table = RegionTable(regions, 3)
    for seeds in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="3 seeds"):
            table.digest(seeds)
    with pytest.raises(ValueError, match="seeds"):
        table.digest([1, 2, -3])
    with pytest.raises(ValueError, match="threads"):
        table.digest([1, 2, 3], threads=0)


def test_tensors_that_do_not_fit_their_box_are_refused() -> None:
    tensor = filled((4, 6), torch.float32)
    with pytest.raises(ValueError, match="does not hold"):
        placed(0, tensor, Box((0, 0), (4, 5)), (4, 6))
    with pytest.raises(ValueError, match="does not lie inside"):
        placed(0, tensor, Box((1, 0), (4, 6)), (4, 6))
    with pytest.raises(ValueError, match="does not lie inside"):
        placed(0, tensor, Box((0, 0), (4, 6)), (4, 6, 1))
    with pytest.raises(ValueError, match="host memory"):
        digest(tensor.to("meta"), Box.whole((4, 6)), (4, 6), SEED)
    with pytest.raises(ValueError, match="seeds"):
        digest(tensor, Box.whole((4, 6)), (4, 6), -1)
    lazy = filled((4,), torch.complex128).conj()
    with pytest.raises(ValueError, match="conjugated"):
        placed(0, lazy, Box.whole((4,)), (4,))


def test_the_module_does_not_import_torch() -> None:
    code = "import sys, weightsync.regions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
