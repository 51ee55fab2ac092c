"""A part of what another source has, chosen by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from weightsync.errors import SourceError
from weightsync.manifest import Manifest
from weightsync.sources.base import Pieces, Source

__all__ = ["Selection", "named"]


def named(source: Source, patterns: Sequence[str]) -> frozenset[str]:
    """The names of a source's tensors that patterns match (`fnmatch`; a plain name matches itself).

    A name of a tensor that is not sent, being the same memory as another, stands for that other.

    Raises:
        SourceError: there is no pattern, or one matches nothing.
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise SourceError(f"expected a list of names or patterns of names, got {patterns!r}")
    if not patterns:
        raise SourceError(
            "an update of no tensor was asked for",
            remedy="name at least one tensor, or leave `only` out for a full update",
        )
    names = [tensor.name for tensor in source.manifest().tensors]
    homes = {name: name for name in names} | dict(source.aliases)
    found: set[str] = set()
    for pattern in patterns:
        matched = {homes[name] for name in fnmatch.filter(homes, pattern)}
        if pattern in homes:  # a name may hold what a pattern would take for a wildcard
            matched.add(homes[pattern])
        if not matched:
            raise SourceError(
                f"no tensor of the source is called {pattern!r}",
                remedy=f"it has {len(names)}, from {names[0]!r} to {names[-1]!r}",
            )
        found |= matched
    return frozenset(found)


class Selection:
    """See `weightsync.sources.base.Source`: the tensors of another source that were chosen, in its
    order.

    Args:
        source: read anew on each update.
        names: of the tensors to keep; those that the source lacks by then are an error.
        aliases: ``{name: name}`` of tensors that were left out as being the same as another.
    """

    def __init__(
        self, source: Source, names: frozenset[str], aliases: Mapping[str, str] | None = None
    ) -> None:
        self._source = source
        self._names = names
        self._aliases = dict(aliases or {})
        self._seen: Manifest | None = None
        self._chosen: Manifest | None = None
        self._places = np.zeros(0, np.int64)

    @property
    def casts(self) -> Mapping[str, str]:
        return {name: cast for name, cast in self._source.casts.items() if name in self._names}

    @property
    def aliases(self) -> Mapping[str, str]:
        kept = {a: name for a, name in self._source.aliases.items() if name in self._names}
        return kept | self._aliases

    def manifest(self) -> Manifest:
        """See `weightsync.sources.base.Source`.

        Raises:
            SourceError: a chosen tensor is not there any more.
        """
        whole = self._source.manifest()
        if self._chosen is None or self._seen is not whole:
            gone = self._names - whole.index.keys()
            if gone:
                raise SourceError(f"the source has no tensor {min(gone)!r} any more")
            chosen = [tensor for tensor in whole.tensors if tensor.name in self._names]
            self._places = np.full(len(whole), -1, np.int64)
            self._places[[whole.index[tensor.name] for tensor in chosen]] = np.arange(len(chosen))
            self._chosen, self._seen = Manifest(chosen), whole
        return self._chosen

    def pieces(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Pieces]:
        """See `weightsync.sources.base.Source`."""
        chosen = self.manifest() if self._chosen is None else self._chosen
        marked = self._places >= 0
        if wanted is not None:
            marked[marked] = wanted[self._places[marked]]
        for batch in self._source.pieces(marked):
            if batch.manifest not in (None, self._seen):
                raise SourceError(
                    "the source's tensors have changed since the manifest was made",
                    remedy="do not add, rename or replace parameters while stage() runs",
                )
            places = self._places[batch.index]
            yield Pieces(places, batch.start, batch.nbytes, batch.address, chosen)
