"""Sources in this process's memory: a torch module, or a state dict.

Contiguous CPU tensors of the wire's dtype are read in place. Others (a declared cast, a transposed
view, another device) are brought into a small buffer, one bounded piece at a time; the trainer's
own memory is only ever read.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import operator
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.errors import ManifestError, SourceError
from weightsync.manifest import DTYPE_BYTES, Manifest, TensorSpec
from weightsync.sources.base import Pieces
from weightsync.sources.names import clean_name

__all__ = ["CastRule", "ModuleSource", "Seen", "StateDictSource", "wire_dtype"]

CastRule = torch.dtype | Mapping[str, torch.dtype] | None
"""Declared casts: one dtype for all floating-point tensors, or one per name pattern (`fnmatch`;
first match counts)."""

PIECE_BYTES: Final = 16 << 20
"""Bytes of the buffer that tensors which can't be read in place go through."""

SHOWN: Final = 10
"""Tensors that one error names."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def wire_dtype(name: str, dtype: torch.dtype, rule: CastRule) -> torch.dtype:
    """The dtype in which a tensor is sent. Integer and boolean tensors are never cast by a single
    dtype."""
    if rule is None:
        return dtype
    if isinstance(rule, torch.dtype):
        return rule if dtype.is_floating_point else dtype
    return next((to for pattern, to in rule.items() if fnmatch.fnmatchcase(name, pattern)), dtype)


class StateDictSource:
    """A mapping of names to tensors, such as ``model.state_dict()``. Tensors are read when an
    update is staged.

    Tensors that are one and the same memory (tied weights) are sent once, under the first of their
    names.

    What is sent are the tensors that `manifest` saw. One whose memory is replaced before it has
    been sent (``p.data = ...``) is an error, and so is one that is written to meanwhile: half of an
    optimizer step is in no checkpoint. Writes are told by torch's version counters, in this process
    and on whichever thread. Not seen, and then sent as they fell, are writes that these do not
    count: by the fused optimizers (``fused=True``, torch 2.13), through ``p.data``, through
    ``.numpy()`` or ``data_ptr()`` (other libraries, kernels of one's own), by another process that
    shares the memory, and to tensors made under ``torch.inference_mode()``, which have no counter.
    Where such a writer is at work, only the caller can keep it from running while an update is
    staged.

    Args:
        tensors: read anew on each update, so that replaced tensors count.
        dtype: declared casts; nothing is cast otherwise.

    Raises:
        SourceError, ManifestError: on `manifest`, when tensors cannot be sent; says which and why.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, dtype: CastRule = None) -> None:
        self._mapping = tensors
        self._rule = dtype
        self._seen: Seen | None = None
        self._sending: _Sending | None = None
        self.casts: dict[str, str] = {}
        self.aliases: dict[str, str] = {}

    def _named(self) -> dict[str, torch.Tensor]:
        return dict(self._mapping)

    def manifest(self) -> Manifest:
        """See `weightsync.sources.base.Source`. Cached as long as names, tensors and addresses
        stay what they were."""
        return self._current().manifest

    def _current(self) -> _Sending:
        named = self._named()
        names, tensors = list(named), list(named.values())
        if self._sending is None or self._seen is None or not self._seen.still(names, tensors):
            # Noted before it is looked at: what changes in between is noticed the next time.
            # Of a class that is not torch's own nobody knows what its metadata says: built anew.
            seen = Seen(names, tensors) if all(map(_plain, tensors)) else None
            self._sending = self._build(names, tensors)
            self._seen = seen
        return self._sending

    def _build(self, names: list[str], tensors: list[torch.Tensor]) -> _Sending:
        specs, kept, casts, aliases = [], [], {}, {}
        seen: dict[tuple[object, ...], str] = {}
        taken: dict[str, tuple[str, tuple[object, ...]]] = {}
        for raw, tensor in zip(names, tensors, strict=True):
            name = clean_name(raw)
            _check(raw, tensor)
            key = _memory(tensor)
            first, same = taken.setdefault(name, (raw, key))
            if same != key:
                raise ManifestError(
                    f"{raw!r} and {first!r} are both called {name!r} once wrappers' prefixes are "
                    "stripped, and hold different tensors",
                    remedy="pass StateDictSource({...}) with the names that the checkpoint has",
                )
            if first != raw:
                continue
            if tensor.numel() and key in seen:
                aliases[name] = seen[key]
                continue
            seen[key] = name
            to = wire_dtype(name, tensor.dtype, self._rule)
            if to != tensor.dtype:
                casts[name] = f"{dtype_name(tensor.dtype)} -> {dtype_name(to)}"
            specs.append(TensorSpec(name, dtype_name(to), tuple(tensor.shape)))
            kept.append(tensor)
        sending = _Sending(Manifest(specs), kept, names, tensors)
        self.casts, self.aliases = casts, aliases
        return sending

    def pieces(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Pieces]:
        """See `weightsync.sources.base.Source`: the tensors that the last `manifest` saw.

        Raises:
            SourceError: a tensor's memory was replaced since then, or it was written to meanwhile;
                found once the last piece has been taken.
        """
        sending = self._sending or self._current()
        before = _versions(sending.watched)
        # Whatever becomes of the tensors, memory that is being read is not given back.
        held = list(map(torch.Tensor.untyped_storage, sending.in_place))
        sending.check_unmoved()
        manifest, rows, addresses = sending.manifest, sending.rows, sending.addresses
        converted = sending.converted
        if wanted is not None:
            rows, addresses = rows[wanted[rows]], addresses[wanted[rows]]
            converted = [index for index in converted if wanted[index]]
        if rows.size:
            starts = np.zeros(rows.size, np.uint64)
            yield Pieces(rows, starts, manifest.nbytes[rows], addresses, manifest)
        del held
        for index in converted:
            dtype = manifest.tensors[index].dtype
            for piece in converted_pieces(index, sending.tensors[index], dtype):
                yield dataclasses.replace(piece, manifest=manifest)
        sending.check_unmoved()
        after = _versions(sending.watched)
        if after != before:
            raise _torn([n for n, a, b in zip(sending.names, before, after, strict=True) if a != b])


class ModuleSource(StateDictSource):
    """All parameters and persistent buffers of a module, wrappers' prefixes stripped in any
    nesting.

    Parameters that are replaced or written to while they are sent are an error, as far as torch's
    version counters tell: what these do not see (fused optimizers, writes through ``p.data`` or
    ``data_ptr()``, other processes) stands under `StateDictSource`.

    Args:
        module: read anew on each update; never changed.
        dtype: declared casts, for instance ``torch.bfloat16`` when the engine runs in bf16.
    """

    def __init__(self, module: torch.nn.Module, *, dtype: CastRule = None) -> None:
        super().__init__({}, dtype=dtype)
        self._module = module

    def _named(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = self._module.state_dict(keep_vars=True)
        return named


class Seen:
    """Tensors of torch's own classes and all that a manifest says of them, to tell whether a later
    look finds the same.

    Of 30,000 tensors each line costs 1 to 4 ms, so there is no loop in Python.

    Attributes:
        tensors: as given.
    """

    def __init__(self, names: list[str], tensors: list[torch.Tensor]) -> None:
        self._names = names
        self.tensors = tensors  # themselves: another tensor may later get the id of one that went
        self._addresses = list(map(_ADDRESS, tensors))
        self._dtypes = list(map(_DTYPE, tensors))
        self._shapes = list(map(_SHAPE, tensors))
        self._strides = list(map(_STRIDE, tensors))
        self._negated = list(map(_NEGATED, tensors))
        self._complex = [tensor for tensor in tensors if tensor.is_complex()]
        self._conjugated = [tensor.is_conj() for tensor in self._complex]

    def still(self, names: list[str], tensors: list[torch.Tensor]) -> bool:
        """Whether these are the same, unchanged. The device is told by the address, the layout by
        the tensor (torch changes it in none)."""
        return (
            names == self._names
            and all(map(operator.is_, tensors, self.tensors))
            and set(map(type, tensors)) <= _PLAIN
            and list(map(_ADDRESS, tensors)) == self._addresses
            and all(map(operator.is_, map(_DTYPE, tensors), self._dtypes))
            and all(map(operator.eq, map(_SHAPE, tensors), self._shapes))
            and all(map(operator.eq, map(_STRIDE, tensors), self._strides))
            and list(map(_NEGATED, tensors)) == self._negated
            and [tensor.is_conj() for tensor in self._complex] == self._conjugated
        )


class _Sending:
    """A manifest's tensors, sorted once into those that are read in place and the others.

    Attributes:
        tensors: one for each of the manifest's.
        rows: indices of those that are read in place.
        in_place: these tensors.
        addresses: where these lie.
        converted: indices of the others.
        watched: every tensor that the mapping holds: tied ones may have version counters of their
            own.
        names: of `watched`.
    """

    def __init__(
        self,
        manifest: Manifest,
        tensors: list[torch.Tensor],
        names: list[str],
        watched: list[torch.Tensor],
    ) -> None:
        self.manifest, self.tensors = manifest, tensors
        self.names, self.watched = names, watched
        in_place = [
            _readable(tensor, spec.dtype)
            for tensor, spec in zip(tensors, manifest.tensors, strict=True)
        ]
        self.rows = np.flatnonzero(np.array(in_place, bool))
        self.converted = np.flatnonzero(~np.array(in_place, bool)).tolist()
        self.in_place = [tensors[i] for i in self.rows.tolist()]
        self._addresses = list(map(_ADDRESS, tensors))
        self._contiguous = list(map(_CONTIGUOUS, tensors))
        self.addresses = np.array(self._addresses, np.uint64)[self.rows]

    def check_unmoved(self) -> None:
        """Whether each of the manifest's tensors lies where it lay when that was made.

        Raises:
            SourceError: one does not; names it.
        """
        addresses = list(map(_ADDRESS, self.tensors))
        contiguous = list(map(_CONTIGUOUS, self.tensors))
        if addresses != self._addresses or contiguous != self._contiguous:
            was = zip(self._addresses, self._contiguous, strict=True)
            now = zip(addresses, contiguous, strict=True)
            first = next(i for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b)
            raise SourceError(
                f"{self.manifest.tensors[first].name!r} was replaced while it was sent: its memory "
                "is not where it was when the manifest was made",
                remedy="do not replace, move or resize parameters between manifest and send, that "
                "is, while stage() runs",
            )


def converted_pieces(index: int, tensor: torch.Tensor, dtype: str) -> Iterator[Pieces]:
    """A tensor in another dtype, layout or place, as contiguous host pieces of at most
    `PIECE_BYTES` (one row at least)."""
    to = getattr(torch, dtype)
    itemsize = DTYPE_BYTES[dtype]
    source = tensor.detach()
    rows = source if source.dim() else source.reshape(1)
    row_bytes = max(rows[0].numel() * itemsize, 1) if rows.shape[0] else 1
    step = max(PIECE_BYTES // row_bytes, 1)
    start = 0
    for first in range(0, rows.shape[0], step):
        piece = rows[first : first + step].resolve_conj().resolve_neg()
        host = piece.to(device="cpu", dtype=to, copy=True, memory_format=torch.contiguous_format)
        nbytes = host.numel() * itemsize
        yield Pieces(np.array([index], np.int64), _one(start), _one(nbytes), _one(host.data_ptr()))
        start += nbytes


def _one(value: int) -> NDArray[np.uint64]:
    return np.array([value], np.uint64)


_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes whose metadata mean what torch says. Others may compute them, or hide tensors within."""

_ADDRESS: Final = torch.Tensor.data_ptr
_DTYPE: Final = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_SHAPE: Final = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_STRIDE: Final = torch.Tensor.stride
_CONTIGUOUS: Final = torch.Tensor.is_contiguous
_WRITES: Final = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_NEGATED: Final = torch.Tensor.is_neg


def _plain(tensor: object) -> bool:
    return type(tensor) in _PLAIN and tensor.layout == torch.strided  # type: ignore[attr-defined]


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that show the same memory in the same way."""
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _readable(tensor: torch.Tensor, dtype: str) -> bool:
    """Whether a tensor's memory holds just the bytes that are sent."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and dtype_name(tensor.dtype) == dtype
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _versions(tensors: list[torch.Tensor]) -> list[int | None]:
    """torch's counters of writes; None for inference tensors, which have none."""
    try:
        return list(map(_WRITES, tensors))
    except RuntimeError:
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def _torn(names: list[str]) -> SourceError:
    shown = ", ".join(map(repr, map(clean_name, names[:SHOWN])))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return SourceError(
        f"{len(names)} tensor(s) were written to while they were sent, so that what was sent may "
        f"mix two steps: {shown}{more}",
        remedy="call stage() between optimizer steps; if training must go on meanwhile, copy the "
        "state dict and send the copy",
    )


def _check(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise SourceError(f"{name!r} is a {type(tensor).__name__}, expected a tensor")
    if hasattr(tensor, "full_tensor"):
        raise SourceError(
            f"{name!r} is a sharded DTensor, and this source reads whole tensors",
            remedy="gather it first: StateDictSource({name: t.full_tensor() ...})",
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise SourceError(
            f"{name!r} is not initialized yet and has no data",
            remedy="run the model once, so that its lazy modules take their shapes",
        )
    if tensor.device.type == "meta":
        raise SourceError(
            f"{name!r} is on the meta device and has no data",
            remedy="materialize the model before it is sent",
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise SourceError(
            f"{name!r} is {'quantized' if tensor.is_quantized else tensor.layout}, "
            "expected a plain strided tensor",
            remedy="pass a StateDictSource without it, or convert it",
        )
