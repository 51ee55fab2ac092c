"""The digest as csrc/digest.h publishes it, in Python's own integers: slow, and independent."""

from __future__ import annotations

from weightsync.digest import Digest

U64_MAX = 2**64 - 1


def published_mix(k: int) -> int:
    """`mix` of csrc/digest.h, in Python's own integers."""
    k &= U64_MAX
    k ^= k >> 32
    k = k * 0xD6E8FEB86659FD93 & U64_MAX
    k ^= k >> 32
    k = k * 0xD6E8FEB86659FD93 & U64_MAX
    return k ^ (k >> 32)


def published_key(index: int, seed: int) -> tuple[int, int]:
    """k0 and k1 of a word, in Python's own integers."""
    k = published_mix(index + seed)
    return (k & 0xFFFFFFFF) | 1, k >> 32


def published_count(nbytes: int, seed: int) -> Digest:
    """What the number of bytes adds."""
    k0, k1 = published_key(U64_MAX, seed)
    return Digest(nbytes * k0 & U64_MAX, nbytes * k1 & U64_MAX)


def published_digest(data: bytes, positions: list[int], seed: int) -> Digest:
    """The definition in Python's own integers, a byte at a time."""
    first = second = 0
    for byte, position in zip(data, positions, strict=True):
        k0, k1 = published_key(position // 8, seed)
        word = byte << 8 * (position % 8)
        a, b = word & 0xFFFFFFFF, word >> 32
        first, second = first + a * k0 + b * k1, second + a * k1 - b * k0
    return Digest(first & U64_MAX, second & U64_MAX) + published_count(len(data), seed)
