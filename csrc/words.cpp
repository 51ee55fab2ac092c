#include "words.hpp"

#include <algorithm>
#include <cstring>

#include "vectors.hpp"

namespace weightsync {
namespace {

// Counts given to the keyed kernels are multiples of this: none of them has a tail.
constexpr size_t kGroup = 16;

void keyed_scalar(Sums& sums, const uint64_t* words, const uint64_t* counters, size_t count) {
    for (size_t i = 0; i < count; ++i) multiply_accumulate(sums, words[i], mix(counters[i]));
}

template <class Unit>
inline __attribute__((always_inline)) uint64_t load(const uint8_t* from) {
    Unit unit;
    std::memcpy(&unit, from, sizeof(Unit));
    return unit;
}

// Puts one unit of each row into each word, for as many words as fill vectors, and returns their number.
// Neighbouring rows are interleaved, then neighbouring pairs, then pairs of those, until words are whole.
// The vectors are short: longer ones would interleave halves and leave the words out of order.
#if WEIGHTSYNC_X86

WEIGHTSYNC_ALWAYS_INLINE void interleave_4(uint64_t* words, __m128i a, __m128i b) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words), _mm_unpacklo_epi32(a, b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words + 2), _mm_unpackhi_epi32(a, b));
}

WEIGHTSYNC_ALWAYS_INLINE void interleave_2(uint64_t* words, __m128i a, __m128i b, __m128i c, __m128i d) {
    interleave_4(words, _mm_unpacklo_epi16(a, b), _mm_unpacklo_epi16(c, d));
    interleave_4(words + 4, _mm_unpackhi_epi16(a, b), _mm_unpackhi_epi16(c, d));
}

WEIGHTSYNC_ALWAYS_INLINE void interleave_1(uint64_t* words, const __m128i (&row)[8]) {
    interleave_2(words, _mm_unpacklo_epi8(row[0], row[1]), _mm_unpacklo_epi8(row[2], row[3]),
                 _mm_unpacklo_epi8(row[4], row[5]), _mm_unpacklo_epi8(row[6], row[7]));
    interleave_2(words + 8, _mm_unpackhi_epi8(row[0], row[1]), _mm_unpackhi_epi8(row[2], row[3]),
                 _mm_unpackhi_epi8(row[4], row[5]), _mm_unpackhi_epi8(row[6], row[7]));
}

template <class Unit>
WEIGHTSYNC_ALWAYS_INLINE size_t interleave(uint64_t* words, const uint8_t* const* rows, size_t count) {
    constexpr size_t kRows = 8 / sizeof(Unit), kUnits = 16 / sizeof(Unit);
    if constexpr (kRows <= 2) return 0;  // the compiler does as well with its longest vectors
    size_t k = 0;
    for (; k + kUnits <= count; k += kUnits) {
        __m128i row[8];
        for (size_t l = 0; l < kRows; ++l)
            row[l] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[l] + k * sizeof(Unit)));
        if constexpr (kRows == 4) interleave_2(words + k, row[0], row[1], row[2], row[3]);
        if constexpr (kRows == 8) interleave_1(words + k, row);
    }
    return k;
}

#else

template <class Unit>
size_t interleave(uint64_t*, const uint8_t* const*, size_t) {
    return 0;
}

#endif  // WEIGHTSYNC_X86

template <class Unit>
inline __attribute__((always_inline)) void pack(uint64_t* __restrict words, uint64_t* __restrict counters,
                                                const Progression& from, size_t count) {
    constexpr unsigned kFull = 8 / sizeof(Unit);
    constexpr unsigned kBits = 8 * sizeof(Unit);
    for (size_t k = 0; k < count; ++k) counters[k] = from.counter + k * from.counter_step;
    if (from.step == sizeof(Unit) && from.lanes == kFull) {
        // Rows of a matrix that the whole has transposed: its words run across them. Whole lines are
        // read of each.
        const uint8_t* rows[kFull];
        for (unsigned l = 0; l < kFull; ++l) rows[l] = from.source + l * from.lane_step;
        for (size_t k = interleave<Unit>(words, rows, count); k < count; ++k) {
            uint64_t word = 0;
            for (unsigned l = 0; l < kFull; ++l)
                word |= load<Unit>(rows[l] + k * sizeof(Unit)) << (kBits * l);
            words[k] = word;
        }
        return;
    }
    const uint8_t* row = from.source;
    for (size_t k = 0; k < count; ++k)
        words[k] = load<Unit>(row + static_cast<int64_t>(k) * from.step) << from.shift;
    for (unsigned l = 1; l < from.lanes; ++l) {
        row += from.lane_step;
        const unsigned shift = from.shift + kBits * l;
        for (size_t k = 0; k < count; ++k)
            words[k] |= load<Unit>(row + static_cast<int64_t>(k) * from.step) << shift;
    }
}

// Elements whose places within their words differ.
template <class Unit>
inline __attribute__((always_inline)) void scatter(uint64_t* __restrict words,
                                                   uint64_t* __restrict counters, const Elements& from,
                                                   size_t count) {
    const auto place = [&](size_t k, uint64_t element) {
        const uint64_t at = from.start + k * from.whole_step;
        words[k] = element << (8 * (at & 7));
        counters[k] = (at >> 3) + from.seed;
    };
    if (from.step == sizeof(Unit))
        for (size_t k = 0; k < count; ++k) place(k, load<Unit>(from.source + k * sizeof(Unit)));
    else
        for (size_t k = 0; k < count; ++k)
            place(k, load<Unit>(from.source + static_cast<int64_t>(k) * from.step));
}

template <class Unit>
void pack_scalar(uint64_t* words, uint64_t* counters, const Progression& from, size_t count) {
    pack<Unit>(words, counters, from, count);
}

template <class Unit>
void scatter_scalar(uint64_t* words, uint64_t* counters, const Elements& from, size_t count) {
    scatter<Unit>(words, counters, from, count);
}

#if WEIGHTSYNC_X86

WEIGHTSYNC_AVX2 void keyed_avx2(Sums& sums, const uint64_t* words, const uint64_t* counters,
                                size_t count) {
    Lanes256 lanes;
    for (size_t i = 0; i < count; i += 4)
        lanes.add(_mm256_load_si256(reinterpret_cast<const __m256i*>(counters + i)),
                  _mm256_load_si256(reinterpret_cast<const __m256i*>(words + i)));
    lanes.add_to(sums);
}

WEIGHTSYNC_AVX512 void keyed_avx512(Sums& sums, const uint64_t* words, const uint64_t* counters,
                                    size_t count) {
    Lanes512 even, odd;
    for (size_t i = 0; i < count; i += 16) {
        even.add(_mm512_load_si512(counters + i), _mm512_load_si512(words + i));
        odd.add(_mm512_load_si512(counters + i + 8), _mm512_load_si512(words + i + 8));
    }
    even.add(odd);
    even.add_to(sums);
}

// One text compiled for each instruction set.
template <class Unit>
WEIGHTSYNC_AVX2 void pack_avx2(uint64_t* words, uint64_t* counters, const Progression& from,
                               size_t count) {
    pack<Unit>(words, counters, from, count);
}

template <class Unit>
WEIGHTSYNC_AVX2 void scatter_avx2(uint64_t* words, uint64_t* counters, const Elements& from, size_t count) {
    scatter<Unit>(words, counters, from, count);
}

template <class Unit>
WEIGHTSYNC_AVX512 void pack_avx512(uint64_t* words, uint64_t* counters, const Progression& from,
                                   size_t count) {
    pack<Unit>(words, counters, from, count);
}

template <class Unit>
WEIGHTSYNC_AVX512 void scatter_avx512(uint64_t* words, uint64_t* counters, const Elements& from, size_t count) {
    scatter<Unit>(words, counters, from, count);
}

#endif  // WEIGHTSYNC_X86

KeyedKernel keyed_for(Isa isa) {
#if WEIGHTSYNC_X86
    if (isa == Isa::avx512) return keyed_avx512;
    if (isa == Isa::avx2) return keyed_avx2;
#endif
    (void)isa;
    return keyed_scalar;
}

template <class Unit>
PackKernel pack_for(Isa isa) {
#if WEIGHTSYNC_X86
    if (isa == Isa::avx512) return pack_avx512<Unit>;
    if (isa == Isa::avx2) return pack_avx2<Unit>;
#endif
    (void)isa;
    return pack_scalar<Unit>;
}

template <class Unit>
ScatterKernel scatter_for(Isa isa) {
#if WEIGHTSYNC_X86
    if (isa == Isa::avx512) return scatter_avx512<Unit>;
    if (isa == Isa::avx2) return scatter_avx2<Unit>;
#endif
    (void)isa;
    return scatter_scalar<Unit>;
}

}  // namespace

WordKernels::WordKernels(Isa isa)
    : digest(keyed_for(isa)),
      pack{pack_for<uint8_t>(isa), pack_for<uint16_t>(isa), pack_for<uint32_t>(isa),
           pack_for<uint64_t>(isa)},
      scatter{scatter_for<uint8_t>(isa), scatter_for<uint16_t>(isa), scatter_for<uint32_t>(isa)} {}

void WordBuffer::flush() {
    if (count_ == 0) return;
    while (count_ % kGroup != 0) put(0, 0);  // a zero word adds nothing, under whatever key
    Sums local;
    kernels_.digest(local, words_, counters_, count_);
    sums_ += local;
    count_ = 0;
}

void WordBuffer::add_run(const uint8_t* source, uint64_t nbytes, uint64_t start, uint64_t seed) {
    if (count_ + nbytes / 8 + 2 > kCapacity) flush();
    const auto partial = [&](uint64_t count) {
        uint64_t word = 0;
        std::memcpy(&word, source, count);
        put(word << (8 * (start & 7)), (start >> 3) + seed);
        source += count;
        start += count;
        nbytes -= count;
    };
    const uint64_t head = std::min<uint64_t>((8 - (start & 7)) & 7, nbytes);
    if (head != 0) partial(head);
    const uint64_t words = nbytes / 8;
    const uint64_t counter = (start >> 3) + seed;
    std::memcpy(words_ + count_, source, 8 * words);
    for (uint64_t k = 0; k < words; ++k) counters_[count_ + k] = counter + k;
    count_ += words;
    source += 8 * words;
    start += 8 * words;
    nbytes -= 8 * words;
    if (nbytes != 0) partial(nbytes);
}

void WordBuffer::add_progression(Progression words, unsigned unit_log2, uint64_t count) {
    const auto ahead = static_cast<int64_t>(kPrefetchBytes / words.lanes);
    while (count != 0) {
        if (count_ == kCapacity) flush();
        const size_t now = std::min({static_cast<size_t>(count), kCapacity - count_, kChunk});
        if (words.step == int64_t{1} << unit_log2)
            for (unsigned l = 0; l < words.lanes; ++l)
                for (size_t line = 0; line < now << unit_log2; line += 64)
                    __builtin_prefetch(words.source + l * words.lane_step + line + ahead);
        kernels_.pack[unit_log2](words_ + count_, counters_ + count_, words, now);
        count_ += now;
        count -= now;
        words.source += static_cast<int64_t>(now) * words.step;
        words.counter += now * words.counter_step;
    }
}

void WordBuffer::add_elements(Elements elements, unsigned unit_log2, uint64_t count) {
    while (count != 0) {
        if (count_ == kCapacity) flush();
        const size_t now = std::min(static_cast<size_t>(count), kCapacity - count_);
        kernels_.scatter[unit_log2](words_ + count_, counters_ + count_, elements, now);
        count_ += now;
        count -= now;
        elements.source += static_cast<int64_t>(now) * elements.step;
        elements.start += now * elements.whole_step;
    }
}

}  // namespace weightsync
