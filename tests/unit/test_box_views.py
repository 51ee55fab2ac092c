"""Views of torch tensors are known for the boxes that they are, and everything else for none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.box import Box, box_of_view

solid_shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))


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
