"""Sources in this process's memory: a torch module, or a state dict.

Contiguous CPU tensors of the wire's dtype are read in place. Others (a declared cast, a transposed
view, another device) are brought into a small buffer, one bounded piece at a time; the trainer's
own memory is only ever read.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.errors import ManifestError, SourceError
from weightsync.manifest import DTYPE_BYTES, Manifest, TensorSpec
from weightsync.sources.base import Pieces
from weightsync.sources.names import clean_name

__all__ = ["CastRule", "ModuleSource", "StateDictSource", "wire_dtype"]

CastRule = torch.dtype | Mapping[str, torch.dtype] | None
"""Declared casts: one dtype for all floating-point tensors, or one per name pattern (`fnmatch`;
first match counts)."""

PIECE_BYTES: Final = 16 << 20
"""Bytes of the buffer that tensors which can't be read in place go through."""


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

    Args:
        tensors: read anew on each update, so that replaced tensors count.
        dtype: declared casts; nothing is cast otherwise.

    Raises:
        SourceError, ManifestError: on `manifest`, when tensors cannot be sent; says which and why.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, dtype: CastRule = None) -> None:
        self._mapping = tensors
        self._rule = dtype
        self._tensors: list[torch.Tensor] = []
        self._known: list[_Identity] | None = None
        self._names: list[str] = []
        self._manifest: Manifest | None = None
        self.casts: dict[str, str] = {}
        self.aliases: dict[str, str] = {}

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._mapping.items()

    def manifest(self) -> Manifest:
        """See `weightsync.sources.base.Source`. Cached as long as names, tensors and addresses
        stay what they were."""
        names, tensors = [], []
        for name, tensor in self._named():
            names.append(name)
            tensors.append(tensor)
        # Of a class that is not torch's own nobody knows what its identity says: looked at anew.
        known = [_identity(t) for t in tensors] if all(map(_plain, tensors)) else None
        unchanged = known is not None and known == self._known and names == self._names
        if self._manifest is not None and unchanged:
            return self._manifest
        self._build(names, tensors)
        self._known, self._names = known, names
        if self._manifest is None:
            raise SourceError("no manifest was built")
        return self._manifest

    def _build(self, names: list[str], tensors: list[torch.Tensor]) -> None:
        specs, kept, casts, aliases = [], [], {}, {}
        seen: dict[tuple[object, ...], str] = {}
        taken: dict[str, tuple[str, tuple[object, ...]]] = {}
        for raw, tensor in zip(names, tensors, strict=True):
            name = clean_name(raw)
            _check(raw, tensor)
            key = (*_identity(tensor)[1:], tensor.is_conj(), tensor.is_neg())
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
        self._manifest, self._tensors = Manifest(specs), kept
        self.casts, self.aliases = casts, aliases

    def pieces(self) -> Iterator[Pieces]:
        """See `weightsync.sources.base.Source`."""
        manifest = self.manifest()
        direct: list[int] = []
        indirect: list[int] = []
        for index, (spec, tensor) in enumerate(zip(manifest.tensors, self._tensors, strict=True)):
            in_place = (
                tensor.device.type == "cpu"
                and tensor.is_contiguous()
                and dtype_name(tensor.dtype) == spec.dtype
                and not tensor.is_conj()
                and not tensor.is_neg()
            )
            (direct if in_place else indirect).append(index)
        rows = np.array(direct, np.int64)
        addresses = np.array([self._tensors[i].data_ptr() for i in direct], np.uint64)
        if rows.size:
            yield Pieces(rows, np.zeros(rows.size, np.uint64), manifest.nbytes[rows], addresses)
        for index in indirect:
            yield from converted_pieces(index, self._tensors[index], manifest.tensors[index].dtype)


class ModuleSource(StateDictSource):
    """All parameters and persistent buffers of a module, wrappers' prefixes stripped in any
    nesting.

    Args:
        module: read anew on each update; never changed.
        dtype: declared casts, for instance ``torch.bfloat16`` when the engine runs in bf16.
    """

    def __init__(self, module: torch.nn.Module, *, dtype: CastRule = None) -> None:
        super().__init__({}, dtype=dtype)
        self._module = module

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._module.state_dict(keep_vars=True).items()


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


_Identity = tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]]


def _identity(tensor: torch.Tensor) -> _Identity:
    """Changes when the tensor is another, or has other memory, dtype, shape or strides."""
    return (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _plain(tensor: object) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and (
        tensor.layout == torch.strided  # type: ignore[attr-defined]
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
