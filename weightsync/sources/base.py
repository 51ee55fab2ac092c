"""The protocol of a source, and how a source is read."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weightsync.digest import copy_and_digest_spans, digest_spans
from weightsync.errors import SourceError
from weightsync.manifest import Manifest

__all__ = ["Pieces", "Push", "Source", "digest_source", "fill", "pour", "same_bytes"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of checkpoint tensors in this process's memory, ready to be copied. All arrays have
    shape (k,).

    Attributes:
        index: of the tensor in the manifest, int64.
        start: first byte within the whole tensor, uint64.
        nbytes: bytes, uint64.
        address: where they lie, uint64. Valid until the iterator that yielded them is advanced.
        manifest: the one in which `index` counts, where a source's manifests can differ from one
            call to the next.
    """

    index: NDArray[np.int64]
    start: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    address: NDArray[np.uint64]
    manifest: Manifest | None = None


class Source(Protocol):
    """What a trainer has."""

    @property
    def casts(self) -> Mapping[str, str]:
        """``{name: "float32 -> bfloat16"}`` of the last manifest; declared by the user, named in
        the receipt."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """``{name: name}`` of tensors that are not sent: they are the same memory as another."""
        ...

    def manifest(self) -> Manifest:
        """Names, wire dtypes and shapes as of now.

        Raises:
            SourceError, ManifestError: the tensors cannot be sent.
        """
        ...

    def pieces(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Pieces]:
        """The bytes of every tensor of the last `manifest`, each exactly once, in any order and
        cut.

        Args:
            wanted: by position in the manifest, shape (n,): only the tensors that are marked.

        Raises:
            SourceError: tensors were replaced or written to since `pieces` began, as far as the
                source can see; at the latest after the last piece.
        """
        ...


Push = Callable[[Pieces], None]
"""Takes pieces whose `index`, `start` and `nbytes` have been checked against the manifest."""


def pour(
    source: Source,
    manifest: Manifest,
    push: Push,
    *,
    wanted: NDArray[np.bool_] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Read a source, each byte exactly once.

    What is read are the very bytes at that moment: nothing says that all of these were the
    trainer's at one moment. That is for the source to notice, and no source notices writers that
    leave no trace: fused optimizers, writes through ``p.data`` or a raw pointer, other processes, a
    checkpoint file that is written in place.

    Args:
        manifest: of the source.
        push: called with each batch.
        wanted: by position, shape (n,): only the tensors that are marked.
        progress: called with (bytes done, bytes in all) after each batch.

    Raises:
        SourceError: the pieces are not exactly the manifest's bytes (found before a piece that is
            out of bounds is pushed), or the source's tensors were replaced or written to meanwhile.
    """
    whole = manifest.nbytes if wanted is None else np.where(wanted, manifest.nbytes, 0)
    spans: list[NDArray[np.uint64]] = []
    done, total = 0, int(whole.sum())
    for batch in source.pieces(wanted):
        if batch.index.size == 0:
            continue
        if batch.manifest not in (None, manifest):
            raise SourceError(
                "the source's tensors have changed since the manifest was made",
                remedy="do not add, rename or replace parameters while stage() runs",
            )
        if int(batch.index.min()) < 0 or int(batch.index.max()) >= len(manifest):
            raise SourceError("a source yielded a piece of a tensor that its manifest lacks")
        sizes = manifest.nbytes[batch.index]
        if np.any(batch.start > sizes) or np.any(batch.nbytes > sizes - batch.start):
            raise SourceError("a source yielded a piece that reaches beyond its tensor")
        push(batch)
        index = batch.index.astype(np.uint64)
        spans.append(np.stack([index, batch.start, batch.nbytes], axis=1))
        done += int(batch.nbytes.sum())
        if progress is not None:
            progress(done, total)
    _check_each_byte_once(manifest, whole, spans)


def _check_each_byte_once(
    manifest: Manifest, whole: NDArray[np.uint64], spans: list[NDArray[np.uint64]]
) -> None:
    """Rows of (index, start, bytes) tile every tensor. Digests would not tell: both sides add up
    the same rows.

    Raises:
        SourceError: names the first tensor that they do not.
    """
    rows = np.concatenate([np.zeros((0, 3), np.uint64), *spans])
    rows = rows[rows[:, 2] > 0]
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    index, start = rows[:, 0].astype(np.int64), rows[:, 1]
    ends = start + rows[:, 2]
    arrived = np.zeros(len(manifest), np.uint64)
    np.add.at(arrived, index, rows[:, 2])
    follows = np.zeros(len(rows), np.bool_)
    follows[1:] = index[1:] == index[:-1]
    expected = np.zeros_like(start)
    expected[1:] = np.where(follows[1:], ends[:-1], 0)
    wrong = np.union1d(index[start != expected], np.flatnonzero(arrived != whole))
    if wrong.size:
        first = int(wrong[0])
        raise SourceError(
            f"{manifest.tensors[first].name!r} has {int(whole[first])} bytes, the source yielded "
            f"{int(arrived[first])}, not each of them once",
            remedy="do not resize or replace parameters while they are sent",
        )


def fill(
    source: Source,
    manifest: Manifest,
    destination: NDArray[np.uint64],
    seeds: NDArray[np.uint64],
    progress: Callable[[int, int], None] | None = None,
) -> NDArray[np.uint64]:
    """Copy a source into memory and digest what was read, in the same pass.

    Args:
        manifest: of the source.
        destination: address of each tensor's place, shape (n,).
        seeds: of each tensor's digest, shape (n,).
        progress: see `pour`.

    Returns:
        Digests of the source's bytes, shape (n, 2), uint64.

    Raises:
        SourceError: see `pour`.
    """
    digests = np.zeros((len(manifest), 2), np.uint64)

    def push(batch: Pieces) -> None:
        nonlocal digests
        digests = digests + copy_and_digest_spans(
            batch.address,
            destination[batch.index] + batch.start,
            batch.nbytes,
            batch.start,
            seeds[batch.index],
            batch.index,
            len(manifest),
        )

    pour(source, manifest, push, progress=progress)
    return digests


def digest_source(
    source: Source,
    manifest: Manifest,
    seeds: NDArray[np.uint64],
    *,
    wanted: NDArray[np.bool_] | None = None,
) -> NDArray[np.uint64]:
    """Digest what a source holds, read in place.

    Args:
        manifest: of the source.
        seeds: of each tensor's digest, shape (n,).
        wanted: by position, shape (n,): only the tensors that are marked.

    Returns:
        Shape (n, 2), uint64; zero for tensors that are not wanted.

    Raises:
        SourceError: see `pour`.
    """
    digests = np.zeros((len(manifest), 2), np.uint64)

    def push(batch: Pieces) -> None:
        nonlocal digests
        digests = digests + digest_spans(
            batch.address,
            batch.nbytes,
            batch.start,
            seeds[batch.index],
            batch.index,
            len(manifest),
        )

    pour(source, manifest, push, wanted=wanted)
    return digests


def same_bytes(source: Source, manifest: Manifest, one: int, other: int) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes, read in place.

    Told by digests under one random seed: unequal tensors pass with a probability below 2**-60.

    Raises:
        SourceError: see `pour`.
    """
    wanted = np.zeros(len(manifest), np.bool_)
    wanted[[one, other]] = True
    seeds = np.full(len(manifest), secrets.randbits(64), np.uint64)
    digests = digest_source(source, manifest, seeds, wanted=wanted)
    return bool((digests[one] == digests[other]).all())
