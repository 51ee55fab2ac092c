"""Manifests: what cannot describe a model is none, and equal hashes mean equal lists."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.digest import tensor_identities
from weightsync.errors import ManifestError
from weightsync.manifest import DTYPE_BYTES, MAX_BYTES, MAX_NAME, Manifest, TensorSpec

specs = st.builds(
    TensorSpec,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
lists = st.lists(specs, min_size=1, max_size=5, unique_by=lambda spec: spec.name)

W = TensorSpec("w", "float32", (2, 3))


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_known_dtype_is_torchs_and_as_wide(dtype: str) -> None:
    assert isinstance(getattr(torch, dtype), torch.dtype)
    assert DTYPE_BYTES[dtype] == getattr(torch, dtype).itemsize


def test_bytes_are_torchs_bytes() -> None:
    manifest = Manifest([W, TensorSpec("s", "bfloat16", ()), TensorSpec("e", "int64", (0, 4))])
    assert manifest.nbytes.tolist() == [24, 2, 0]
    assert manifest.total_bytes == 26 and len(manifest) == 3
    assert manifest.index == {"w": 0, "s": 1, "e": 2}


def test_nothing_is_no_model() -> None:
    with pytest.raises(ManifestError, match="at least one tensor"):
        Manifest([])


def test_a_name_is_used_once_and_the_error_says_which() -> None:
    with pytest.raises(ManifestError, match="'w'"):
        Manifest([W, TensorSpec("v", "float32", (1,)), TensorSpec("w", "int8", (1,))])


@pytest.mark.parametrize(
    "dtype", ["float33", "", "torch.float32", "F32", "complex128", "__class__"]
)
def test_an_unknown_dtype_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(ManifestError, match="'w' has dtype"):
        Manifest([TensorSpec("w", dtype, (1,))])


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1)])
def test_a_name_has_a_sane_length(name: str) -> None:
    with pytest.raises(ManifestError, match="characters"):
        Manifest([TensorSpec(name, "float32", (1,))])
    Manifest([TensorSpec("x" * MAX_NAME, "float32", (1,))])


def test_half_a_surrogate_pair_is_no_name() -> None:
    with pytest.raises(ManifestError, match="no Unicode"):
        Manifest([TensorSpec("w\ud800", "float32", (1,))])


@pytest.mark.parametrize(
    "shape",
    [(-1,), (2, -3), (-2, -3), (0, -1), (MAX_BYTES + 1,), (1 << 40, 1 << 40), (0, 1 << 70)],
)
def test_an_impossible_shape_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ManifestError, match="'w' has the impossible shape"):
        Manifest([TensorSpec("w", "uint8", shape)])


def test_many_possible_tensors_that_are_impossible_together_are_refused() -> None:
    """Their sum would wrap around in 64 bits, and an arena of one page would hold them all."""
    huge = [TensorSpec(f"w{i}", "uint8", (MAX_BYTES,)) for i in range((1 << 64) // MAX_BYTES)]
    assert int(np.array([spec.nbytes for spec in huge], np.uint64).sum()) == 0
    with pytest.raises(ManifestError, match="bytes"):
        Manifest(huge)


@given(lists)
def test_equal_lists_hash_equal_even_over_the_wire(tensors: list[TensorSpec]) -> None:
    wire = msgspec.msgpack.encode(tuple(tensors))
    again = Manifest(msgspec.msgpack.decode(wire, type=tuple[TensorSpec, ...]))
    manifest = Manifest(tensors)
    assert again == manifest and hash(again) == hash(manifest) and again.hash == manifest.hash
    assert len(manifest.hash) == 64 and manifest != "w"


@given(lists, lists)
def test_different_lists_hash_differently(one: list[TensorSpec], two: list[TensorSpec]) -> None:
    assert (Manifest(one).hash == Manifest(two).hash) == (one == two)


@pytest.mark.parametrize(
    "other",
    [
        TensorSpec("v", "float32", (2, 3)),
        TensorSpec("w", "int32", (2, 3)),
        TensorSpec("w", "float32", (3, 2)),
        TensorSpec("w", "float32", (6,)),
        TensorSpec("w", "float32", (2, 3, 1)),
    ],
)
def test_hash_depends_on_name_dtype_and_shape(other: TensorSpec) -> None:
    assert Manifest([W]).hash != Manifest([other]).hash


def test_hash_depends_on_order_and_on_every_tensor() -> None:
    v = TensorSpec("v", "float32", (2, 3))
    hashes = {Manifest(tensors).hash for tensors in ([W, v], [v, W], [W], [v])}
    assert len(hashes) == 4


def test_identities_are_those_of_the_fields() -> None:
    v = TensorSpec("v", "bfloat16", ())
    expected = tensor_identities(["w", "v"], ["float32", "bfloat16"], [(2, 3), ()])
    assert np.array_equal(Manifest([W, v]).identities, expected)


def test_a_spec_prints_as_one_reads_it() -> None:
    assert str(W) == "w float32[2, 3]"
