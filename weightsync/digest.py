"""Digests: keyed 128-bit fingerprints of tensors that add up over boxes.

The arithmetic stands in `csrc/digest.h`. In short, for a tensor's canonical byte string (row-major,
little-endian), word ``w`` being bytes ``8w..8w+7`` of the *whole* tensor, with halves ``a`` (low)
and ``b`` (high)::

    K = mix(w + seed)      k0 = low32(K) | 1      k1 = high32(K)
    F = (sum a*k0 + b*k1,  sum a*k1 - b*k0)       each modulo 2**64

Zero bytes add nothing to these sums: without more, an all-zero tensor that was skipped would go
unnoticed. So the number of bytes ``n`` is one more term, ``(n*k0, n*k1)`` under the key of word
``2**64 - 1``, which no tensor has. It is linear in ``n``, and ``k0`` is odd: zeros too few or too
many always show.

Digests of disjoint parts add up to the digest of the whole, whatever the parts are and wherever
they lie; an empty part adds nothing. A change inside one word is always caught. Any other
corruption that was fixed before the seed was drawn is missed with probability at most 2**-61. One
limit: a digest is no authentication code (who knows the seed can forge one).

    identities = tensor_identities(["w"], ["BF16"], [[4096, 4096]])     # once per manifest
    seeds = derive_seeds(update_seed, identities)                       # once per update
    table = digest_spans([address], [nbytes], [0], seeds)               # (1, 2) uint64
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightsync import _native
from weightsync.tables import U64Array, U64Like, table_columns, table_rows

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

IDLE_THREADS = 4
_MASK = (1 << 64) - 1
_MIX_MULTIPLIER = 0xD6E8FEB86659FD93
_COUNT_WORD = _MASK  # its key counts bytes
_IDENTITY_DOMAIN = b"weightsync/id/1"
# Fractional digits of the golden ratio, of sqrt 2 and of sqrt 3: they set the rounds of
# `derive_seeds` apart and keep an all-zero input away from zero, which `mix` maps to itself.
_ROUND_CONSTANTS = (0x9E3779B97F4A7C15, 0x6A09E667F3BCC909, 0xBB67AE8584CAA73B)


@dataclass(frozen=True, slots=True)
class Digest:
    """The two 64-bit sums of a digest. ``+`` joins the digests of disjoint parts of one tensor.

    Raises:
        ValueError: a sum is not in ``[0, 2**64)``.
    """

    first: int
    second: int

    def __post_init__(self) -> None:
        if not (0 <= self.first <= _MASK and 0 <= self.second <= _MASK):
            raise ValueError(f"digest sums must be unsigned 64-bit: {self.first}, {self.second}")

    def __add__(self, other: Digest) -> Digest:
        if not isinstance(other, Digest):
            return NotImplemented
        return Digest((self.first + other.first) & _MASK, (self.second + other.second) & _MASK)

    def hex(self) -> str:
        """32 hexadecimal digits, the first sum first."""
        return f"{self.first:016x}{self.second:016x}"


def tensor_identities(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> U64Array:
    """What a tensor is, in 128 bits: BLAKE2b of its name, dtype and global shape.

    Every field is preceded by its length, so that no two descriptions share an encoding.

    Args:
        names: n checkpoint names.
        dtypes: n dtype names, as the manifest spells them.
        shapes: n global shapes.

    Returns:
        (n, 2) uint64, to be computed once per manifest.

    Raises:
        ValueError: the three have different lengths, or a dimension is negative.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(
            f"as many names as dtypes and shapes are needed: "
            f"{len(names)}, {len(dtypes)}, {len(shapes)}"
        )
    digests = bytearray()
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if any(length < 0 for length in shape):
            raise ValueError(f"{name}: negative dimension in shape {tuple(shape)}")
        hasher = hashlib.blake2b(digest_size=16, person=_IDENTITY_DOMAIN)
        for text in (name.encode(), dtype.encode()):
            hasher.update(len(text).to_bytes(8, "little"))
            hasher.update(text)
        for number in (len(shape), *shape):
            hasher.update(number.to_bytes(8, "little"))
        digests += hasher.digest()
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64).reshape(len(names), 2)


def derive_seeds(update_seed: int, identities: U64Array) -> U64Array:
    """The seed of every tensor for one update.

    Three rounds of the digest's own mixer take in the update's seed and the identity's halves. Each
    round is a bijection, so a uniformly random update seed gives each tensor a uniformly random
    seed: all that the digest's bound asks for.

    Args:
        update_seed: 64 bits, fresh and random for every update; otherwise a stale answer passes.
        identities: (n, 2) uint64 from `tensor_identities`.

    Returns:
        (n,) uint64.

    Raises:
        ValueError: the seed is not in ``[0, 2**64)``, or identities have another shape or dtype.
    """
    if not 0 <= update_seed <= _MASK:
        raise ValueError(f"update_seed must be unsigned 64-bit: {update_seed}")
    if identities.dtype != np.uint64 or identities.ndim != 2 or identities.shape[1] != 2:
        raise ValueError(f"identities must be (n, 2) uint64: {identities.shape} {identities.dtype}")
    first, second, third = _ROUND_CONSTANTS
    state = np.full(len(identities), (update_seed + first) & _MASK, dtype=np.uint64)
    state = _mix(state)
    state = _mix((state ^ identities[:, 0]) + np.uint64(second))
    return _mix((state ^ identities[:, 1]) + np.uint64(third))


def digest_spans(
    addresses: U64Like,
    nbytes: U64Like,
    starts: U64Like,
    seeds: U64Like,
    out_index: U64Like | None = None,
    n_out: int | None = None,
    *,
    threads: int = 1,
) -> U64Array:
    """Digests n spans of memory, each consecutive bytes of some tensor.

    Args:
        addresses: (n,) where each span lies. The caller keeps the memory alive.
        nbytes: (n,) lengths; zero is allowed, at any address.
        starts: (n,) byte offset of each span's first byte in its whole tensor.
        seeds: (n,) seed of each span's tensor.
        out_index: (n,) the digest to which each span adds; by default each has its own.
        n_out: number of digests; by default just enough for `out_index`. Give it where trailing
            tensors may have no span.
        threads: the work is split by bytes. One core mostly saturates the memory.

    Returns:
        (n_out, 2) uint64. A digest without spans is zero.

    Raises:
        ValueError: lengths differ, a value is negative, an out_index is not below n_out, or an
            address is null where nbytes is not zero.
    """
    columns = table_columns(
        addresses=addresses, nbytes=nbytes, starts=starts, seeds=seeds, out_index=out_index
    )
    return _native.digest_table(table_rows(columns), _n_out(columns, n_out), threads=threads)


def idle_threads() -> int:
    """How many threads may digest while nobody else is at work: those of this process's cores that
    it takes to saturate the memory."""
    return min(len(os.sched_getaffinity(0)), IDLE_THREADS)


def digest_tensors(
    addresses: U64Like, nbytes: U64Like, seeds: U64Like, *, threads: int = 1
) -> U64Array:
    """Digests n whole tensors of host memory: `digest_spans`, each from its first byte.

    Args:
        addresses, nbytes, seeds, threads: (n,) as in `digest_spans`.

    Returns:
        (n, 2) uint64.
    """
    starts = np.zeros(len(addresses), np.uint64)
    return digest_spans(addresses, nbytes, starts, seeds, threads=threads)


def copy_and_digest_spans(
    sources: U64Like,
    destinations: U64Like,
    nbytes: U64Like,
    starts: U64Like,
    seeds: U64Like,
    out_index: U64Like | None = None,
    n_out: int | None = None,
    *,
    threads: int = 1,
    streaming: bool | None = None,
) -> U64Array:
    """Copies n spans and digests what was read, in one pass over memory.

    The digest is of the very bytes that were stored, even while another writer changes the source.

    Args:
        sources: (n,) addresses to read.
        destinations: (n,) addresses to write; nothing may overlap.
        nbytes, starts, seeds, out_index, n_out, threads: as in `digest_spans`.
        streaming: whether to write past the cache: True for an arena that nobody reads soon, False
            for a ring whose reader is next, None to decide by the size of the whole table.

    Returns:
        (n_out, 2) uint64.

    Raises:
        ValueError: as in `digest_spans`, or a span overlaps its own destination.
    """
    columns = table_columns(
        sources=sources,
        destinations=destinations,
        nbytes=nbytes,
        starts=starts,
        seeds=seeds,
        out_index=out_index,
    )
    return _native.copy_digest_table(
        table_rows(columns),
        _n_out(columns, n_out),
        threads=threads,
        streaming=_streaming(streaming),
    )


def copy_spans(
    sources: U64Like,
    destinations: U64Like,
    nbytes: U64Like,
    *,
    threads: int = 1,
    streaming: bool | None = None,
) -> None:
    """Copies n spans. Arguments and errors as in `copy_and_digest_spans`."""
    columns = table_columns(sources=sources, destinations=destinations, nbytes=nbytes)
    _native.copy_table(table_rows(columns), threads=threads, streaming=_streaming(streaming))


def digest_bytes(buffer: Buffer, *, start: int = 0, seed: int) -> Digest:
    """The digest of a C-contiguous buffer that lies at byte `start` of its tensor.

    Args:
        buffer: anything with the buffer protocol, numpy arrays included; read as its bytes.
        start: byte offset in the whole tensor.
        seed: 64-bit seed of the tensor.

    Raises:
        ValueError: the buffer is not C-contiguous, or a number is not in ``[0, 2**64)``.
    """
    if isinstance(buffer, np.ndarray):
        # Arrays are taken as they are: of extension dtypes (bfloat16) no memoryview can be had.
        contiguous = buffer.flags.c_contiguous
    else:
        buffer = memoryview(buffer)
        contiguous = buffer.c_contiguous
    if not contiguous:
        raise ValueError("a digest is of row-major bytes: the buffer must be C-contiguous")
    if isinstance(buffer, np.ndarray):
        flat = buffer.ravel().view(np.uint8)
    else:
        flat = np.frombuffer(buffer, dtype=np.uint8)
    table = digest_spans([flat.ctypes.data], [flat.nbytes], [start], [seed])
    return Digest(int(table[0, 0]), int(table[0, 1]))


def reference_digest(data: bytes, *, start: int, seed: int) -> Digest:
    """The definition, byte by byte and slow, for tests to hold the kernels against.

    Each byte counts as a word of its own in which all other bytes are zero; the number of bytes
    is added in Python's own unbounded integers.
    """
    positions = (start + np.arange(len(data), dtype=np.uint64)).astype(np.uint64)
    return reference_digest_at(data, positions, seed=seed)


def reference_digest_at(data: bytes, positions: U64Array, *, seed: int) -> Digest:
    """`reference_digest` of bytes that stand anywhere in the whole.

    Args:
        data: n bytes.
        positions: (n,) uint64, where each byte stands in its whole tensor.
        seed: of the whole tensor.
    """
    shifts = (positions & np.uint64(7)) * np.uint64(8)
    words = np.frombuffer(data, dtype=np.uint8).astype(np.uint64) << shifts
    low32, half, one = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(1)
    keys = _mix((positions >> np.uint64(3)) + np.uint64(seed))
    a, b = words & low32, words >> half
    k0, k1 = (keys & low32) | one, keys >> half
    first = (a * k0 + b * k1).sum(dtype=np.uint64)
    second = (a * k1 - b * k0).sum(dtype=np.uint64)
    count_key = int(_mix(np.array([(_COUNT_WORD + seed) & _MASK], dtype=np.uint64))[0])
    count0, count1 = (count_key & 0xFFFFFFFF) | 1, count_key >> 32
    return Digest(
        (int(first) + len(data) * count0) & _MASK, (int(second) + len(data) * count1) & _MASK
    )


def _mix(x: U64Array) -> U64Array:
    """`mix` of csrc/digest.h, on arrays (whose arithmetic wraps without a warning)."""
    half, multiplier = np.uint64(32), np.uint64(_MIX_MULTIPLIER)
    x = (x ^ (x >> half)) * multiplier
    x = (x ^ (x >> half)) * multiplier
    return x ^ (x >> half)


def _n_out(columns: dict[str, U64Array], n_out: int | None) -> int:
    if n_out is not None:
        return n_out
    out_index = columns["out_index"]
    return int(out_index.max()) + 1 if out_index.size else 0


def _streaming(streaming: bool | None) -> int:
    return -1 if streaming is None else int(streaming)
