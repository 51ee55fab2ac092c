"""The manifest: ordered names, dtypes and shapes of all checkpoint tensors of one model. Pure
data, no I/O."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from weightsync.digest import tensor_identities
from weightsync.errors import ManifestError

__all__ = ["DTYPE_BYTES", "Manifest", "TensorSpec"]

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
}
"""Bytes per element, by torch's name of the dtype without ``torch.``."""

MAX_NAME = 1024
MAX_BYTES = 1 << 50
"""Of one tensor and of all together; no side is longer, not even an empty tensor's."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype (torch's name without ``torch.``) and shape of one whole checkpoint tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class Manifest:
    """An ordered, duplicate-free list of `TensorSpec` and what is derived from it.

    Raises:
        ManifestError: a name is empty, too long or used twice, a dtype is unknown, a side is
            negative, there is no tensor at all, or there are more bytes than any machine has.
    """

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        self.tensors = tuple(tensors)
        if not self.tensors:
            raise ManifestError(
                "a manifest needs at least one tensor, got none",
                remedy="pass a model or state dict that has parameters",
            )
        seen: set[str] = set()
        for tensor in self.tensors:
            _check(tensor)
            if tensor.name in seen:
                raise ManifestError(
                    f"two tensors are named {tensor.name!r}",
                    remedy="one name per checkpoint tensor; look for wrappers whose prefixes were "
                    "stripped to the same name",
                )
            seen.add(tensor.name)
        # Offsets and sums are 64 bits wide; a manifest from outside must not make them wrap around.
        total = sum(tensor.nbytes for tensor in self.tensors)
        if total > MAX_BYTES:
            raise ManifestError(f"{total} bytes in all exceed {MAX_BYTES}")

    def __len__(self) -> int:
        return len(self.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.hash == other.hash

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    @cached_property
    def hash(self) -> str:
        """Hex blake2b-256 over the canonical encoding: same order, names, dtypes and shapes."""
        return hashlib.blake2b(msgspec.msgpack.encode(self.tensors), digest_size=32).hexdigest()

    @cached_property
    def nbytes(self) -> NDArray[np.uint64]:
        """Bytes of each tensor, shape (n,)."""
        return np.fromiter((t.nbytes for t in self.tensors), np.uint64, len(self.tensors))

    @cached_property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    @cached_property
    def identities(self) -> NDArray[np.uint64]:
        """The part of each tensor's digest seed that never changes, shape (n, 2)."""
        return tensor_identities(
            [t.name for t in self.tensors],
            [t.dtype for t in self.tensors],
            [t.shape for t in self.tensors],
        )

    @cached_property
    def index(self) -> dict[str, int]:
        """Position by name."""
        return {tensor.name: number for number, tensor in enumerate(self.tensors)}


def _check(tensor: TensorSpec) -> None:
    if not tensor.name or len(tensor.name) > MAX_NAME:
        raise ManifestError(
            f"a tensor's name has 1 to {MAX_NAME} characters, got {len(tensor.name)}"
        )
    try:
        tensor.name.encode()
    except UnicodeEncodeError as error:
        raise ManifestError(f"the name {tensor.name!r} is no Unicode text") from error
    if tensor.dtype not in DTYPE_BYTES:
        raise ManifestError(
            f"{tensor.name!r} has dtype {tensor.dtype!r}; known are {', '.join(DTYPE_BYTES)}",
            remedy="declare a cast at the source (dtype=...)",
        )
    if any(not 0 <= side <= MAX_BYTES for side in tensor.shape) or tensor.nbytes > MAX_BYTES:
        raise ManifestError(f"{tensor.name!r} has the impossible shape {tensor.shape}")
