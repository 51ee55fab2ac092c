"""The trainer's bytes, looked at again: in the arena or in the source, whole or cut, the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file

from weightsync import ModuleSource, SafetensorsSource, StateDictSource
from weightsync.box import Box
from weightsync.digest import derive_seeds, reference_digest_at
from weightsync.errors import SourceError
from weightsync.evidence import ArenaEvidence, Part, SourceEvidence, _runs, digest_part
from weightsync.holding import spot_columns
from weightsync.manifest import DTYPE_BYTES, Manifest, TensorSpec
from weightsync.sources.base import Pieces

SHAPES = {
    "matrix": ("bfloat16", (13, 9)),
    "cube": ("float32", (3, 4, 5)),
    "vector": ("uint8", (37,)),
    "scalar": ("float64", ()),
    "empty": ("float32", (0, 4)),
    "none wide": ("int16", (5, 0)),
    "deep": ("int16", (2, 3, 1, 2, 4)),
}
MANIFEST = Manifest(tuple(TensorSpec(n, d, s) for n, (d, s) in SHAPES.items()))
SEEDS = derive_seeds(0x5EED, MANIFEST.identities)


class CutSource:
    """Real memory, given out in pieces that end at any byte, in any order.

    Args:
        memory: the bytes of each tensor; of another address than any alignment asks for.
        cuts: where each tensor is cut, in bytes.
        order: sorts all pieces.
        at_once: pieces in a batch.
    """

    casts: Mapping[str, str] = {}
    aliases: Mapping[str, str] = {}

    def __init__(self, memory: list[NDArray[np.uint8]], cuts, order: int, at_once: int) -> None:
        self._memory = memory
        self._at_once = at_once
        self._pieces = [
            (index, start, end - start)
            for index, flat in enumerate(memory)
            for start, end in itertools.pairwise(
                sorted({0, flat.size, *(cut % (flat.size + 1) for cut in cuts)})
            )
        ]
        np.random.default_rng(order).shuffle(self._pieces)

    def manifest(self) -> Manifest:
        return MANIFEST

    def pieces(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Pieces]:
        mine = [p for p in self._pieces if wanted is None or wanted[p[0]]]
        for first in range(0, len(mine), self._at_once):
            rows = mine[first : first + self._at_once]
            index, start, nbytes = (np.array(column) for column in zip(*rows, strict=True))
            # What was given before is gone: whoever kept an address would read something else.
            copies = [self._memory[i][s : s + n].copy() for i, s, n in rows]
            address = [copy.ctypes.data for copy in copies]
            yield Pieces(
                index.astype(np.int64),
                start.astype(np.uint64),
                nbytes.astype(np.uint64),
                np.array(address, np.uint64),
            )
            for copy in copies:
                copy[:] = 0xEE


def memory_of(seed: int) -> list[NDArray[np.uint8]]:
    """Random bytes of each tensor, each one byte off any alignment."""
    generator = np.random.default_rng(seed)
    return [
        generator.integers(0, 256, int(nbytes) + 1, dtype=np.uint8)[1:]
        for nbytes in MANIFEST.nbytes.tolist()
    ]


def addresses(memory: list[NDArray[np.uint8]]) -> NDArray[np.uint64]:
    return np.array([flat.ctypes.data for flat in memory], np.uint64)


def slow_digest(memory: list[NDArray[np.uint8]], part: Part) -> list[int]:
    """Element by element, from the definition."""
    spec = MANIFEST.tensors[part.index]
    size = DTYPE_BYTES[spec.dtype]
    positions = []
    for box in part.boxes:
        ranges = [range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)]
        for at in itertools.product(*ranges):
            element = 0
            for i, side in zip(at, spec.shape, strict=True):
                element = element * side + i
            positions += range(element * size, element * size + size)
    where = np.array(positions, np.uint64)
    data = memory[part.index][where.astype(np.int64)].tobytes()
    digest = reference_digest_at(data, where, seed=int(SEEDS[part.index]))
    return [digest.first, digest.second]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    sides = []
    for side in shape:
        first = draw(st.integers(0, side))
        sides.append((first, draw(st.integers(0, side - first))))
    return Box(tuple(o for o, _ in sides), tuple(n for _, n in sides))


@st.composite
def parts(draw: st.DrawFn) -> Part:
    index = draw(st.integers(0, len(SHAPES) - 1))
    shape = MANIFEST.tensors[index].shape
    box = draw(boxes(shape))
    if shape and draw(st.booleans()):
        columns = spot_columns(draw(st.integers(0, 2**64 - 1)), "w", box.lengths[-1])
        return Part(
            index,
            tuple(
                Box((*box.offsets[:-1], box.offsets[-1] + c), (*box.lengths[:-1], 1))
                for c in columns
            ),
        )
    return Part(index, (box,))


@settings(max_examples=150, deadline=None)
@given(
    wanted=st.lists(parts(), max_size=6),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    order=st.integers(0, 2**32),
    at_once=st.integers(1, 50),
    seed=st.integers(0, 2**32),
)
def test_arena_and_source_agree_with_the_definition_wherever_the_source_cuts(
    wanted: list[Part], cuts: list[int], order: int, at_once: int, seed: int
) -> None:
    memory = memory_of(seed)
    expected = [slow_digest(memory, part) for part in wanted]
    arena = ArenaEvidence(MANIFEST, addresses(memory))
    source = SourceEvidence(CutSource(memory, cuts, order, at_once), MANIFEST)
    assert arena.digests(wanted, SEEDS).tolist() == expected
    assert source.digests(wanted, SEEDS).tolist() == expected
    for part, its in zip(wanted, expected, strict=True):
        spec = MANIFEST.tensors[part.index]
        size = DTYPE_BYTES[spec.dtype]
        found = digest_part(memory[part.index], spec.shape, size, part, SEEDS[part.index])
        assert found.tolist() == its


@given(part=parts(), seed=st.integers(0, 2**32))
def test_only_the_bytes_of_a_part_are_brought_to_another_form(part: Part, seed: int) -> None:
    """An engine stands still meanwhile: of a few columns that must not take a whole matrix."""
    spec, memory = MANIFEST.tensors[part.index], memory_of(seed)
    size = DTYPE_BYTES[spec.dtype]
    formed = 0

    def inverted(content: np.ndarray) -> np.ndarray:
        nonlocal formed
        formed += content.nbytes
        return ~content

    args = spec.shape, size, part, SEEDS[part.index]
    found = digest_part(memory[part.index], *args, inverted)
    assert found.tolist() == digest_part(~memory[part.index], *args).tolist()
    assert formed == sum(box.numel for box in part.boxes) * size


@given(
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    order=st.integers(0, 2**32),
    at_once=st.integers(1, 50),
)
def test_the_content_of_each_tensor_is_its_bytes(cuts: list[int], order: int, at_once: int) -> None:
    memory = memory_of(7)
    arena = ArenaEvidence(MANIFEST, addresses(memory))
    source = SourceEvidence(CutSource(memory, cuts, order, at_once), MANIFEST)
    for index, flat in enumerate(memory):
        for found in (arena.content(index), source.content(index)):
            assert np.array_equal(found, flat)
            if found.size:
                assert found.ctypes.data != flat.ctypes.data, "a view would change under the hand"


@given(data=st.data())
def test_runs_are_those_of_the_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    box = data.draw(boxes(shape))
    assert _runs(box, shape).tolist() == [[run.start, run.length] for run in box.runs(shape)]


def test_one_changed_byte_changes_the_parts_that_hold_it_and_no_other() -> None:
    memory = memory_of(1)
    rows, columns = SHAPES["matrix"][1]
    every = [Part(0, (Box((r, c), (1, 1)),)) for r in range(rows) for c in range(columns)]
    evidence = ArenaEvidence(MANIFEST, addresses(memory))
    before = evidence.digests(every, SEEDS)
    memory[0][2 * (4 * columns + 3)] ^= 1
    changed = np.flatnonzero((evidence.digests(every, SEEDS) != before).any(axis=1))
    assert changed.tolist() == [4 * columns + 3]


def test_disjoint_parts_add_up_to_the_whole() -> None:
    evidence = ArenaEvidence(MANIFEST, addresses(memory_of(3)))
    rows, columns = SHAPES["matrix"][1]
    pieces = [Part(0, (Box((0, c), (rows, 1)),)) for c in range(columns)]
    whole = evidence.digests([Part(0, (Box.whole((rows, columns)),))], SEEDS)
    assert np.array_equal(evidence.digests(pieces, SEEDS).sum(axis=0, dtype=np.uint64), whole[0])


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        "a.weight": torch.randn((33, 7), generator=generator),
        "b.weight": torch.randn((5, 6), generator=generator).t(),  # has to be made contiguous
        "c.bias": torch.randn((), generator=generator),
    }


def sources(tmp_path) -> list:
    held = values()
    module = torch.nn.Module()
    for name, value in held.items():
        parent, leaf = name.split(".")
        child = torch.nn.Module()
        child.register_parameter(leaf, torch.nn.Parameter(value, requires_grad=False))
        module.add_module(parent, child)
    save_file({n: v.contiguous() for n, v in held.items()}, tmp_path / "model.safetensors")
    return [
        StateDictSource(held, dtype=torch.bfloat16),
        ModuleSource(module, dtype=torch.bfloat16),
        SafetensorsSource(tmp_path, dtype=torch.bfloat16),
    ]


def test_sources_that_convert_as_they_go_give_what_is_sent(tmp_path) -> None:
    for source in sources(tmp_path):
        manifest = source.manifest()
        seeds = derive_seeds(3, manifest.identities)
        sent = [
            values()[spec.name]
            .to(torch.bfloat16)
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            for spec in manifest.tensors
        ]
        evidence = SourceEvidence(source, manifest)
        wanted = [
            Part(i, (Box(tuple(n // 2 for n in s.shape), tuple(n - n // 2 for n in s.shape)),))
            for i, s in enumerate(manifest.tensors)
        ]
        arena = ArenaEvidence(manifest, np.array([one.ctypes.data for one in sent], np.uint64))
        assert np.array_equal(evidence.digests(wanted, seeds), arena.digests(wanted, seeds))
        for index, flat in enumerate(sent):
            assert np.array_equal(evidence.content(index), flat)


def test_a_source_that_gives_a_byte_twice_or_not_at_all_is_noticed() -> None:
    memory = memory_of(5)
    source = CutSource(memory, [11, 20], 0, 3)
    evidence = SourceEvidence(source, MANIFEST)
    whole = [Part(0, (Box.whole(MANIFEST.tensors[0].shape),))]
    evidence.digests(whole, SEEDS)
    lost = next(piece for piece in source._pieces if piece[0] == 0)
    for pieces in (
        [piece for piece in source._pieces if piece != lost],
        [*source._pieces, lost],
    ):
        source._pieces = pieces
        with pytest.raises(SourceError, match="not each of them once"):
            evidence.digests(whole, SEEDS)
        with pytest.raises(SourceError, match="not each of them once"):
            evidence.content(0)


def test_a_column_of_a_tall_matrix_takes_no_loop_over_its_rows() -> None:
    """Runs are as many as rows; each piece of the source is asked for them."""
    shape = (150_000, 8)
    runs = _runs(Box((0, 3), (150_000, 1)), shape)
    assert runs.shape == (150_000, 2) and int(runs[-1, 0]) == 149_999 * 8 + 3
    assert math.prod(shape) > int(runs[:, 0].max())
