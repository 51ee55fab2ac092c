"""Run an engine's own loader on tensors without storage, and write down which bytes it would have
copied where.

No name maps per model: slicing for tensor parallelism, fused and stacked parameters all fall out
    of the engine's loader. The model
is a *twin* of the engine's on the ``meta`` device, so nothing is allocated and the live model is
not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.box import Box, box_of_view
from weightsync.manifest import Manifest
from weightsync.target import torch_dtype

__all__ = ["Copy", "Loader", "Region", "Trace", "trace_loader"]

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""An engine's ``load_weights``."""

MAX_RESTARTS = 256
"""Tensors that a loader may choke on before the rest is left unlooked-at."""


@dataclass(frozen=True, slots=True)
class Region:
    """A strided part of a tensor, in elements. ``box`` is None where it is not axis-aligned."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    box: Box | None


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy that the loader makes.

    Attributes:
        index: of the checkpoint tensor in the manifest.
        source: part of it, None if it went through arithmetic or a cast of the loader's own.
        parameter: canonical name of the destination.
        destination: part of it.
        source_dtype: of the checkpoint tensor, or of what arithmetic made of it.
        destination_dtype: of the parameter; another one where the loader casts.
    """

    index: int
    source: Region | None
    parameter: str
    destination: Region
    source_dtype: torch.dtype
    destination_dtype: torch.dtype


@dataclass(slots=True)
class Trace:
    """All that the loader did.

    Attributes:
        copies: in the order in which they were made.
        fills: parts of parameters that the loader fills with a constant (pads): name, where, and
            the constant; None where that is no number.
        failures: by position in the manifest: the loader's own error.
        unlooked: positions that were not reached because too many failed.
        aliases: every name of a parameter to its canonical one (tied parameters share a storage).
        layouts: of each parameter of a canonical name, all of it: as the twin lays it out in its
            storage, which is what the offsets and strides of `Copy.destination` count in.
    """

    copies: list[Copy] = field(default_factory=list)
    fills: list[tuple[str, Region, float | None]] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    unlooked: list[int] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, Region] = field(default_factory=dict)


def trace_loader(twin: torch.nn.Module, load: Loader, manifest: Manifest) -> Trace:
    """Feed a manifest's tensors, without storage, through a twin's loader.

    Args:
        twin: model on the ``meta`` device; its own memory is never written to.
        load: its loader.
        manifest: tensors to feed, in order.

    Returns:
        The trace. A tensor that the loader raises on is recorded as failed, and the others are
        traced nevertheless.
    """
    trace = Trace()
    destinations: dict[int, tuple[str, torch.Size]] = {}
    for name, tensor in _tensors(twin):
        key = _storage(tensor)
        canonical, _ = destinations.setdefault(key, (name, tensor.shape))
        trace.aliases[name] = canonical
        if canonical == name:
            trace.layouts[name] = _region(tensor, tensor.shape)
    sources = [
        torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        for spec in manifest.tensors
    ]
    index_of = {_storage(tensor): index for index, tensor in enumerate(sources)}
    recorder = _Recorder(trace, index_of, destinations, [t.shape for t in sources])
    first = 0
    for _ in range(MAX_RESTARTS):
        feed = _Feed(manifest, sources, first, recorder)
        try:
            with recorder:
                load(feed)
            return trace
        except Exception as error:
            if recorder.current < first:
                raise
            trace.failures[recorder.current] = f"{type(error).__name__}: {error}"[:500]
            first = recorder.current + 1
    trace.unlooked = list(range(first, len(manifest)))
    return trace


class _Feed:
    """Yields tensors and lets the recorder know which one is at work."""

    def __init__(
        self,
        manifest: Manifest,
        sources: Sequence[torch.Tensor],
        first: int,
        recorder: _Recorder,
    ) -> None:
        self._manifest = manifest
        self._sources = sources
        self._first = first
        self._recorder = recorder

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(self._first, len(self._sources)):
            self._recorder.current = index
            yield self._manifest.tensors[index].name, self._sources[index]


class _Recorder(TorchDispatchMode):
    """Writes copies and fills down instead of doing them. Meta tensors have no storage, so nothing
    is lost."""

    def __init__(
        self,
        trace: Trace,
        index_of: Mapping[int, int],
        destinations: Mapping[int, tuple[str, torch.Size]],
        shapes: Sequence[torch.Size],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._index_of = index_of
        self._destinations = destinations
        self._shapes = shapes
        # A loader's own casts, by the storage of their result: which tensor, and its dtype before.
        # The results are kept, so that no storage is mistaken for one that was freed.
        self._casts: dict[int, tuple[int, torch.dtype, torch.Tensor]] = {}
        self.current = -1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        packet = func.overloadpacket
        if packet is torch.ops.aten.copy_:
            destination, source = args[0], args[1]
            found = self._destinations.get(_storage(destination))
            if found is not None:
                self._copy(found, destination, source)
                return destination
        elif packet in (torch.ops.aten.fill_, torch.ops.aten.zero_):
            found = self._destinations.get(_storage(args[0]))
            if found is not None:
                value = 0 if packet is torch.ops.aten.zero_ else args[1]
                constant = value if isinstance(value, int | float) else None
                self._trace.fills.append((found[0], _region(args[0], found[1]), constant))
                return args[0]
        result = func(*args, **(kwargs or {}))
        if packet is torch.ops.aten._to_copy:
            self._cast(args[0], result)
        return result

    def _cast(self, origin: torch.Tensor, result: torch.Tensor) -> None:
        storage = _storage(origin)
        if storage in self._index_of:
            self._casts[_storage(result)] = (self._index_of[storage], origin.dtype, result)
        elif storage in self._casts:
            index, dtype, _ = self._casts[storage]
            self._casts[_storage(result)] = (index, dtype, result)

    def _copy(
        self, found: tuple[str, torch.Size], destination: torch.Tensor, source: torch.Tensor
    ) -> None:
        name, shape = found
        index = self._index_of.get(_storage(source))
        region = None if index is None else _region(source, self._shapes[index])
        dtype = source.dtype
        if index is None and _storage(source) in self._casts:
            index, dtype, _ = self._casts[_storage(source)]
        if destination.shape != source.shape:
            # copy_ would broadcast; a weight that is spread over a parameter is never meant.
            raise ValueError(
                f"{name} takes shape {list(destination.shape)}, got {list(source.shape)}"
            )
        self._trace.copies.append(
            Copy(
                index=self.current if index is None else index,
                source=region,
                parameter=name,
                destination=_region(destination, shape),
                source_dtype=dtype,
                destination_dtype=destination.dtype,
            )
        )


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _storage(tensor: torch.Tensor) -> int:
    """Identity of a storage; meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)


def _region(view: torch.Tensor, whole: torch.Size) -> Region:
    offset = int(view.storage_offset())
    return Region(
        tuple(view.shape),
        tuple(view.stride()),
        offset,
        box_of_view(whole, view.shape, view.stride(), offset),
    )
