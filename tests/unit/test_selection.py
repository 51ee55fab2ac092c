"""A chosen part of a source is exactly that part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weightsync.digest import derive_seeds
from weightsync.errors import SourceError
from weightsync.sources import ModuleSource, SafetensorsSource, StateDictSource
from weightsync.sources.base import Source, fill
from weightsync.sources.selection import Selection, named

TENSORS = {
    "a.weight": torch.randn(3, 5),
    "a.bias": torch.randn(5, 2).t(),  # not contiguous: goes through a buffer
    "b.weight": torch.randn(7).to(torch.bfloat16),
    "b[0].weight": torch.arange(4),
    "c.empty": torch.zeros(0, 3),
}


def from_disk(path: Path) -> Source:
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(contiguous, str(path / "model.safetensors"))
    return SafetensorsSource(path)


SOURCES: dict[str, Callable[[Path], Source]] = {
    "state dict": lambda path: StateDictSource(TENSORS),
    "safetensors": from_disk,
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return SOURCES[request.param](tmp_path)


def taken(source: Source) -> dict[str, bytes]:
    manifest = source.manifest()
    places = [np.zeros(max(int(n), 1), np.uint8) for n in manifest.nbytes]
    addresses = np.array([place.ctypes.data for place in places], np.uint64)
    fill(source, manifest, addresses, derive_seeds(1, manifest.identities))
    return {
        spec.name: place.tobytes()[: spec.nbytes]
        for spec, place in zip(manifest.tensors, places, strict=True)
    }


@pytest.mark.parametrize(
    "names",
    [{"a.bias"}, {"b.weight", "a.weight"}, {"c.empty", "b[0].weight"}, set(TENSORS)],
)
def test_only_the_chosen_tensors_come_and_with_their_own_bytes(
    source: Source, names: set[str]
) -> None:
    everything = taken(source)
    assert taken(Selection(source, frozenset(names))) == {
        name: everything[name] for name in everything if name in names
    }


def test_a_selection_of_a_selection_counts_in_its_own_manifest(source: Source) -> None:
    outer = Selection(source, frozenset({"a.bias", "b.weight", "b[0].weight"}))
    inner = Selection(outer, frozenset({"b[0].weight"}))
    assert taken(inner) == {"b[0].weight": TENSORS["b[0].weight"].numpy().tobytes()}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["a.*"], {"a.weight", "a.bias"}),
        (["*.weight"], {"a.weight", "b.weight", "b[0].weight"}),
        (["b[0].weight"], {"b[0].weight"}),
        (["c.empty", "a.bias"], {"c.empty", "a.bias"}),
    ],
)
def test_patterns_match_names(source: Source, patterns: list[str], names: set[str]) -> None:
    assert named(source, patterns) == names


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ([], "no tensor"),
        (["a.*", "d.*"], r"'d\.\*'"),
        ("a.weight", "got 'a.weight'"),
        ([1], r"got \[1\]"),
    ],
)
def test_what_matches_nothing_is_an_error(source: Source, patterns, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        named(source, patterns)


def test_another_name_of_a_tied_tensor_stands_for_the_tensor_that_is_sent() -> None:
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4)})
    module["head"].weight = module["embed"].weight
    source = ModuleSource(module)
    assert named(source, ["head.weight"]) == {"embed.weight"}
    selection = Selection(source, frozenset({"embed.weight"}))
    selection.manifest()
    assert selection.aliases == {"head.weight": "embed.weight"}


def test_a_declared_cast_of_a_tensor_that_is_left_out_is_not_told() -> None:
    source = StateDictSource(TENSORS, dtype={"a.*": torch.bfloat16})
    selection = Selection(source, frozenset({"a.bias", "b.weight"}))
    selection.manifest()
    assert selection.casts == {"a.bias": "float32 -> bfloat16"}


def test_a_selection_notices_what_its_source_has_lost_or_replaced() -> None:
    tensors = dict(TENSORS)
    selection = Selection(StateDictSource(tensors), frozenset({"a.weight", "b.weight"}))
    taken(selection)
    tensors["a.weight"] = torch.randn(3, 5)
    assert taken(selection)["a.weight"] == tensors["a.weight"].numpy().tobytes()
    del tensors["b.weight"]
    with pytest.raises(SourceError, match=r"'b\.weight' any more"):
        selection.manifest()
