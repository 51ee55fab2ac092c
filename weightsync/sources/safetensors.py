"""A checkpoint directory as a source: one safetensors file, or several with an index. Read by
mmap, never all in memory.

The format is read here rather than through the safetensors package because the bytes go straight
from the page cache into the arena: 8 bytes little-endian header length, a JSON header ``{name:
{dtype, shape, data_offsets}}``, then the data (the format's specification, safetensors 0.8).
Everything that the header claims is checked against the file before it is believed.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from weightsync.errors import SourceError
from weightsync.manifest import Manifest, TensorSpec
from weightsync.sources.base import Pieces
from weightsync.transport.shm import address_of

if TYPE_CHECKING:
    from weightsync.sources.module import CastRule

__all__ = ["SafetensorsSource"]

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
MAX_HEADER: Final = 100 << 20
BATCH_BYTES: Final = 32 << 20
"""Bytes of a file that are resident at once."""

DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Stored:
    file: Path
    identity: tuple[int, int, int, int]
    spec: TensorSpec
    offset: int


class SafetensorsSource:
    """A checkpoint directory, or one ``.safetensors`` file.

    Headers are read once, on construction; the data when an update is staged, by mmap. Files that
    have changed by then, or while they are read, are an error: make a new source for new files. One
    that is *truncated* while it is read ends this process with SIGBUS, which no library can turn
    into an error. So never write checkpoints in place: write beside, then rename.

    Args:
        path: the directory or file.
        dtype: declared casts; nothing is cast otherwise.

    Raises:
        SourceError: the path, the index or a header is not what the format says; names the file
            and the tensor.
    """

    def __init__(self, path: str | os.PathLike[str], *, dtype: CastRule = None) -> None:
        self.path = Path(path)
        self.casts: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        self._stored = _read_checkpoint(self.path)
        self._seen = {stored.file: stored.identity for stored in self._stored}
        if not self._stored:
            raise SourceError(f"{self.path} holds no tensor")
        specs = []
        for stored in self._stored:
            spec = stored.spec
            to = spec.dtype if dtype is None else _cast(spec, dtype)
            if to != spec.dtype:
                self.casts[spec.name] = f"{spec.dtype} -> {to}"
            specs.append(TensorSpec(spec.name, to, spec.shape))
        self._manifest = Manifest(specs)
        self._places = np.array(
            [(i, s.offset, s.spec.nbytes) for i, s in enumerate(self._stored)], np.uint64
        )

    def manifest(self) -> Manifest:
        """See `weightsync.sources.base.Source`."""
        return self._manifest

    def pieces(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Pieces]:
        """See `weightsync.sources.base.Source`. At most `BATCH_BYTES` of a file are resident at a
        time."""
        by_file: dict[Path, list[int]] = {}
        for index, stored in enumerate(self._stored):
            if wanted is None or wanted[index]:
                by_file.setdefault(stored.file, []).append(index)
        for file, indices in by_file.items():
            with file.open("rb") as handle:
                self._check_unchanged(file, os.fstat(handle.fileno()))
                size = os.fstat(handle.fileno()).st_size
                # Private and writable only because torch wants writable buffers; nothing is ever
                # written.
                mapping = mmap.mmap(
                    handle.fileno(),
                    size,
                    flags=mmap.MAP_PRIVATE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            mapping.madvise(mmap.MADV_SEQUENTIAL)
            yield from self._file_pieces(mapping, indices)
            self._check_unchanged(file, file.stat())

    def _check_unchanged(self, file: Path, found: os.stat_result) -> None:
        if _identity(found) != self._seen[file]:
            raise SourceError(
                f"{file} is not the file any more that was opened",
                remedy="make a new source; write checkpoints beside the old ones, then rename",
            )

    def _file_pieces(self, mapping: mmap.mmap, indices: list[int]) -> Iterator[Pieces]:
        """One file's tensors: those that are sent as they are stored, in batches that are cut by
        bytes, then the others."""
        cast = [index for index in indices if self._stored[index].spec.name in self.casts]
        table = self._places[np.setdiff1d(indices, cast)]
        base = np.uint64(address_of(mapping))
        low = 0
        for batch in _cut(table):
            index, start, nbytes, offset = batch.T
            yield Pieces(index.astype(np.int64), start, nbytes, base + offset)
            low = _release(mapping, low, int(offset[-1] + nbytes[-1]))
        for number in cast:
            stored = self._stored[number]
            yield from _converted(number, stored, mapping, self._manifest.tensors[number].dtype)
            _release(mapping, stored.offset, stored.offset + stored.spec.nbytes)
        # The mapping goes with the last reference; its pages stay in the page cache only.


def _cut(table: NDArray[np.uint64]) -> Iterator[NDArray[np.uint64]]:
    """Tensors, in rows of (index, offset in the file, bytes), as batches of at most `BATCH_BYTES`
    in rows of (index, first byte in the tensor, bytes, offset in the file)."""
    index, offset, nbytes = table.T
    ends = np.cumsum(nbytes, dtype=np.uint64)
    if not ends.size or not ends[-1]:
        return
    begins = ends - nbytes
    cuts = np.arange(0, int(ends[-1]), BATCH_BYTES, dtype=np.uint64)
    edges = np.unique(np.concatenate([begins, cuts, ends[-1:]]))
    first, length = edges[:-1], np.diff(edges)
    tensor = np.searchsorted(ends, first, side="right")
    start = first - begins[tensor]
    rows = np.stack([index[tensor], start, length, offset[tensor] + start], axis=1)
    yield from np.split(rows, np.searchsorted(first, cuts[1:]))


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _cast(spec: TensorSpec, rule: CastRule) -> str:
    import torch

    from weightsync.sources.module import dtype_name, wire_dtype

    return dtype_name(wire_dtype(spec.name, getattr(torch, spec.dtype), rule))


def _converted(index: int, stored: _Stored, mapping: mmap.mmap, dtype: str) -> Iterator[Pieces]:
    import torch

    from weightsync.sources.module import converted_pieces

    if stored.spec.nbytes:
        flat = torch.frombuffer(
            mapping,
            dtype=getattr(torch, stored.spec.dtype),
            count=stored.spec.numel,
            offset=stored.offset,
        )
        yield from converted_pieces(index, flat, dtype)


def _release(mapping: mmap.mmap, low: int, high: int) -> int:
    """Unmap the whole pages of ``low..high`` from this process; the next page that is still
    needed."""
    first = -(-low // mmap.PAGESIZE) * mmap.PAGESIZE
    last = high // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
        return last
    return low


def _read_checkpoint(path: Path) -> list[_Stored]:
    if path.is_file():
        return _read_file(path)
    index, single = path / INDEX, path / SINGLE
    if index.is_file():
        return _read_sharded(path, index)
    if single.is_file():
        return _read_file(single)
    raise SourceError(
        f"{path} holds no {SINGLE} and no {INDEX}",
        remedy="point at a checkpoint directory as save_pretrained writes it (no .bin files)",
    )


def _read_sharded(directory: Path, index: Path) -> list[_Stored]:
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"{index} is no index: {error}") from error
    if not weight_map:
        raise SourceError(f"{index} names no tensor")
    found: list[_Stored] = []
    for file in dict.fromkeys(weight_map.values()):
        if Path(file).name != file or file in ("", ".", ".."):
            raise SourceError(f"{index} names {file!r}, expected a file beside it")
        if not os.path.isfile(directory / file):  # Path.is_file raises on an endless name
            raise SourceError(
                f"{index} names {file!r}, which is not there",
                remedy="the checkpoint is incomplete; copy it again",
            )
        found += _read_file(directory / file)
    placed = {stored.spec.name: stored.file.name for stored in found}
    for name, file in weight_map.items():
        if placed.get(name) != file:
            raise SourceError(f"{index} says that {name!r} is in {file!r}; it is not")
    extra = placed.keys() - weight_map.keys()
    if extra:
        raise SourceError(
            f"{placed[min(extra)]!r} holds {min(extra)!r}, which {index} does not name"
        )
    return found


def _read_file(file: Path) -> list[_Stored]:
    with file.open("rb") as handle:
        # Of the very file that the header is read from, whatever stands under its name by then.
        identity = _identity(os.fstat(handle.fileno()))
        size = os.fstat(handle.fileno()).st_size
        prefix = handle.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER, size - 8):
            raise SourceError(f"{file} is no safetensors file: its header claims {length} bytes")
        header = handle.read(length)
    data = 8 + length
    try:
        # Not by msgspec: of a name that comes twice it would keep the last and say nothing.
        raw = json.loads(header.decode("utf-8"), object_pairs_hook=_unique)
        entries = msgspec.convert(raw, dict[str, Any])
        entries.pop("__metadata__", None)
        entries = {name: msgspec.convert(entry, _Entry) for name, entry in entries.items()}
    except (ValueError, RecursionError) as error:  # msgspec's and json's errors are ValueErrors
        raise SourceError(f"{file} is no safetensors file: {error}") from error
    found = []
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise SourceError(
                f"{file}: {name!r} has dtype {entry.dtype!r}, known are {', '.join(DTYPES)}"
            )
        spec = TensorSpec(name, DTYPES[entry.dtype], tuple(entry.shape))
        begin, end = entry.data_offsets
        if (
            any(side < 0 for side in spec.shape)
            or begin < 0
            or end - begin != spec.nbytes
            or data + end > size
        ):
            raise SourceError(
                f"{file}: {name!r} claims bytes {begin} to {end} of {size - data} "
                f"for {spec.nbytes}",
                remedy="the file is damaged or cut off; copy it again",
            )
        found.append(_Stored(file, identity, spec, data + begin))
    found.sort(key=lambda stored: stored.offset)
    for before, after in itertools.pairwise(found):
        if before.offset + before.spec.nbytes > after.offset:
            raise SourceError(f"{file}: {before.spec.name!r} and {after.spec.name!r} overlap")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    "".join(found).encode()  # half a surrogate pair is no name
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} comes twice")
    return found
