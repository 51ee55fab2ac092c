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

template <class Unit>
inline __attribute__((always_inline)) void pack(uint64_t* __restrict words, uint64_t* __restrict counters,
                                                const Progression& from, size_t count) {
    constexpr unsigned kFull = 8 / sizeof(Unit);
    constexpr unsigned kBits = 8 * sizeof(Unit);
    for (size_t k = 0; k < count; ++k) counters[k] = from.counter + k * from.counter_step;
    if (from.step == sizeof(Unit) && from.lanes == kFull) {
        // Rows of a matrix that the whole has transposed: its words run across them. Whole lines are
        // read of each, and the compiler makes vectors of this.
        const uint8_t* rows[kFull];
        for (unsigned l = 0; l < kFull; ++l) rows[l] = from.source + l * from.lane_step;
        for (size_t k = 0; k < count; ++k) {
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

template <class Unit>
void pack_scalar(uint64_t* words, uint64_t* counters, const Progression& from, size_t count) {
    pack<Unit>(words, counters, from, count);
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
WEIGHTSYNC_AVX512 void pack_avx512(uint64_t* words, uint64_t* counters, const Progression& from,
                                   size_t count) {
    pack<Unit>(words, counters, from, count);
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

// Elements whose places within their words differ.
template <class Unit>
void scatter(uint64_t* words, uint64_t* counters, const uint8_t* source, int64_t step, uint64_t start,
             uint64_t whole_step, uint64_t seed, size_t count) {
    for (size_t k = 0; k < count; ++k) {
        const uint64_t at = start + k * whole_step;
        words[k] = load<Unit>(source + static_cast<int64_t>(k) * step) << (8 * (at & 7));
        counters[k] = (at >> 3) + seed;
    }
}

}  // namespace

WordKernels::WordKernels(Isa isa)
    : digest(keyed_for(isa)),
      pack{pack_for<uint8_t>(isa), pack_for<uint16_t>(isa), pack_for<uint32_t>(isa),
           pack_for<uint64_t>(isa)} {}

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
    std::memcpy(words_ + count_, source, 8 * words);
    const uint64_t counter = (start >> 3) + seed;
    for (uint64_t k = 0; k < words; ++k) counters_[count_ + k] = counter + k;
    count_ += words;
    source += 8 * words;
    start += 8 * words;
    nbytes -= 8 * words;
    if (nbytes != 0) partial(nbytes);
}

void WordBuffer::add_progression(Progression words, unsigned unit_log2, uint64_t count) {
    while (count != 0) {
        if (count_ == kCapacity) flush();
        const size_t now = static_cast<size_t>(std::min<uint64_t>(count, kCapacity - count_));
        kernels_.pack[unit_log2](words_ + count_, counters_ + count_, words, now);
        count_ += now;
        count -= now;
        words.source += static_cast<int64_t>(now) * words.step;
        words.counter += now * words.counter_step;
    }
}

void WordBuffer::add_elements(const uint8_t* source, int64_t step, uint64_t start, uint64_t whole_step,
                              uint64_t seed, unsigned unit_log2, uint64_t count) {
    constexpr decltype(&scatter<uint8_t>) kScatter[] = {scatter<uint8_t>, scatter<uint16_t>,
                                                        scatter<uint32_t>, scatter<uint64_t>};
    while (count != 0) {
        if (count_ == kCapacity) flush();
        const size_t now = static_cast<size_t>(std::min<uint64_t>(count, kCapacity - count_));
        kScatter[unit_log2](words_ + count_, counters_ + count_, source, step, start, whole_step, seed,
                            now);
        count_ += now;
        count -= now;
        source += static_cast<int64_t>(now) * step;
        start += now * whole_step;
    }
}

}  // namespace weightsync
