#include "kernels.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define WEIGHTSYNC_X86 1
#define WEIGHTSYNC_AVX2 __attribute__((target("avx2")))
#define WEIGHTSYNC_AVX512 __attribute__((target("avx512f,avx512dq")))
#endif

static_assert(std::endian::native == std::endian::little,
              "words are read as they lie in memory; the digest is defined on little-endian bytes");

namespace weightsync {
namespace {

inline uint64_t load_word(const uint8_t* from) {
    uint64_t word;
    std::memcpy(&word, from, 8);
    return word;
}

template <Write write>
void scalar_kernel(Sums& sums, const uint8_t* source, uint8_t* destination, size_t words,
                   uint64_t first_word, uint64_t seed) {
    for (size_t i = 0; i < words; ++i) {
        const uint64_t word = load_word(source + 8 * i);
        if constexpr (write == Write::cached) std::memcpy(destination + 8 * i, &word, 8);
#if WEIGHTSYNC_X86
        if constexpr (write == Write::streaming)
            _mm_stream_si64(reinterpret_cast<long long*>(destination + 8 * i), static_cast<long long>(word));
#else
        if constexpr (write == Write::streaming) std::memcpy(destination + 8 * i, &word, 8);
#endif
        multiply_accumulate(sums, word, key(first_word + i, seed));
    }
}

#if WEIGHTSYNC_X86

// The hardware prefetcher stops at every page and looks too short a way ahead for a loop this cheap.
// Measured on 256 MiB: AVX-512 streaming copies with digests gain about 40%, plain AVX-512 digests nothing
// measurable, AVX2 5 to 10%; 1 to 8 KiB ahead are alike. Where the source comes out of another core's cache
// (a ring), 8 KiB are 5% faster than 2.
// Asking for lines beyond the end of a buffer is harmless: a prefetch never faults.
constexpr size_t kPrefetchBytes = 8192;

WEIGHTSYNC_AVX2 inline __m256i multiply_low_avx2(__m256i x, __m256i low, __m256i high) {
    // 64-bit products from 32-bit ones; the product of the two high halves falls off the top.
    const __m256i cross =
        _mm256_add_epi64(_mm256_mul_epu32(x, high), _mm256_mul_epu32(_mm256_srli_epi64(x, 32), low));
    return _mm256_add_epi64(_mm256_mul_epu32(x, low), _mm256_slli_epi64(cross, 32));
}

WEIGHTSYNC_AVX2 inline uint64_t sum_lanes_avx2(__m256i v) {
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), v);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

template <Write write>
WEIGHTSYNC_AVX2 void avx2_kernel(Sums& sums, const uint8_t* source, uint8_t* destination, size_t words,
                                 uint64_t first_word, uint64_t seed) {
    const __m256i multiplier_low = _mm256_set1_epi64x(static_cast<uint32_t>(kMixMultiplier));
    const __m256i multiplier_high = _mm256_set1_epi64x(kMixMultiplier >> 32);
    const __m256i one = _mm256_set1_epi64x(1);
    const __m256i step = _mm256_set1_epi64x(4);
    __m256i counter = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(first_word + seed)),
                                       _mm256_setr_epi64x(0, 1, 2, 3));
    __m256i first = _mm256_setzero_si256(), plus = first, minus = first;
    size_t i = 0;
    for (; i + 4 <= words; i += 4) {
        _mm_prefetch(reinterpret_cast<const char*>(source + 8 * i + kPrefetchBytes), _MM_HINT_T0);
        __m256i x = _mm256_xor_si256(counter, _mm256_srli_epi64(counter, 32));
        x = multiply_low_avx2(x, multiplier_low, multiplier_high);
        x = _mm256_xor_si256(x, _mm256_srli_epi64(x, 32));
        x = multiply_low_avx2(x, multiplier_low, multiplier_high);
        // The mixer's last step leaves the high half as it is: k1 is ready, and k0 is one xor away.
        const __m256i k1 = _mm256_srli_epi64(x, 32);
        const __m256i k0 = _mm256_or_si256(_mm256_xor_si256(x, k1), one);
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 8 * i));
        const __m256i b = _mm256_srli_epi64(a, 32);
        if constexpr (write == Write::cached)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination + 8 * i), a);
        if constexpr (write == Write::streaming)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + 8 * i), a);
        first = _mm256_add_epi64(first, _mm256_add_epi64(_mm256_mul_epu32(a, k0), _mm256_mul_epu32(b, k1)));
        plus = _mm256_add_epi64(plus, _mm256_mul_epu32(a, k1));
        minus = _mm256_add_epi64(minus, _mm256_mul_epu32(b, k0));
        counter = _mm256_add_epi64(counter, step);
    }
    sums.first += sum_lanes_avx2(first);
    sums.second += sum_lanes_avx2(plus) - sum_lanes_avx2(minus);
    scalar_kernel<write>(sums, source + 8 * i, destination ? destination + 8 * i : nullptr, words - i,
                         first_word + i, seed);
}

// Eight words: the running counters and sums of one lane group, kept in registers.
struct Lanes512 {
    __m512i counter, first_a, first_b, plus, minus;
};

template <Write write>
WEIGHTSYNC_AVX512 inline __attribute__((always_inline)) void eight_words(Lanes512& lanes,
                                                                         const uint8_t* source,
                                                                         uint8_t* destination,
                                                                         __m512i multiplier,
                                                                         __m512i one, __m512i step) {
    __m512i x = _mm512_xor_si512(lanes.counter, _mm512_srli_epi64(lanes.counter, 32));
    x = _mm512_mullo_epi64(x, multiplier);
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 32));
    x = _mm512_mullo_epi64(x, multiplier);
    const __m512i k1 = _mm512_srli_epi64(x, 32);
    const __m512i k0 = _mm512_or_si512(_mm512_xor_si512(x, k1), one);
    const __m512i a = _mm512_loadu_si512(source);
    const __m512i b = _mm512_srli_epi64(a, 32);
    if constexpr (write == Write::cached) _mm512_storeu_si512(destination, a);
    if constexpr (write == Write::streaming)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), a);
    lanes.first_a = _mm512_add_epi64(lanes.first_a, _mm512_mul_epu32(a, k0));
    lanes.first_b = _mm512_add_epi64(lanes.first_b, _mm512_mul_epu32(b, k1));
    lanes.plus = _mm512_add_epi64(lanes.plus, _mm512_mul_epu32(a, k1));
    lanes.minus = _mm512_add_epi64(lanes.minus, _mm512_mul_epu32(b, k0));
    lanes.counter = _mm512_add_epi64(lanes.counter, step);
}

template <Write write>
WEIGHTSYNC_AVX512 void avx512_kernel(Sums& sums, const uint8_t* source, uint8_t* destination,
                                     size_t words, uint64_t first_word, uint64_t seed) {
    const __m512i multiplier = _mm512_set1_epi64(static_cast<long long>(kMixMultiplier));
    const __m512i one = _mm512_set1_epi64(1);
    const __m512i step = _mm512_set1_epi64(16);
    const __m512i zero = _mm512_setzero_si512();
    const __m512i counter = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(first_word + seed)),
                                             _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    // Two groups, so that one group's multiplications fill the other's latencies.
    Lanes512 even{counter, zero, zero, zero, zero};
    Lanes512 odd{_mm512_add_epi64(counter, _mm512_set1_epi64(8)), zero, zero, zero, zero};
    size_t i = 0;
    for (; i + 16 <= words; i += 16) {
        const uint8_t* from = source + 8 * i;
        uint8_t* to = write == Write::none ? nullptr : destination + 8 * i;
        _mm_prefetch(reinterpret_cast<const char*>(from + kPrefetchBytes), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(from + kPrefetchBytes + 64), _MM_HINT_T0);
        eight_words<write>(even, from, to, multiplier, one, step);
        eight_words<write>(odd, from + 64, to + 64, multiplier, one, step);
    }
    const __m512i first = _mm512_add_epi64(_mm512_add_epi64(even.first_a, even.first_b),
                                           _mm512_add_epi64(odd.first_a, odd.first_b));
    const __m512i second = _mm512_sub_epi64(_mm512_add_epi64(even.plus, odd.plus),
                                            _mm512_add_epi64(even.minus, odd.minus));
    sums.first += static_cast<uint64_t>(_mm512_reduce_add_epi64(first));
    sums.second += static_cast<uint64_t>(_mm512_reduce_add_epi64(second));
    scalar_kernel<write>(sums, source + 8 * i, destination ? destination + 8 * i : nullptr, words - i,
                         first_word + i, seed);
}

// Copies whole vectors with streaming stores; AVX is used where the machine has it.
WEIGHTSYNC_AVX2 size_t stream_copy_avx2(uint8_t* destination, const uint8_t* source, size_t nbytes) {
    size_t i = 0;
    for (; i + 64 <= nbytes; i += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(source + i + kPrefetchBytes), _MM_HINT_T0);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + i), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + i + 32), high);
    }
    return i;
}

#endif  // WEIGHTSYNC_X86

template <Write write>
Kernel kernel_for(Isa isa) {
#if WEIGHTSYNC_X86
    if (isa == Isa::avx512) return avx512_kernel<write>;
    if (isa == Isa::avx2) return avx2_kernel<write>;
#endif
    (void)isa;
    return scalar_kernel<write>;
}

// Up to 7 bytes that lie inside one word, at their place in it.
void add_partial_word(Sums& sums, const uint8_t* bytes, size_t count, uint64_t start, uint64_t seed) {
    uint64_t word = 0;
    std::memcpy(&word, bytes, count);
    multiply_accumulate(sums, word << (8 * (start & 7)), key(start >> 3, seed));
}

constexpr size_t kLine = 64;

size_t bytes_to_alignment(const void* pointer, size_t alignment) {
    return (alignment - (reinterpret_cast<uintptr_t>(pointer) & (alignment - 1))) & (alignment - 1);
}

}  // namespace

Isa best_isa() {
#if WEIGHTSYNC_X86
    static const Isa best = [] {
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return Isa::avx512;
        if (__builtin_cpu_supports("avx2")) return Isa::avx2;
        return Isa::scalar;
    }();
    return best;
#else
    return Isa::scalar;
#endif
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::avx512: return "avx512";
        case Isa::avx2: return "avx2";
        case Isa::scalar: break;
    }
    return "scalar";
}

Kernels::Kernels(Isa isa)
    : none(kernel_for<Write::none>(isa)),
      cached(kernel_for<Write::cached>(isa)),
      streaming(kernel_for<Write::streaming>(isa)) {}

void digest_span(Sums& sums, const Span& span, const Kernels& kernels, Write write) {
    const uint8_t* source = span.source;
    uint8_t* destination = span.destination;
    uint64_t start = span.start;
    size_t left = span.nbytes;
    count_bytes(sums, span.nbytes, span.seed);
    const bool copies = write != Write::none;
    // A word read once is copied and digested from the same register: another writer in between cannot
    // make the digest speak of bytes that were not copied. The partial words get the same care.
    const auto partial = [&](size_t count) {
        uint8_t bytes[8];
        std::memcpy(bytes, source, count);
        if (copies) std::memcpy(destination, bytes, count);
        add_partial_word(sums, bytes, count, start, span.seed);
    };
    const auto advance = [&](size_t count) {
        source += count;
        if (copies) destination += count;
        start += count;
        left -= count;
    };

    const size_t head = std::min<size_t>((8 - (start & 7)) & 7, left);
    if (head != 0) {
        partial(head);
        advance(head);
    }
    if (write == Write::streaming) {
        // Whole words up to the first line of the destination; if words and lines never meet (the copy
        // shifts bytes within words), streaming is impossible and ordinary stores do.
        const size_t to_line = bytes_to_alignment(destination, kLine);
        if (to_line % 8 != 0) {
            write = Write::cached;
        } else {
            const size_t words = std::min(to_line, left) / 8;
            kernels.cached(sums, source, destination, words, start >> 3, span.seed);
            advance(8 * words);
        }
    }
    const Kernel kernel = write == Write::none     ? kernels.none
                          : write == Write::cached ? kernels.cached
                                                   : kernels.streaming;
    const size_t words = left / 8;
    kernel(sums, source, destination, words, start >> 3, span.seed);
    advance(8 * words);
    if (left != 0) partial(left);
}

void copy_span(const Span& span, Write write) {
    const uint8_t* source = span.source;
    uint8_t* destination = span.destination;
    size_t left = span.nbytes;
#if WEIGHTSYNC_X86
    if (write == Write::streaming && best_isa() != Isa::scalar) {
        const size_t head = std::min(bytes_to_alignment(destination, kLine), left);
        std::memcpy(destination, source, head);
        const size_t streamed = stream_copy_avx2(destination + head, source + head, left - head);
        source += head + streamed;
        destination += head + streamed;
        left -= head + streamed;
    }
#else
    (void)write;
#endif
    std::memcpy(destination, source, left);
}

void finish_streaming() {
#if WEIGHTSYNC_X86
    _mm_sfence();
#endif
}

}  // namespace weightsync
