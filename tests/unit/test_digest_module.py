"""What digest.py itself does: values, the reference, seeds, and what native code is handed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from published_digest import (
    U64_MAX,
    published_count,
    published_digest,
    published_key,
    published_mix,
)

from weightsync import _native
from weightsync.digest import (
    Digest,
    copy_and_digest_spans,
    copy_spans,
    derive_seeds,
    digest_bytes,
    digest_spans,
    digest_tensors,
    reference_digest,
    reference_digest_at,
    tensor_identities,
)

SEED = 0x0123456789ABCDEF
IDENTITIES = tensor_identities(["a", "b"], ["BF16", "F32"], [[4, 8], [32]])

u64s = st.integers(0, U64_MAX)
# Around the carry from the low into the high half of the word index, too.
starts = st.one_of(st.integers(0, 64), st.integers(2**35 - 64, 2**35 + 64), st.integers(0, 2**60))


def random_bytes(n: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def as_digest(table: NDArray[np.uint64], row: int = 0) -> Digest:
    return Digest(int(table[row, 0]), int(table[row, 1]))


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sums", [(U64_MAX + 1, 0), (0, U64_MAX + 1), (-1, 0), (0, -1)])
def test_sums_have_64_bits(sums: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="unsigned 64-bit"):
        Digest(*sums)


def test_sums_wrap() -> None:
    assert Digest(U64_MAX, U64_MAX) + Digest(1, 1) == Digest(0, 0)
    assert Digest(2**63, 1) + Digest(2**63 - 1, 2) == Digest(U64_MAX, 3)


def test_only_digests_are_added_to_digests() -> None:
    for other in (1, (1, 2), None):
        with pytest.raises(TypeError, match="unsupported operand"):
            Digest(1, 2) + other  # type: ignore[operator]


def test_digests_are_values() -> None:
    assert len({Digest(1, 2), Digest(1, 2), Digest(2, 1)}) == 2
    with pytest.raises(AttributeError):
        Digest(1, 2).first = 3  # type: ignore[misc]


# --- the reference -------------------------------------------------------------------------------


@given(data=st.binary(max_size=40), start=starts, seed=u64s)
def test_the_reference_is_the_published_formula(data: bytes, start: int, seed: int) -> None:
    expected = published_digest(data, list(range(start, start + len(data))), seed)
    assert reference_digest(data, start=start, seed=seed) == expected
    assert digest_bytes(data, start=start, seed=seed) == expected


@given(placed=st.dictionaries(st.integers(0, U64_MAX), st.integers(0, 255), max_size=12), seed=u64s)
def test_the_reference_takes_bytes_that_stand_anywhere(placed: dict[int, int], seed: int) -> None:
    data, positions = bytes(placed.values()), np.array(list(placed), dtype=np.uint64)
    expected = published_digest(data, list(placed), seed)
    assert reference_digest_at(data, positions, seed=seed) == expected


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
def test_the_sums_of_the_reference_wrap_where_the_bytes_are_counted(which: int) -> None:
    """Words whose own sum lies just below 2**64, so that the number of bytes carries it over."""
    data, missing = bytearray(8 * 64), U64_MAX
    weights = [
        (published_key(word, SEED)[which] << 8 * byte, 8 * word + byte)
        for word in range(64)
        for byte in range(4)
    ]
    for weight, at in sorted(weights, reverse=True):
        data[at] = min(missing // weight, 255)
        missing -= data[at] * weight
    count = published_count(len(data), SEED)
    assert 0 <= missing < (count.first, count.second)[which]
    found = reference_digest(bytes(data), start=0, seed=SEED)
    assert found == published_digest(bytes(data), list(range(len(data))), SEED)
    assert found == digest_bytes(data, seed=SEED)
    assert (found.first, found.second)[which] == (
        U64_MAX - missing + (count.first, count.second)[which] - 2**64
    )


# --- identities and seeds ------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(1, 0, 1), (1, 1, 0), (0, 1, 1), (2, 1, 1)])
def test_a_tensor_has_a_name_a_dtype_and_a_shape(counts: tuple[int, int, int]) -> None:
    names, dtypes, shapes = counts
    with pytest.raises(ValueError, match="as many names as dtypes and shapes"):
        tensor_identities(["a"] * names, ["F32"] * dtypes, [[1]] * shapes)


def test_sides_may_be_zero_and_not_less() -> None:
    assert tensor_identities(["a"], ["F32"], [[0, 1]]).shape == (1, 2)
    with pytest.raises(ValueError, match=r"a: negative dimension in shape \(0, -1\)"):
        tensor_identities(["a"], ["F32"], [[0, -1]])


@pytest.mark.parametrize("update_seed", [-1, U64_MAX + 1])
def test_update_seeds_have_64_bits(update_seed: int) -> None:
    with pytest.raises(ValueError, match="unsigned"):
        derive_seeds(update_seed, IDENTITIES)


@pytest.mark.parametrize(
    "bad",
    [
        IDENTITIES[:, :1],
        np.hstack([IDENTITIES, IDENTITIES]),
        IDENTITIES.reshape(-1),
        IDENTITIES[..., None],
        IDENTITIES.astype(np.int64),
        IDENTITIES.astype(np.float64),
    ],
    ids=["narrow", "wide", "flat", "deep", "signed", "floating"],
)
def test_identities_of_another_shape_or_dtype_are_refused(bad: NDArray[np.generic]) -> None:
    with pytest.raises(ValueError, match=r"\(n, 2\)"):
        derive_seeds(1, bad)  # type: ignore[arg-type]


@given(update_seed=u64s, first=u64s, second=u64s)
def test_seeds_are_three_rounds_of_the_mixer(update_seed: int, first: int, second: int) -> None:
    state = update_seed + 0x9E3779B97F4A7C15
    state = (published_mix(state) ^ first) + 0x6A09E667F3BCC909
    state = (published_mix(state) ^ second) + 0xBB67AE8584CAA73B
    identities = np.array([[first, second]], dtype=np.uint64)
    seeds = derive_seeds(update_seed, identities)
    assert seeds.tolist() == [published_mix(state)] and seeds.dtype == np.uint64


@pytest.mark.parametrize("update_seed", [0, 1, U64_MAX])
def test_every_update_seed_of_64_bits_is_taken(update_seed: int) -> None:
    seeds = derive_seeds(update_seed, IDENTITIES)
    assert seeds.shape == (2,) and len(set(seeds.tolist())) == 2


# --- the tables ----------------------------------------------------------------------------------


def test_seeds_and_places_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        digest_bytes(b"abc", 0, SEED)  # type: ignore[misc]
    with pytest.raises(TypeError):
        reference_digest(b"abc", 0, SEED)  # type: ignore[misc]
    with pytest.raises(TypeError):
        reference_digest_at(b"abc", np.arange(3, dtype=np.uint64), SEED)  # type: ignore[misc]
    with pytest.raises(TypeError):
        digest_spans([], [], [], [], None, None, 1)  # type: ignore[misc]
    with pytest.raises(TypeError):
        copy_and_digest_spans([], [], [], [], [], None, None, 1)  # type: ignore[misc]
    with pytest.raises(TypeError):
        copy_spans([], [], [], 1)  # type: ignore[misc]


@pytest.mark.parametrize(("streaming", "asked"), [(None, -1), (False, 0), (True, 1)])
def test_what_is_not_said_is_left_to_the_native_code(
    monkeypatch: pytest.MonkeyPatch, streaming: bool | None, asked: int
) -> None:
    """How a copy is stored changes no byte: what can be seen is what the native code is told."""
    told = []
    for name in ("copy_table", "copy_digest_table", "digest_table"):

        def recorded(*args: object, _call: object = getattr(_native, name), **named: int) -> object:
            told.append(named)
            return _call(*args, **named)  # type: ignore[operator]

        monkeypatch.setattr(_native, name, recorded)
    how = {} if streaming is None else {"streaming": streaming}
    copy_spans([], [], [], **how)
    copy_and_digest_spans([], [], [], [], [], **how)
    digest_spans([], [], [], [])
    assert told == [{"threads": 1, "streaming": asked}] * 2 + [{"threads": 1}]


def test_as_many_digests_as_the_highest_index_asks_for() -> None:
    data = random_bytes(8)
    at = data.ctypes.data
    for copy in (False, True):
        to = ([np.zeros(8, dtype=np.uint8).ctypes.data],) if copy else ()
        call = copy_and_digest_spans if copy else digest_spans
        for index in (0, 1, 7):
            table = call([at], *to, [8], [0], [SEED], [index])
            assert table.shape == (index + 1, 2)
            assert as_digest(table, index) == digest_bytes(data, seed=SEED)
            assert not table[:index].any()
        assert call([at], *to, [8], [0], [SEED], [1], 5).shape == (5, 2)
        assert call([], *([],) * copy, [], [], [], n_out=0).shape == (0, 2)


def test_whole_tensors_are_spans_from_their_first_byte() -> None:
    one, two = random_bytes(100, 1), random_bytes(77, 2)
    table = digest_tensors([one.ctypes.data, two.ctypes.data], [100, 77], [SEED, 9])
    assert as_digest(table, 0) == digest_bytes(one, start=0, seed=SEED)
    assert as_digest(table, 1) == digest_bytes(two, start=0, seed=9)
