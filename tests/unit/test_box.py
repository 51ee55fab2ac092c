"""Properties of boxes: they index as numpy does, and know torch's views for what they are."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.box import Box, box_of_view, tiles_exactly, union_numel
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


# Boxes by themselves


@pytest.mark.parametrize(
    ("offsets", "lengths"), [((0,), (1, 2)), ((-1,), (1,)), ((0, 0), (1, -1)), ((), (1,))]
)
def test_a_bad_box_cannot_exist(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(ManifestError):
        Box(offsets, lengths)


@given(solid_shapes)
def test_the_whole_lies_within_its_shape_and_in_none_that_is_smaller(
    shape: tuple[int, ...],
) -> None:
    whole = Box.whole(shape)
    assert whole.within(shape) and whole.numel == math.prod(shape)
    assert not whole.within((*shape, 1))
    for d in range(len(shape)):
        assert not whole.within((*shape[:d], shape[d] - 1, *shape[d + 1 :]))


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


def test_boxes_of_different_rank_do_not_meet() -> None:
    with pytest.raises(ManifestError, match="rank"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))


# Views of torch


def found(whole: torch.Tensor, view: torch.Tensor) -> Box | None:
    return box_of_view(whole.shape, view.shape, view.stride(), view.storage_offset())


@st.composite
def shape_and_views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor and a view made by any chain of the operations that keep a box a box."""
    shape = draw(solid_shapes)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    view = whole
    for _ in range(draw(st.integers(0, 5))):
        what = draw(st.sampled_from(["narrow", "select", "slice", "unsqueeze", "squeeze", "chunk"]))
        if what == "unsqueeze":
            view = view.unsqueeze(draw(st.integers(0, view.dim())))
        elif what == "squeeze":
            view = view.squeeze()
        elif view.dim():
            d = draw(st.integers(0, view.dim() - 1))
            start = draw(st.integers(0, view.shape[d] - 1))
            length = draw(st.integers(1, view.shape[d] - start))
            if what == "narrow":
                view = view.narrow(d, start, length)
            elif what == "select":
                view = view.select(d, start)
            elif what == "slice":
                view = view[(slice(None),) * d + (slice(start, start + length),)]
            else:
                view = draw(st.sampled_from(view.chunk(length, d)))
    return whole, view


@given(shape_and_views())
def test_a_view_that_only_narrows_is_the_box_of_its_elements(
    case: tuple[torch.Tensor, torch.Tensor],
) -> None:
    whole, view = case
    box = found(whole, view)
    assert box is not None
    assert np.array_equal(whole.numpy()[slices(box)].reshape(-1), view.reshape(-1).numpy())


@given(solid_shapes, st.data())
def test_a_view_is_a_box_in_row_major_order_or_none_at_all(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Whatever strides come, a box that is claimed has the same elements in the same order."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    rank = data.draw(st.integers(0, 4))
    sides = data.draw(st.lists(st.integers(1, 5), min_size=rank, max_size=rank))
    strides = data.draw(st.lists(st.integers(0, 30), min_size=rank, max_size=rank))
    offset = data.draw(st.integers(0, 40))
    box = box_of_view(shape, sides, strides, offset)
    if box is not None:
        last = offset + sum((n - 1) * s for n, s in zip(sides, strides, strict=True))
        assert last < whole.numel()
        view = torch.as_strided(whole, sides, strides, offset)
        assert np.array_equal(whole.numpy()[slices(box)].reshape(-1), view.reshape(-1).numpy())


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.transpose(0, 1),
        lambda t: t.transpose(1, 2),
        lambda t: t.permute(2, 0, 1),
        lambda t: t[0].t(),
        lambda t: t[:, ::2],
        lambda t: t[..., ::2],
        lambda t: t[::3],
        lambda t: t.reshape(-1)[2:9],
        lambda t: t.reshape(-1),
        lambda t: t[:, :1].expand(4, 6, 8),
        lambda t: t.diagonal(),
        lambda t: t.flatten()[::2],
    ],
)
def test_transposes_steps_expansions_and_reshapes_are_no_boxes(make: object) -> None:
    whole = torch.arange(4 * 6 * 8).reshape(4, 6, 8)
    assert found(whole, make(whole)) is None  # type: ignore[operator]


def test_a_square_transpose_is_no_box() -> None:
    whole = torch.arange(9).reshape(3, 3)
    assert found(whole, whole.t()) is None


def test_a_transpose_in_which_one_side_is_one_is_the_box_that_it_looks_like() -> None:
    whole = torch.arange(5).reshape(5, 1)
    assert found(whole, whole.t()) == Box.whole((5, 1))


def test_an_empty_view_at_the_very_end_lies_within() -> None:
    whole = torch.arange(6).reshape(3, 2)
    box = found(whole, whole[3:])
    assert box is not None and box.numel == 0 and box.within((3, 2))


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


def test_equal_volume_does_not_hide_an_overlap() -> None:
    assert not tiles_exactly([Box((0,), (3,)), Box((1,), (3,))], (6,))
    assert not tiles_exactly([Box((0, 0), (2, 2)), Box((0, 1), (2, 2))], (2, 4))
