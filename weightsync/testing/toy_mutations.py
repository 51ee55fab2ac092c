"""What can go wrong between a checkpoint's bytes and what a model computes from, one function per
kind; each acts in one stage of a load of `weightsync.testing.toy_faults.FaultyToyTarget`.

Each kind has been seen in an engine, a framework or a transport, or is a neighbour of one that has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from weightsync.deadline import Deadline
from weightsync.manifest import Manifest
from weightsync.testing.toy_layers import BLOCK, Ranks

if TYPE_CHECKING:
    from weightsync.testing.toy_faults import FaultyToyTarget

__all__ = [
    "DIGESTS",
    "FED",
    "FINISHED",
    "HELD",
    "KEPT",
    "LOADS",
    "OPENED",
    "flip_bit",
    "swap_words",
]

Tensors = dict[str, torch.Tensor]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(tensor: torch.Tensor, at: str, bit: int = 0) -> None:
    """One bit of the first, the middle or the last element."""
    flat = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    if flat.data_ptr() != tensor.data_ptr():
        raise ValueError("a copy would be changed, not the tensor")
    index = {"first": 0, "middle": flat.numel() // 2, "last": flat.numel() - 1}[at]
    flat[index] ^= 1 << bit


def swap_words(tensor: torch.Tensor, at: int, nbytes: int) -> None:
    """``nbytes`` at byte ``at`` change places with those that follow."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    one, two = flat[at : at + nbytes], flat[at + nbytes : at + 2 * nbytes]
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)


# --- what the loader is given: (tensors, those of the update before) ---------------------------


def drop(fed: Tensors, before: Tensors, *, tensor: str) -> None:
    """Never reaches the loader."""
    del fed[tensor]


def drop_all(fed: Tensors, before: Tensors) -> None:
    """A loader, or a transport, that does nothing and says that all went well."""
    fed.clear()


def older(fed: Tensors, before: Tensors) -> None:
    """The update before is applied once more."""
    fed.update(before)


def stale(
    fed: Tensors, before: Tensors, *, tensor: str, rows: list[int], columns: list[int] | None = None
) -> None:
    """Rows, or a tile of them, are those of the update before."""
    place = [slice(*rows)] + ([slice(*columns)] if columns else [])
    fed[tensor][tuple(place)] = before[tensor][tuple(place)]


def instead(fed: Tensors, before: Tensors, *, tensor: str, other: str) -> None:
    """One tensor is loaded a second time, in place of another."""
    fed[tensor] = fed[other].clone()


def exchange(fed: Tensors, before: Tensors, *, tensor: str, other: str) -> None:
    """Two tensors of one shape change places."""
    fed[tensor], fed[other] = fed[other], fed[tensor]


def swap(
    fed: Tensors, before: Tensors, *, tensor: str, dim: int, one: int, two: int, size: int
) -> None:
    """Two blocks of rows or columns change places."""
    value = fed[tensor]
    kept = value.narrow(dim, one, size).clone()
    value.narrow(dim, one, size).copy_(value.narrow(dim, two, size))
    value.narrow(dim, two, size).copy_(kept)


def roll(fed: Tensors, before: Tensors, *, tensor: str, by: int) -> None:
    """Elements are shifted, the last ones to the front."""
    fed[tensor] = fed[tensor].reshape(-1).roll(by).view(fed[tensor].shape)


def words(fed: Tensors, before: Tensors, *, tensor: str, at: int, nbytes: int) -> None:
    """Adjacent words change places."""
    swap_words(fed[tensor], at, nbytes)


def flip(fed: Tensors, before: Tensors, *, tensor: str, at: str, bit: int = 0) -> None:
    """One bit."""
    flip_bit(fed[tensor], at, bit)


def flip_two(fed: Tensors, before: Tensors, *, tensor: str, apart: int, bit: int) -> None:
    """The same bit of two elements: an XOR does not see it."""
    flat = fed[tensor].reshape(-1).view(_BITS[fed[tensor].element_size()])
    flat[7] ^= 1 << bit
    flat[7 + apart] ^= 1 << bit


def compensate(fed: Tensors, before: Tensors, *, tensor: str) -> None:
    """One element grows by as much as another shrinks: a sum does not see it."""
    flat = fed[tensor].reshape(-1)
    first, second = flat[-1].clone(), flat[-2].clone()
    flat[-1], flat[-2] = -second, -first
    flat[-3], flat[-4] = flat[-3] + (first + second) * 2, flat[-4].clone()


def reinterpret(fed: Tensors, before: Tensors, *, tensor: str, dtype: str) -> None:
    """Bits of another dtype of equal width."""
    value = fed[tensor]
    fed[tensor] = value.to(getattr(torch, dtype)).view(value.dtype)


def through(fed: Tensors, before: Tensors, *, tensor: str, dtype: str) -> None:
    """Rounded through a narrower dtype."""
    value = fed[tensor]
    fed[tensor] = value.to(getattr(torch, dtype)).to(value.dtype)


def transpose(fed: Tensors, before: Tensors, *, tensor: str) -> None:
    """The bytes of the transpose in the same shape."""
    value = fed[tensor]
    fed[tensor] = value.t().reshape(value.shape).contiguous()


def scale(fed: Tensors, before: Tensors, *, tensor: str, by: float) -> None:
    """The loader computes."""
    fed[tensor] = fed[tensor] * by


def negate_zero(fed: Tensors, before: Tensors, *, tensor: str) -> None:
    """A zero of the other sign."""
    value = fed[tensor]
    if not bool((value == 0).any()):
        raise ValueError(f"{tensor} has no zero")
    fed[tensor] = torch.where(value == 0, -value, value)


# --- what of the model stays old: (its tensors, those to be kept) ------------------------------


def stay(tensors: Tensors, kept: Tensors, *, names: list[str]) -> None:
    """These keep what they held before the update."""
    kept.update({name: tensors[name].detach().clone() for name in names})


# --- the load itself: (target) and, where it is replaced, the weights ---------------------------


def other_shard(target: FaultyToyTarget, *, layer: str) -> None:
    """A layer takes the slice that belongs to another rank."""
    module: Any = target.model.get_submodule(layer)
    right = module._ranks
    module._ranks = Ranks((right.rank + 1) % right.size, right.size)
    target.undo.append(lambda: setattr(module, "_ranks", right))


def not_finalized(target: FaultyToyTarget, *, layer: str) -> None:
    """One layer's post-processing is left out."""
    del target.model._open[layer]
    target.model.finish()


def finalized_twice(target: FaultyToyTarget, *, layer: str) -> None:
    """One layer's post-processing runs once more."""
    target.model.finish()
    target.model.get_submodule(layer).finalize()  # type: ignore[operator]


def per_bucket(
    target: FaultyToyTarget, weights: Iterable[tuple[str, torch.Tensor]], *, size: int
) -> None:
    """Begin and finalize around every few tensors, not around the update."""
    every = list(weights)
    for first in range(0, len(every), size):
        target.model.load(every[first : first + size])


def defers(target: FaultyToyTarget, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The loader keeps what it was given, and copies when the buffer has been used again."""
    every = list(weights)
    for _, tensor in every[:8]:
        tensor.copy_(torch.flip(tensor.reshape(-1), [0]).view(tensor.shape) + 1)
    target.model.load(every)


def waits(target: FaultyToyTarget, *, path: str, seconds: float = 30.0) -> None:
    """A worker loads nothing before there is a file."""
    deadline = Deadline.after(seconds)
    while not os.path.exists(path):
        deadline.rest(0.01, "the test to open the gate")


# --- what it holds afterwards: (target) ---------------------------------------------------------


def hold_flip(target: FaultyToyTarget, *, name: str, at: str, bit: int = 0) -> None:
    """One bit of a tensor of the model."""
    tensor = target.everything()[name]
    flip_bit(tensor, at, bit)
    target.undo.append(lambda: flip_bit(tensor, at, bit))


def hold_fill(
    target: FaultyToyTarget, *, name: str, value: float, rows: list[int] | None = None
) -> None:
    """A tensor of the model, or rows of it, are overwritten."""
    tensor = target.everything()[name].detach()
    part = tensor[slice(*rows)] if rows else tensor
    before = part.clone()
    part.fill_(value)
    target.undo.append(lambda: _put(part, before))


def hold_through(target: FaultyToyTarget, *, name: str, dtype: str) -> None:
    """A tensor of the model is rounded."""
    tensor = target.everything()[name].detach()
    before = tensor.clone()
    tensor.copy_(tensor.to(getattr(torch, dtype)))
    target.undo.append(lambda: _put(tensor, before))


def hold_blocks(target: FaultyToyTarget, *, layer: str) -> None:
    """A layer is packed in another order than its kernel reads."""
    packed: torch.Tensor = target.model.get_submodule(layer).packed  # type: ignore[assignment]
    if packed.shape[2] != BLOCK:
        raise ValueError(f"{layer} is not packed in blocks of {BLOCK}")
    packed.copy_(packed.flip(2))


def move(target: FaultyToyTarget, *, name: str) -> None:
    """A tensor of the model lies elsewhere than when its graph was captured."""
    path, _, leaf = name.rpartition(".")
    module = target.model.get_submodule(path)
    tensor = target.everything()[name]
    if isinstance(tensor, nn.Parameter):
        before = tensor.data
        tensor.data = before.clone()
        target.undo.append(lambda: setattr(tensor, "data", before))
    else:
        setattr(module, leaf, tensor.clone())
        target.undo.append(lambda: setattr(module, leaf, tensor))


def replace(
    target: FaultyToyTarget, *, name: str, dtype: str | None = None, shape: list[int] | None = None
) -> None:
    """A parameter has become another one, of another dtype or shape; without either, none."""
    path, _, leaf = name.rpartition(".")
    module = target.model.get_submodule(path)
    before = module._parameters[leaf]
    if before is None:
        raise ValueError(f"{name} is no parameter")
    if dtype is None and shape is None:
        del module._parameters[leaf]
    else:
        data = before.data if shape is None else before.data.view(shape)
        data = data if dtype is None else data.to(getattr(torch, dtype))
        module._parameters[leaf] = nn.Parameter(data, requires_grad=False)
    target.undo.append(lambda: module._parameters.__setitem__(leaf, before))


def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value)


# --- what it says: (digests, manifest) ----------------------------------------------------------


def misread(digests: NDArray[np.uint64], manifest: Manifest, *, tensor: str) -> None:
    """A worker sees other bytes of a tensor arrive than were sent."""
    digests[manifest.index[tensor], 1] ^= np.uint64(1)


def unread(digests: NDArray[np.uint64], manifest: Manifest, *, tensor: str) -> None:
    """A worker does not look at a tensor."""
    digests[manifest.index[tensor]] = 0


def _stage(*acts: Callable[..., None]) -> dict[str, Callable[..., None]]:
    return {act.__name__: act for act in acts}


FED = _stage(
    *(drop, drop_all, older, stale, instead, exchange, swap, roll, words, flip, flip_two),
    *(compensate, reinterpret, through, transpose, scale, negate_zero),
)
KEPT = _stage(stay)
OPENED = _stage(other_shard, waits)
LOADS = _stage(per_bucket, defers)
FINISHED = _stage(not_finalized, finalized_twice)
HELD = _stage(hold_flip, hold_fill, hold_through, hold_blocks, move, replace)
DIGESTS = _stage(misread, unread)
