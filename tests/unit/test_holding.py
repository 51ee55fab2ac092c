"""What both sides must work out alike: the columns that are looked at, and what values arithmetic
gives back."""

from __future__ import annotations

import math
import struct
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ManifestError
from weightsync.holding import SPOT_COLUMNS, Holding, canonical, not_finite, spot_columns

seeds = st.integers(0, 2**64 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(seed=seeds, holder=names, width=st.integers(0, 5000))
def test_columns_are_distinct_ascending_in_range_and_as_many_as_there_are(
    seed: int, holder: str, width: int
) -> None:
    columns = spot_columns(seed, holder, width)
    assert len(columns) == min(width, SPOT_COLUMNS)
    assert list(columns) == sorted(set(columns))
    assert all(0 <= column < width for column in columns)
    assert columns == spot_columns(seed, holder, width)


def test_another_process_draws_the_same_columns() -> None:
    """Python's own hash differs from process to process."""
    code = (
        "from weightsync.holding import spot_columns;"
        "print(spot_columns(2**64 - 1, 'model.layers.0.qkv', 896))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str(spot_columns(2**64 - 1, "model.layers.0.qkv", 896))


def test_every_seed_and_every_holder_has_columns_of_its_own() -> None:
    drawn = {spot_columns(seed, "w", 4096) for seed in range(500)}
    drawn |= {spot_columns(0, f"w{number}", 4096) for number in range(500)}
    assert len(drawn) == 1000
    # A holder that ends as a number does not run into how often it was drawn.
    assert spot_columns(1, "w/1", 4096) != spot_columns(1, "w", 4096)


def test_no_column_is_safe_from_being_looked_at() -> None:
    """Each of 100 is drawn with a probability of 4 in 100: 2,000 draws miss one of them with a
    probability below 1e-33."""
    drawn = [column for seed in range(2000) for column in spot_columns(seed, "w", 100)]
    counts = np.bincount(drawn, minlength=100)
    assert counts.min() > 30 and counts.max() < 150


DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def value_of(bits: int, dtype: str) -> float:
    """A value, read by `struct` alone."""
    if dtype == "bfloat16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    size, code = {"float16": (2, "e"), "float32": (4, "f"), "float64": (8, "d")}[dtype]
    return struct.unpack(f"<{code}", bits.to_bytes(size, "little"))[0]


SMALLEST = {
    "float16": 2.0**-14,
    "bfloat16": 2.0**-126,
    "float32": 2.0**-126,
    "float64": 2.0**-1022,
}


def slow_canonical(bits: int, dtype: str) -> int:
    value = value_of(bits, dtype)
    return 0 if abs(value) < SMALLEST[dtype] else bits  # a NaN is below nothing


def slow_not_finite(bits: int, dtype: str) -> bool:
    return not math.isfinite(value_of(bits, dtype))


def stored(patterns: list[int], dtype: str) -> np.ndarray:
    data = b"".join(bits.to_bytes(DTYPES[dtype], "little") for bits in patterns)
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_patterns_of_16_bits(dtype: str) -> None:
    patterns = list(range(1 << 16))
    content = stored(patterns, dtype)
    expected = stored([slow_canonical(bits, dtype) for bits in patterns], dtype)
    assert np.array_equal(canonical(content, dtype), expected)
    for bits in patterns[:: 7 * 3]:
        assert not_finite(stored([bits], dtype), dtype) == slow_not_finite(bits, dtype)
    wrong = [bits for bits in patterns if slow_not_finite(bits, dtype)]
    right = [bits for bits in patterns if not slow_not_finite(bits, dtype)]
    assert not not_finite(stored(right, dtype), dtype)
    assert all(not_finite(stored([bits], dtype), dtype) for bits in wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_patterns_of_any_width_against_a_slow_reference(dtype: str, data: st.DataObject) -> None:
    size = 8 * DTYPES[dtype]
    exponent = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype]
    edges = st.builds(
        lambda sign, high, low: (sign << (size - 1)) | (high << exponent) | low,
        st.integers(0, 1),
        st.sampled_from([0, 1, (1 << (size - 1 - exponent)) - 2, (1 << (size - 1 - exponent)) - 1]),
        st.one_of(st.just(0), st.just(1), st.integers(0, (1 << exponent) - 1)),
    )
    patterns = data.draw(st.lists(st.one_of(edges, st.integers(0, (1 << size) - 1)), max_size=8))
    content = stored(patterns, dtype)
    before = content.copy()
    expected = stored([slow_canonical(bits, dtype) for bits in patterns], dtype)
    assert np.array_equal(canonical(content, dtype), expected)
    assert np.array_equal(canonical(expected, dtype), expected)
    assert not_finite(content, dtype) == any(slow_not_finite(bits, dtype) for bits in patterns)
    assert np.array_equal(content, before), "what is compared must not change"


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "float8_e4m3fn", "complex64"])
def test_other_dtypes_are_left_alone(dtype: str) -> None:
    content = np.frombuffer(bytes(range(200, 216)), np.uint8)
    assert np.array_equal(canonical(content, dtype), content)
    assert not not_finite(content, dtype)


def test_a_holding_travels_and_a_box_that_is_none_is_refused_when_it_is_looked_at() -> None:
    holding = Holding(3, "layers.0.qkv", (4, 0), (2, 8), "spot", True)
    packed = msgspec.msgpack.encode(holding)
    assert msgspec.msgpack.decode(packed, type=Holding) == holding
    assert holding.box.lengths == (2, 8)
    for wrong in (Holding(0, "w", (0,), (1, 2)), Holding(0, "w", (-1,), (1,))):
        with pytest.raises(ManifestError):
            _ = wrong.box
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([0, "w", [0], [1], "hoped"]), type=Holding)
