"""Properties of the digest: every kernel computes the definition, parts add up, faults show."""

from __future__ import annotations

import itertools
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from published_digest import U64_MAX, published_count, published_key

from weightsync import _native
from weightsync.digest import (
    Digest,
    copy_and_digest_spans,
    copy_spans,
    derive_seeds,
    digest_bytes,
    digest_spans,
    reference_digest,
    tensor_identities,
)

SEED = 0x0123456789ABCDEF
ISAS = [pytest.param(isa, id=_native.isa_name(isa)) for isa in range(_native.isa() + 1)]

u64s = st.integers(0, U64_MAX)
# Long enough for several rounds of the widest kernel, with all its ends.
lengths = st.one_of(st.integers(0, 40), st.integers(0, 1500))
# Around the carry from the low into the high half of the word index, too.
starts = st.one_of(st.integers(0, 64), st.integers(2**35 - 2048, 2**35 + 64), st.integers(0, 2**60))


def random_bytes(n: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def aligned(n: int, offset: int = 0) -> NDArray[np.uint8]:
    """n bytes that begin `offset` bytes after a multiple of 64."""
    base = np.zeros(n + 128, dtype=np.uint8)
    skip = -base.ctypes.data % 64 + offset
    return base[skip : skip + n]


def as_digest(table: NDArray[np.uint64], row: int = 0) -> Digest:
    return Digest(int(table[row, 0]), int(table[row, 1]))


def rows(*values: tuple[int, ...]) -> NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


def box_spans(
    array: NDArray[np.generic], row: slice, column: slice
) -> tuple[list[int], list[int], list[int]]:
    """Addresses, lengths and starts of the rows of a box of a C-contiguous matrix."""
    box = array[row, column]
    item, width = array.itemsize, array.shape[1]
    first = (row.start * width + column.start) * item
    n = box.shape[0]
    return (
        [array.ctypes.data + first + i * width * item for i in range(n)],
        [box.shape[1] * item] * n,
        [first + i * width * item for i in range(n)],
    )


# --- every kernel computes the definition -------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=200, deadline=None)
@given(n=lengths, offset=st.integers(0, 63), start=starts, seed=u64s, data=st.integers(0, 2**32))
def test_kernel_equals_the_bytewise_reference(
    isa: int, n: int, offset: int, start: int, seed: int, data: int
) -> None:
    buffer = aligned(n, offset)
    buffer[:] = random_bytes(n, data)
    table = _native.digest_table(rows((buffer.ctypes.data, n, start, seed, 0)), 1, isa)
    assert as_digest(table) == reference_digest(buffer.tobytes(), start=start, seed=seed)


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_words_and_seeds_equal_the_reference(isa: int) -> None:
    for fill in (0x00, 0x01, 0x7F, 0x80, 0xFF):
        buffer = np.full(333, fill, dtype=np.uint8)
        for start in (0, 3, 2**64 - 400):
            for seed in (0, 1, 2**32 - 1, 2**63, U64_MAX):
                row = rows((buffer.ctypes.data, 333, start, seed, 0))
                expected = reference_digest(buffer.tobytes(), start=start, seed=seed)
                assert as_digest(_native.digest_table(row, 1, isa)) == expected


def test_definition_is_fixed() -> None:
    # Trainer and engine may run different builds: these values must never change.
    data = bytes(range(256))
    assert digest_bytes(data, seed=SEED).hex() == "05e3a1b199f6c774770d38d97080c8e8"
    assert digest_bytes(data, start=5, seed=SEED).hex() == "a20b10cc175d45e821671bbc9c81c414"


def test_one_word_follows_the_published_formula() -> None:
    word, index = 0xFEDCBA9876543210, 7
    (a, b), (k0, k1) = (word & 0xFFFFFFFF, word >> 32), published_key(index, SEED)
    expected = Digest((a * k0 + b * k1) & U64_MAX, (a * k1 - b * k0) & U64_MAX)
    expected += published_count(8, SEED)
    assert digest_bytes(word.to_bytes(8, "little"), start=56, seed=SEED) == expected


# --- the number of bytes counts -----------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(lengths, min_size=2, max_size=8, unique=True), start=starts, seed=u64s)
def test_zeros_of_different_lengths_have_different_digests(
    isa: int, sizes: list[int], start: int, seed: int
) -> None:
    zeros, copied = np.zeros(max(sizes), dtype=np.uint8), np.zeros(max(sizes), dtype=np.uint8)
    from_, to = zeros.ctypes.data, copied.ctypes.data
    found = []
    for n in sizes:
        table = _native.digest_table(rows((from_, n, start, seed, 0)), 1, isa)
        fused = _native.copy_digest_table(rows((from_, to, n, start, seed, 0)), 1, isa)
        np.testing.assert_array_equal(table, fused)
        assert as_digest(table) == published_count(n, seed)
        found.append(as_digest(table))
    assert len(set(found)) == len(sizes)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    zero=st.lists(st.booleans(), min_size=10, max_size=10),
    seed=u64s,
    data=st.data(),
)
def test_a_span_of_zeros_that_is_skipped_changes_the_sum(
    sizes: list[int], zero: list[bool], seed: int, data: st.DataObject
) -> None:
    skipped = data.draw(st.integers(0, len(sizes) - 1))
    edges = [0, *itertools.accumulate(sizes)]
    buffer = random_bytes(edges[-1])
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        if zero[number] or number == skipped:
            buffer[low:high] = 0
    spans = [
        (buffer.ctypes.data + low, high - low, low, seed, 0)
        for low, high in itertools.pairwise(edges)
    ]
    whole = digest_bytes(buffer, seed=seed)
    assert as_digest(_native.digest_table(rows(*spans), 1)) == whole
    twice = _native.digest_table(rows(*spans, spans[skipped]), 1)
    del spans[skipped]
    fewer = _native.digest_table(rows(*spans) if spans else np.zeros((0, 5), np.uint64), 1)
    assert as_digest(fewer) != whole != as_digest(twice)


@pytest.mark.parametrize("isa", ISAS)
@given(start=starts, seed=u64s)
def test_empty_spans_add_nothing(isa: int, start: int, seed: int) -> None:
    buffer = random_bytes(24)
    span = (buffer.ctypes.data, 24, 8, SEED, 0)
    empty = (buffer.ctypes.data + 3, 0, start, seed, 0)
    np.testing.assert_array_equal(
        _native.digest_table(rows(empty, span, empty), 1, isa),
        _native.digest_table(rows(span), 1, isa),
    )


def test_parts_of_4_gib_and_more_add_up() -> None:
    """Counted in two halves, the carry into the high one would be lost where parts are added."""
    n = 2**32 + 24
    zeros = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)  # takes no memory
    at = np.frombuffer(zeros, dtype=np.uint8).ctypes.data
    whole = _native.digest_table(rows((at, n, 0, SEED, 0)), 1)
    assert as_digest(whole) == published_count(n, SEED)
    parts = rows((at, n - 2**31, 0, SEED, 0), (at + n - 2**31, 2**31, n - 2**31, SEED, 0))
    np.testing.assert_array_equal(_native.digest_table(parts, 1, threads=2), whole)


# --- parts add up -------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=100, deadline=None)
@given(n=lengths, start=starts, seed=u64s, data=st.data())
def test_any_split_adds_up_to_the_whole(
    isa: int, n: int, start: int, seed: int, data: st.DataObject
) -> None:
    buffer = random_bytes(n, n)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=12)))
    edges = [0, *cuts, n]
    parts = rows(
        *(
            (buffer.ctypes.data + low, high - low, start + low, seed, 0)
            for low, high in itertools.pairwise(edges)
        )
    )
    whole = rows((buffer.ctypes.data, n, start, seed, 0))
    np.testing.assert_array_equal(
        _native.digest_table(parts, 1, isa), _native.digest_table(whole, 1, isa)
    )


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 24),
    width=st.integers(1, 90),
    dtype=st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
    row_step=st.integers(1, 24),
    column_step=st.integers(1, 90),
)
def test_boxes_of_a_matrix_add_up_to_the_matrix(
    height: int, width: int, dtype: type[np.generic], row_step: int, column_step: int
) -> None:
    itemsize = np.dtype(dtype).itemsize
    matrix = random_bytes(height * width * itemsize).view(dtype).reshape(height, width)
    whole = digest_bytes(matrix, seed=SEED)

    def box_sum(rows_at: int, columns_at: int) -> Digest:
        total = Digest(0, 0)
        for r in range(0, height, rows_at):
            for c in range(0, width, columns_at):
                spans = box_spans(
                    matrix,
                    slice(r, min(r + rows_at, height)),
                    slice(c, min(c + columns_at, width)),
                )
                n = len(spans[0])
                total += as_digest(digest_spans(*spans, [SEED] * n, [0] * n, 1))
        return total

    assert box_sum(row_step, width) == whole
    assert box_sum(height, column_step) == whole
    assert box_sum(row_step, column_step) == whole


def test_spans_add_to_the_digest_they_name() -> None:
    one, two = random_bytes(100, 1), random_bytes(77, 2)
    table = digest_spans(
        [one.ctypes.data, two.ctypes.data, one.ctypes.data + 60],
        [60, 77, 40],
        [0, 0, 60],
        [SEED, 9, SEED],
        [2, 0, 2],
        4,
    )
    assert table.shape == (4, 2) and table.dtype == np.uint64
    assert as_digest(table, 2) == digest_bytes(one, seed=SEED)
    assert as_digest(table, 0) == digest_bytes(two, seed=9)
    assert not table[1].any() and not table[3].any()


def test_addition_wraps_and_hex_has_32_digits() -> None:
    total = Digest(U64_MAX, 5) + Digest(2, U64_MAX)
    assert total == Digest(1, 4)
    assert total.hex() == "0" * 15 + "1" + "0" * 15 + "4"
    with pytest.raises(ValueError, match="unsigned 64-bit"):
        Digest(U64_MAX + 1, 0)


# --- the fused copy -----------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("streaming", [0, 1])
@settings(max_examples=80, deadline=None)
@given(
    n=st.one_of(lengths, st.integers(4096, 9000)),
    source_offset=st.integers(0, 63),
    destination_offset=st.integers(0, 63),
    start=starts,
)
def test_fused_copy_gives_the_same_bytes_and_digest(
    isa: int, streaming: int, n: int, source_offset: int, destination_offset: int, start: int
) -> None:
    source = aligned(n, source_offset)
    source[:] = random_bytes(n, n)
    guarded = aligned(n + 2, destination_offset)
    guarded[:] = 0xA5
    destination = guarded[1 : n + 1]
    row = rows((source.ctypes.data, destination.ctypes.data, n, start, SEED, 0))
    table = _native.copy_digest_table(row, 1, isa, 1, streaming)
    np.testing.assert_array_equal(destination, source)
    assert guarded[0] == guarded[-1] == 0xA5, "wrote outside the destination"
    assert as_digest(table) == reference_digest(source.tobytes(), start=start, seed=SEED)


@pytest.mark.parametrize("streaming", [None, False, True])
@pytest.mark.parametrize("offset", [0, 1, 8, 24])
def test_large_copies_are_exact(streaming: bool | None, offset: int) -> None:
    n = (9 << 20) + 13
    source, destination = random_bytes(n), aligned(n + 64, offset)[:n]
    copy_spans([source.ctypes.data], [destination.ctypes.data], [n], streaming=streaming)
    np.testing.assert_array_equal(destination, source)
    destination[:] = 0
    table = copy_and_digest_spans(
        [source.ctypes.data],
        [destination.ctypes.data],
        [n],
        [offset],
        [SEED],
        streaming=streaming,
        threads=2,
    )
    np.testing.assert_array_equal(destination, source)
    assert as_digest(table) == digest_bytes(source, start=offset, seed=SEED)


def test_digest_of_a_copy_is_of_the_source_and_one_of_the_target_agrees() -> None:
    source, destination = random_bytes(5000), np.zeros(5000, dtype=np.uint8)
    sent = copy_and_digest_spans(
        [source.ctypes.data], [destination.ctypes.data], [5000], [3], [SEED]
    )
    assert as_digest(sent) == digest_bytes(destination, start=3, seed=SEED)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 255, 256, 257, 4099])
def test_a_plain_read_reads_every_byte(n: int) -> None:
    data = random_bytes(n)
    words = np.zeros(-(-n // 8), dtype=np.uint64)
    words.view(np.uint8)[:n] = data
    assert _native.read(data.ctypes.data, n) == int(np.bitwise_xor.reduce(words))


# --- threads change nothing ---------------------------------------------------------------------


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_nothing(threads: int) -> None:
    # Uneven spans, some empty, so that shares begin and end in the middle of them.
    sizes = [0, 1, (5 << 20) + 3, 17, 0, (3 << 20) + 1, 4096]
    data = random_bytes(sum(sizes))
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    addresses = data.ctypes.data + offsets.astype(np.uint64)
    first = np.array([0, 5, 9, 2**40 + 1, 0, 64, 7], dtype=np.uint64)
    seeds = np.arange(7, dtype=np.uint64)
    out = [0, 1, 1, 2, 3, 1, 0]
    single = digest_spans(addresses, sizes, first, seeds, out, 5)
    np.testing.assert_array_equal(
        digest_spans(addresses, sizes, first, seeds, out, 5, threads=threads), single
    )
    copied = np.zeros_like(data)
    destinations = copied.ctypes.data + offsets.astype(np.uint64)
    np.testing.assert_array_equal(
        copy_and_digest_spans(
            addresses, destinations, sizes, first, seeds, out, 5, threads=threads
        ),
        single,
    )
    np.testing.assert_array_equal(copied, data)
    copied[:] = 0
    copy_spans(addresses, destinations, sizes, threads=threads)
    np.testing.assert_array_equal(copied, data)


# --- faults show --------------------------------------------------------------------------------


@pytest.fixture
def matrix() -> NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal((37, 101)).astype(np.float32)


def assert_detected(before: NDArray[np.generic], after: NDArray[np.generic]) -> None:
    assert before.tobytes() != after.tobytes(), "the fault changed nothing"
    assert digest_bytes(np.ascontiguousarray(after), seed=SEED) != digest_bytes(before, seed=SEED)


def test_digest_detects_every_single_bit_flip(matrix: NDArray[np.float32]) -> None:
    few = matrix[:2].copy()
    flat = few.reshape(-1).view(np.uint8)
    for byte in range(flat.size):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert_detected(matrix[:2], few)
            flat[byte] ^= 1 << bit


@settings(max_examples=200, deadline=None)
@given(flips=st.lists(st.integers(0, 37 * 101 * 32 - 1), min_size=1, max_size=40, unique=True))
def test_digest_detects_any_set_of_bit_flips(flips: list[int]) -> None:
    before = random_bytes(37 * 101 * 4)
    after = before.copy()
    for flip in flips:
        after[flip // 8] ^= 1 << (flip % 8)
    assert_detected(before, after)


def test_digest_detects_swapped_rows(matrix: NDArray[np.float32]) -> None:
    for i in range(36):
        after = matrix.copy()
        after[[i, i + 1]] = after[[i + 1, i]]
        # What an unkeyed sum would say: nothing is wrong.
        assert after.view(np.uint32).sum() == matrix.view(np.uint32).sum()
        assert_detected(matrix, after)


def test_digest_detects_a_permutation_within_a_row(matrix: NDArray[np.float32]) -> None:
    rng = np.random.default_rng(1)
    for i in range(37):
        after = matrix.copy()
        after[i] = after[i, rng.permutation(101)]
        assert_detected(matrix, after)


def test_digest_detects_two_swapped_neighbours_inside_one_word(
    matrix: NDArray[np.float32],
) -> None:
    after = matrix.copy().reshape(-1)
    after[[0, 1]] = after[[1, 0]]
    assert_detected(matrix, after)


@pytest.mark.parametrize("elements", [1, 2, 3, 101, 202])
def test_digest_detects_a_shift(matrix: NDArray[np.float32], elements: int) -> None:
    assert_detected(matrix, np.roll(matrix.reshape(-1), elements))


def test_digest_detects_a_transposed_square(matrix: NDArray[np.float32]) -> None:
    square = np.ascontiguousarray(matrix[:, :37])
    assert_detected(square, square.T)


def test_digest_detects_a_stale_tile(matrix: NDArray[np.float32]) -> None:
    rng = np.random.default_rng(2)
    updated = matrix + rng.standard_normal(matrix.shape).astype(np.float32) * 1e-6
    for r in range(0, 32, 8):
        for c in range(0, 96, 16):
            after = updated.copy()
            after[r : r + 8, c : c + 16] = matrix[r : r + 8, c : c + 16]
            assert_detected(updated, after)


def test_digest_detects_even_numbers_of_sign_flips(matrix: NDArray[np.float32]) -> None:
    rng = np.random.default_rng(3)
    for count in (2, 4, 16, 256, matrix.size - 1):
        after = matrix.copy().reshape(-1)
        after[rng.choice(matrix.size, count, replace=False)] *= -1
        assert_detected(matrix, after)
    assert_detected(matrix, -matrix)


def test_digest_tells_negative_zero_from_zero() -> None:
    zeros = np.zeros(64, dtype=np.float32)
    after = zeros.copy()
    after[17] = -0.0
    assert np.array_equal(zeros, after), "equal as numbers"
    assert_detected(zeros, after)


def test_digest_tells_nan_payloads_apart() -> None:
    before = np.full(64, 0x7FC00000, dtype=np.uint32).view(np.float32)
    after = before.copy()
    after.view(np.uint32)[33] = 0x7FC00001
    assert np.isnan(before).all() and np.isnan(after).all()
    assert_detected(before, after)


def test_digest_detects_the_same_bytes_under_another_place() -> None:
    data = random_bytes(64)
    assert digest_bytes(data, start=0, seed=SEED) != digest_bytes(data, start=64, seed=SEED)


# --- seeds --------------------------------------------------------------------------------------

IDENTITIES = tensor_identities(
    ["a", "b", "ab", "a"], ["BF16", "BF16", "F32", "F32"], [[4, 8], [4, 8], [32], [4, 8]]
)


def test_identities_have_one_row_per_tensor_and_differ() -> None:
    assert IDENTITIES.shape == (4, 2) and IDENTITIES.dtype == np.uint64
    assert len({tuple(row) for row in IDENTITIES.tolist()}) == 4
    assert tensor_identities([], [], []).shape == (0, 2)


@pytest.mark.parametrize(
    "other",
    [
        ("ab", "c", [2, 3]),  # a letter moved between fields
        ("a", "bc", [23]),
        ("a", "bc", [3, 2]),
        ("a", "bc", [2, 3, 1]),
        ("a", "bc", []),
    ],
)
def test_identity_encoding_is_unambiguous(other: tuple[str, str, list[int]]) -> None:
    one = tensor_identities(["a"], ["bc"], [[2, 3]])
    two = tensor_identities([other[0]], [other[1]], [other[2]])
    assert (one != two).any()


def test_identities_are_fixed() -> None:
    assert IDENTITIES[0].tolist() == [0xDA9885322ACBEE6A, 0xD55CE416A337E1F1]
    assert derive_seeds(SEED, IDENTITIES[:1]).tolist() == [0x206287661BDD5587]


def test_a_seed_depends_on_every_bit_of_update_seed_and_identity() -> None:
    base = int(derive_seeds(SEED, IDENTITIES[:1])[0])
    changed = [int(derive_seeds(SEED ^ (1 << bit), IDENTITIES[:1])[0]) for bit in range(64)]
    for word in range(2):
        for bit in range(64):
            identity = IDENTITIES[:1].copy()
            identity[0, word] ^= np.uint64(1 << bit)
            changed.append(int(derive_seeds(SEED, identity)[0]))
    assert len({base, *changed}) == 1 + 64 + 128
    # Each single bit flips about half of the seed's bits, not one here and there.
    assert all(12 <= (base ^ other).bit_count() <= 52 for other in changed)


def test_a_fresh_seed_changes_every_digest() -> None:
    data = [random_bytes(1, 5) | 1, random_bytes(999, 6), random_bytes(8, 7), random_bytes(64, 8)]
    tables = []
    for update_seed in (1, 2):
        tables.append(
            digest_spans(
                [d.ctypes.data for d in data],
                [d.nbytes for d in data],
                [0] * 4,
                derive_seeds(update_seed, IDENTITIES),
            )
        )
    assert (tables[0] != tables[1]).all()


# --- bad arguments are refused ------------------------------------------------------------------


def test_empty_tables_and_empty_spans_are_fine() -> None:
    assert digest_spans([], [], [], []).shape == (0, 2)
    assert digest_spans([], [], [], [], n_out=3).tolist() == [[0, 0]] * 3
    assert digest_spans([0], [0], [5], [1]).tolist() == [[0, 0]]
    assert copy_and_digest_spans([0], [0], [0], [0], [0]).tolist() == [[0, 0]]
    copy_spans([], [], [])
    copy_spans([0], [0], [0])
    _native.memcpy(0, 0, 0)


def test_null_pointers_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1: null"):
        digest_spans([1, 0], [0, 8], [0, 0], [0, 0])
    data = random_bytes(8)
    with pytest.raises(ValueError, match="null"):
        copy_spans([data.ctypes.data], [0], [8])
    with pytest.raises(ValueError, match="null"):
        _native.memcpy(0, data.ctypes.data, 8)
    with pytest.raises(ValueError, match="null"):
        _native.read(0, 8)


def test_an_out_index_beyond_n_out_is_refused() -> None:
    data = random_bytes(8)
    with pytest.raises(ValueError, match="out_index 1 is not below n_out 1"):
        digest_spans([data.ctypes.data], [8], [0], [0], [1], 1)
    with pytest.raises(ValueError, match="n_out"):
        digest_spans([], [], [], [], n_out=-1)


def test_rows_of_another_shape_dtype_or_order_are_refused() -> None:
    good = np.zeros((2, 5), dtype=np.uint64)
    for bad in (
        np.zeros((2, 6), dtype=np.uint64),
        np.zeros(5, dtype=np.uint64),
        np.zeros((1, 2, 5), dtype=np.uint64),
        good.astype(np.int64),
        good.astype(np.float64),
        np.asfortranarray(good),
        np.zeros((4, 5), dtype=np.uint64)[::2],
    ):
        with pytest.raises(ValueError, match="rows must"):
            _native.digest_table(bad, 1)
    with pytest.raises(ValueError, match=r"\(n, 6\)"):
        _native.copy_digest_table(good, 1)
    with pytest.raises(ValueError, match=r"\(n, 3\)"):
        _native.copy_table(good)


def test_addresses_and_starts_that_overflow_are_refused() -> None:
    data = random_bytes(8)
    with pytest.raises(ValueError, match="64 bits"):
        digest_spans([data.ctypes.data], [8], [U64_MAX], [0])
    with pytest.raises(ValueError, match="64 bits"):
        digest_spans([data.ctypes.data], [U64_MAX], [0], [0])


def test_overlapping_copies_are_refused() -> None:
    data = random_bytes(32)
    with pytest.raises(ValueError, match="overlap"):
        copy_spans([data.ctypes.data], [data.ctypes.data + 8], [16])
    with pytest.raises(ValueError, match="overlap"):
        copy_and_digest_spans([data.ctypes.data + 15], [data.ctypes.data], [16], [0], [0])


def test_an_instruction_set_that_is_missing_or_unknown_is_refused() -> None:
    for isa in (-2, 3, *range(_native.isa() + 1, 3)):
        with pytest.raises(ValueError, match=r"isa|lacks"):
            _native.digest_table(np.zeros((0, 5), dtype=np.uint64), 0, isa)
    with pytest.raises(ValueError, match="isa"):
        _native.isa_name(3)


def test_thread_counts_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="threads"):
        copy_spans([], [], [], threads=0)


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        digest_spans([1, 2], [0], [0], [0])
    with pytest.raises(ValueError, match="nbytes"):
        digest_spans([1], [-1], [0], [0])
    with pytest.raises(ValueError, match="nbytes: negative"):
        digest_spans([1], np.array([-1]), [0], [0])
    with pytest.raises(ValueError, match="integers"):
        digest_spans([1], np.array([0.0]), [0], [0])
    with pytest.raises(ValueError, match="one dimension"):
        digest_spans([[1]], [0], [0], [0])  # type: ignore[list-item]


def test_a_buffer_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        digest_bytes(random_bytes(16)[::2], seed=0)
    with pytest.raises(ValueError, match="contiguous"):
        digest_bytes(memoryview(bytes(16))[::2], seed=0)
    with pytest.raises(ValueError, match="contiguous"):
        digest_bytes(random_bytes(16).reshape(4, 4).T, seed=0)


def test_any_contiguous_buffer_is_read_as_its_bytes() -> None:
    data = random_bytes(48)
    expected = digest_bytes(data.tobytes(), seed=SEED)
    frozen = data.copy()
    frozen.flags.writeable = False
    for buffer in (bytearray(data), memoryview(data), data.reshape(2, 3, 8), frozen):
        assert digest_bytes(buffer, seed=SEED) == expected
    assert digest_bytes(data.view(np.float32), seed=SEED) == expected
    assert digest_bytes(b"", seed=SEED) == digest_bytes(np.empty((0, 3)), seed=SEED) == Digest(0, 0)
    scalar = np.float64(1.5)
    assert digest_bytes(np.array(scalar), seed=SEED) == digest_bytes(scalar.tobytes(), seed=SEED)


def test_identities_and_seeds_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="as many"):
        tensor_identities(["a"], [], [[1]])
    with pytest.raises(ValueError, match="negative"):
        tensor_identities(["a"], ["F32"], [[-1]])
    with pytest.raises(ValueError, match="unsigned"):
        derive_seeds(-1, IDENTITIES)
    with pytest.raises(ValueError, match=r"\(n, 2\)"):
        derive_seeds(1, IDENTITIES[:, :1])
