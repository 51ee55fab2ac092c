"""Properties of boxes: they index as numpy does, and know views for what they are."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.box import Box, Run, box_of_view, tiles_exactly, union_numel
from weightsync.errors import ManifestError

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
solid_shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets, lengths = [], []
    for side in shape:
        offset = draw(st.integers(0, side))
        offsets.append(offset)
        lengths.append(draw(st.integers(0, side - offset)))
    return Box(tuple(offsets), tuple(lengths))


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))


def mask(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    inside = np.zeros(shape, bool)
    inside[slices(box)] = True
    return inside


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


SMALL = [(), (1,), (4,), (1, 3), (3, 1), (2, 3), (3, 2), (2, 2), (1, 2, 1), (2, 1, 3), (2, 2, 2)]


def all_boxes(shape: tuple[int, ...]) -> list[Box]:
    """Every box with elements in a tensor of that shape."""
    parts = [[(o, n) for o in range(side) for n in range(1, side - o + 1)] for side in shape]
    return [
        Box(tuple(o for o, _ in chosen), tuple(n for _, n in chosen))
        for chosen in itertools.product(*parts)
    ]


# Boxes by themselves


@pytest.mark.parametrize(
    ("offsets", "lengths"), [((0,), (1, 2)), ((-1,), (1,)), ((0, 0), (1, -1)), ((), (1,))]
)
def test_a_bad_box_cannot_exist(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(ManifestError):
        Box(offsets, lengths)


@pytest.mark.parametrize("make", [lambda: Box((1, 2), (3, 4)), lambda: Run(1, 2, 3)])
def test_boxes_and_runs_are_small_values(make: Callable[[], object]) -> None:
    one, other = make(), make()
    assert one == other and len({one, other}) == 1
    assert not hasattr(one, "__dict__"), "a plan has many"
    for field in fields(one):  # type: ignore[arg-type]
        with pytest.raises(FrozenInstanceError):
            setattr(one, field.name, 0)


@given(solid_shapes)
def test_the_whole_lies_within_its_shape_and_in_none_that_is_smaller(
    shape: tuple[int, ...],
) -> None:
    whole = Box.whole(shape)
    assert whole.within(shape) and whole.numel == math.prod(shape)
    assert not whole.within((*shape, 1))
    for d in range(len(shape)):
        assert not whole.within((*shape[:d], shape[d] - 1, *shape[d + 1 :]))


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_runs_of_every_box_are_the_longest_that_show_its_elements(shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    for box in all_boxes(shape):
        expected = whole[slices(box)].reshape(-1).tolist()
        runs = list(box.runs(shape))
        shown = [list(range(run.start, run.start + run.length)) for run in runs]
        assert list(itertools.chain(*shown)) == expected
        assert [run.local for run in runs] == [0, *itertools.accumulate(map(len, shown))][:-1]
        breaks = sum(after != before + 1 for before, after in itertools.pairwise(expected))
        assert len(runs) == breaks + 1


@given(shape_and_boxes(1))
def test_runs_concatenated_are_numpys_indexing(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, [box] = case
    whole = numbered(shape)
    flat, runs = whole.reshape(-1), list(box.runs(shape))
    taken = [flat[run.start : run.start + run.length] for run in runs]
    expected = whole[slices(box)].reshape(-1)
    assert np.array_equal(np.concatenate([*taken, flat[:0]]), expected)
    assert sum(run.length for run in runs) == box.numel
    for run in runs:
        assert np.array_equal(
            flat[run.start : run.start + run.length], expected[run.local : run.local + run.length]
        )


@given(shape_and_boxes(1))
def test_runs_are_maximal(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, [box] = case
    runs = list(box.runs(shape))
    for before, after in itertools.pairwise(runs):
        assert before.start + before.length < after.start


def test_runs_computed_by_hand() -> None:
    # Columns 1 and 2 of rows 1 to 3: a run per row.
    assert list(Box((1, 1), (3, 2)).runs((5, 4))) == [Run(5, 0, 2), Run(9, 2, 2), Run(13, 4, 2)]
    # Whole rows, whole matrices, the whole: one run.
    assert list(Box((1, 0), (3, 4)).runs((5, 4))) == [Run(4, 0, 12)]
    assert list(Box((1, 0, 0), (2, 2, 3)).runs((4, 2, 3))) == [Run(6, 0, 12)]
    assert list(Box((0, 0), (5, 4)).runs((5, 4))) == [Run(0, 0, 20)]
    # A part of the rows of every matrix: the last side is whole, so a run is two rows long.
    assert list(Box((0, 1, 0), (2, 2, 3)).runs((2, 4, 3))) == [Run(3, 0, 6), Run(15, 6, 6)]
    # A scalar is one run of one element; a box without elements has none.
    assert list(Box((), ()).runs(())) == [Run(0, 0, 1)]
    assert list(Box((2, 1), (0, 2)).runs((5, 4))) == []
    assert list(Box((2, 1), (2, 0)).runs((5, 4))) == []


def test_runs_of_sides_too_long_for_small_numbers() -> None:
    shape = (2, 300, 700)
    runs = list(Box((0, 5, 699), (2, 290, 1)).runs(shape))
    rows = [*range(5, 295), *range(305, 595)]
    assert runs == [Run(row * 700 + 699, local, 1) for local, row in enumerate(rows)]
    lengths = tuple(int(str(side)) for side in shape)  # equal, and other objects
    assert list(Box((0, 0, 0), lengths).runs(shape)) == [Run(0, 0, 420_000)]


def test_runs_of_a_box_that_sticks_out_are_refused() -> None:
    with pytest.raises(ManifestError, match="does not lie inside"):
        list(Box((1, 0), (3, 2)).runs((3, 2)))
    with pytest.raises(ManifestError, match="does not lie inside"):
        list(Box((0,), (3,)).runs((3, 1)))


@given(shape_and_boxes(2))
def test_intersection_is_that_of_the_masks(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, [a, b] = case
    both = mask(a, shape) & mask(b, shape)
    common = a.intersect(b)
    assert common == b.intersect(a)
    if common is None:
        assert not both.any()
    else:
        assert common.numel and np.array_equal(mask(common, shape), both)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (1, 2, 2)], ids=str)
def test_pairs_of_boxes_meet_where_their_elements_do(shape: tuple[int, ...]) -> None:
    """Every pair: what they have in common, how many elements both have, whether they tile."""
    whole = numbered(shape)
    held = {box: frozenset(whole[slices(box)].reshape(-1).tolist()) for box in all_boxes(shape)}
    by_elements = {elements: box for box, elements in held.items()}
    for a, b in itertools.product(held, repeat=2):
        assert a.intersect(b) == by_elements.get(held[a] & held[b])
        assert union_numel([a, b]) == len(held[a] | held[b])
        tiled = not held[a] & held[b] and len(held[a] | held[b]) == whole.size
        assert tiles_exactly([a, b], shape) == tiled


def test_intersections_computed_by_hand() -> None:
    a = Box((2, 10), (4, 20))
    assert a.intersect(a) == a
    assert a.intersect(Box((3, 5), (9, 10))) == Box((3, 10), (3, 5))
    assert a.intersect(Box((0, 29), (3, 9))) == Box((2, 29), (1, 1))
    # They touch along a side, or at a corner.
    assert a.intersect(Box((6, 10), (4, 20))) is None
    assert a.intersect(Box((2, 0), (4, 10))) is None
    assert a.intersect(Box((6, 30), (1, 1))) is None
    # Without elements there is nothing in common, also in the midst of the other.
    assert a.intersect(Box((3, 15), (0, 2))) is None
    assert a.intersect(Box((3, 15), (2, 0))) is None


def test_boxes_of_different_rank_do_not_meet() -> None:
    one, two = Box((0,), (1,)), Box((0, 0), (1, 1))
    for a, b in ((one, two), (two, one)):
        with pytest.raises(ManifestError, match="rank"):
            a.intersect(b)
    # Nor do they lie within the same shape.
    assert [box.within((1,)) for box in (one, two)] == [True, False]
    assert [box.within((1, 1)) for box in (one, two)] == [False, True]


# Views: torch's own are in test_box_views.py


def elements(
    sides: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A view without its sides of one: the sides that are left, and which elements it shows."""
    at = [
        offset + sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, sides))
    ]
    return tuple(side for side in sides if side != 1), tuple(at)


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_views_are_the_boxes_that_show_the_same_elements_and_else_none(
    shape: tuple[int, ...],
) -> None:
    """Every view of up to two sides and every stride and offset, in and out of bounds."""
    whole = numbered(shape)
    known = {}
    for box in all_boxes(shape):
        sides = tuple(n for n in box.lengths if n != 1)
        known[sides, tuple(whole[slices(box)].reshape(-1).tolist())] = box
    assert len(known) == len(all_boxes(shape))
    for rank in range(3):
        for sides in itertools.product(range(1, max(shape, default=1) + 2), repeat=rank):
            for strides in itertools.product(range(whole.size + 2), repeat=rank):
                for offset in range(whole.size + 2):
                    expected = known.get(elements(sides, strides, offset))
                    assert box_of_view(shape, sides, strides, offset) == expected


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_every_box_is_found_in_its_own_view(shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    strides = tuple(stride // whole.itemsize for stride in whole.strides)
    for box in all_boxes(shape):
        first = int(whole[box.offsets])
        assert box_of_view(shape, box.lengths, strides, first) == box
        # Sides of one that come and go change nothing, whatever their stride.
        assert box_of_view(shape, (1, *box.lengths, 1), (77, *strides, 0), first) == box
        kept = [(n, s) for n, s in zip(box.lengths, strides, strict=True) if n != 1]
        assert box_of_view(shape, [n for n, _ in kept], [s for _, s in kept], first) == box


@pytest.mark.parametrize(
    ("shape", "sides", "strides", "offset", "box"),
    [
        # Rows 2 and 3 of a matrix, and the last three of its columns.
        ((4, 6), (2, 6), (6, 1), 12, Box((2, 0), (2, 6))),
        ((4, 6), (4, 3), (6, 1), 3, Box((0, 3), (4, 3))),
        # One expert of a stack; one row of it; one column of it.
        ((8, 4, 6), (4, 6), (6, 1), 3 * 24, Box((3, 0, 0), (1, 4, 6))),
        ((8, 4, 6), (6,), (1,), 3 * 24 + 2 * 6, Box((3, 2, 0), (1, 1, 6))),
        ((8, 4, 6), (4,), (6,), 3 * 24 + 5, Box((3, 0, 5), (1, 4, 1))),
        # An element; the same place in all experts.
        ((8, 4, 6), (), (), 7 * 24 + 3 * 6 + 5, Box((7, 3, 5), (1, 1, 1))),
        ((8, 4, 6), (8,), (24,), 23, Box((0, 3, 5), (8, 1, 1))),
        # As large as they come.
        (
            (128, 4096, 14336),
            (4096, 7168),
            (14336, 1),
            127 * 4096 * 14336 + 7168,
            Box((127, 0, 7168), (1, 4096, 7168)),
        ),
        # Transposed, stepped, spread, reshaped, past the end.
        ((4, 6), (6, 4), (1, 6), 0, None),
        ((4, 6), (2, 6), (12, 1), 0, None),
        ((4, 6), (4, 3), (6, 2), 0, None),
        ((4, 6), (4, 6), (0, 1), 0, None),
        ((4, 6), (24,), (1,), 0, None),
        ((4, 6), (2, 6), (6, 1), 18, None),
        ((4, 6), (1, 6), (6, 1), 24, None),
        ((4, 6), (), (), 24, None),
        ((), (), (), 1, None),
        # Twice along the same side.
        ((4, 6), (2, 2), (1, 1), 0, None),
        ((4, 6), (2, 2), (6, 6), 0, None),
        # Views without elements are where they begin, also where that is the very end.
        ((4, 6), (0, 6), (6, 1), 12, Box((2, 0), (0, 6))),
        ((4, 6), (0, 6), (6, 1), 24, Box((4, 0), (0, 6))),
        ((4, 6), (4, 0), (6, 1), 2, Box((0, 2), (4, 0))),
        ((1, 3), (1, 0), (3, 1), 3, Box((0, 3), (1, 0))),
        ((1, 1, 3), (0,), (1,), 3, Box((0, 0, 3), (1, 1, 0))),
        ((1, 3), (0, 3), (3, 1), 0, Box((0, 0), (0, 3))),
        # In a tensor without elements there is no box to find.
        ((0,), (0,), (1,), 0, None),
        ((3, 0), (3, 0), (1, 1), 0, None),
        ((0, 3), (0, 3), (3, 1), 0, None),
        ((2, 0, 3), (2, 3), (3, 1), 0, None),
        ((2, 0), (), (), 0, None),
    ],
)
def test_views_computed_by_hand(
    shape: tuple[int, ...],
    sides: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    box: Box | None,
) -> None:
    assert box_of_view(shape, sides, strides, offset) == box


def test_a_view_needs_one_stride_per_side() -> None:
    for sides, strides in (((2,), (3, 1)), ((2, 3), (1,))):
        with pytest.raises(ValueError, match="zip"):
            box_of_view((2, 3), sides, strides, 0)


# Tilings


def partition(shape: tuple[int, ...], cuts: int, generator: random.Random) -> list[Box]:
    boxes = [Box.whole(shape)]
    for _ in range(cuts):
        number = generator.randrange(len(boxes))
        box = boxes[number]
        long = [d for d, n in enumerate(box.lengths) if n > 1]
        if not long:
            continue
        d = generator.choice(long)
        at = generator.randint(1, box.lengths[d] - 1)
        low = Box(box.offsets, (*box.lengths[:d], at, *box.lengths[d + 1 :]))
        high = Box(
            (*box.offsets[:d], box.offsets[d] + at, *box.offsets[d + 1 :]),
            (*box.lengths[:d], box.lengths[d] - at, *box.lengths[d + 1 :]),
        )
        boxes[number : number + 1] = [low, high]
    generator.shuffle(boxes)
    return boxes


@given(solid_shapes, st.integers(0, 12), st.randoms(use_true_random=False))
def test_a_partition_tiles_exactly_and_a_changed_one_does_not(
    shape: tuple[int, ...], cuts: int, generator: random.Random
) -> None:
    boxes = partition(shape, cuts, generator)
    assert tiles_exactly(boxes, shape)
    victim = generator.randrange(len(boxes))
    others = boxes[:victim] + boxes[victim + 1 :]
    assert not tiles_exactly(others, shape)
    assert not tiles_exactly([*boxes, boxes[victim]], shape)
    if others:
        assert not tiles_exactly([*others, others[0]], shape)


@given(solid_shapes.filter(len), st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_shifted_box_breaks_a_tiling(
    shape: tuple[int, ...], cuts: int, generator: random.Random
) -> None:
    boxes = partition(shape, cuts, generator)
    victim = generator.randrange(len(boxes))
    box = boxes[victim]
    d = generator.randrange(len(shape))
    for step in (-1, 1):
        offset = box.offsets[d] + step
        if offset < 0:
            continue
        moved = Box((*box.offsets[:d], offset, *box.offsets[d + 1 :]), box.lengths)
        assert not tiles_exactly([*boxes[:victim], moved, *boxes[victim + 1 :]], shape)


@given(shape_and_boxes(3))
def test_tilings_are_what_counting_says(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    count = sum((mask(box, shape).astype(int) for box in boxes), np.zeros(shape, int))
    assert tiles_exactly(boxes, shape) == bool((count == 1).all())


@given(shape_and_boxes(4))
def test_a_union_has_as_many_elements_as_its_mask(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    union = np.zeros(shape, bool)
    for box in boxes:
        union |= mask(box, shape)
    assert union_numel(boxes) == union.sum()
    assert union_numel([]) == 0


def test_large_tilings_and_unions() -> None:
    shape = (1024, 4096)
    shards = [Box((256 * rank, 0), (256, 4096)) for rank in range(4)]
    assert tiles_exactly(shards, shape) and union_numel(shards) == 1024 * 4096
    overlapping = [*shards[:3], Box((767, 0), (256, 4096))]
    assert not tiles_exactly(overlapping, shape) and union_numel(overlapping) == 1023 * 4096


def test_a_scalar_is_tiled_by_one_box() -> None:
    scalar = Box((), ())
    assert tiles_exactly([scalar], ())
    assert not tiles_exactly([], ()) and not tiles_exactly([scalar, scalar], ())
    assert union_numel([scalar, scalar]) == 1


def test_equal_volume_does_not_hide_an_overlap() -> None:
    assert not tiles_exactly([Box((0,), (3,)), Box((1,), (3,))], (6,))
    assert not tiles_exactly([Box((0, 0), (2, 2)), Box((0, 1), (2, 2))], (2, 4))
