// The digest of one vector of words, for each instruction set that has vectors. Kernels differ in where
// their words and keys come from, and share this arithmetic.
#pragma once

#include "digest.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define WEIGHTSYNC_X86 1
#define WEIGHTSYNC_AVX2 __attribute__((target("avx2")))
#define WEIGHTSYNC_AVX512 __attribute__((target("avx512f,avx512dq,prefer-vector-width=512")))
#define WEIGHTSYNC_ALWAYS_INLINE inline __attribute__((always_inline))

namespace weightsync {

WEIGHTSYNC_AVX2 WEIGHTSYNC_ALWAYS_INLINE __m256i multiply_low(__m256i x, __m256i low, __m256i high) {
    // 64-bit products from 32-bit ones; the product of the two high halves falls off the top.
    const __m256i cross =
        _mm256_add_epi64(_mm256_mul_epu32(x, high), _mm256_mul_epu32(_mm256_srli_epi64(x, 32), low));
    return _mm256_add_epi64(_mm256_mul_epu32(x, low), _mm256_slli_epi64(cross, 32));
}

// The running sums of four words at a time, kept in registers.
struct Lanes256 {
    __m256i first, plus, minus;

    WEIGHTSYNC_AVX2 WEIGHTSYNC_ALWAYS_INLINE Lanes256()
        : first(_mm256_setzero_si256()), plus(first), minus(first) {}

    // `counter` is word index + seed, `a` the words.
    WEIGHTSYNC_AVX2 WEIGHTSYNC_ALWAYS_INLINE void add(__m256i counter, __m256i a) {
        const __m256i multiplier_low = _mm256_set1_epi64x(static_cast<uint32_t>(kMixMultiplier));
        const __m256i multiplier_high = _mm256_set1_epi64x(kMixMultiplier >> 32);
        __m256i x = _mm256_xor_si256(counter, _mm256_srli_epi64(counter, 32));
        x = multiply_low(x, multiplier_low, multiplier_high);
        x = _mm256_xor_si256(x, _mm256_srli_epi64(x, 32));
        x = multiply_low(x, multiplier_low, multiplier_high);
        // The mixer's last step leaves the high half as it is: k1 is ready, and k0 is one xor away.
        const __m256i k1 = _mm256_srli_epi64(x, 32);
        const __m256i k0 = _mm256_or_si256(_mm256_xor_si256(x, k1), _mm256_set1_epi64x(1));
        const __m256i b = _mm256_srli_epi64(a, 32);
        first = _mm256_add_epi64(first,
                                 _mm256_add_epi64(_mm256_mul_epu32(a, k0), _mm256_mul_epu32(b, k1)));
        plus = _mm256_add_epi64(plus, _mm256_mul_epu32(a, k1));
        minus = _mm256_add_epi64(minus, _mm256_mul_epu32(b, k0));
    }

    WEIGHTSYNC_AVX2 WEIGHTSYNC_ALWAYS_INLINE void add_to(Sums& sums) const {
        sums.first += total(first);
        sums.second += total(plus) - total(minus);
    }

  private:
    WEIGHTSYNC_AVX2 WEIGHTSYNC_ALWAYS_INLINE static uint64_t total(__m256i v) {
        alignas(32) uint64_t lanes[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), v);
        return lanes[0] + lanes[1] + lanes[2] + lanes[3];
    }
};

// The running sums of eight words at a time, kept in registers.
struct Lanes512 {
    __m512i first_a, first_b, plus, minus;

    WEIGHTSYNC_AVX512 WEIGHTSYNC_ALWAYS_INLINE Lanes512()
        : first_a(_mm512_setzero_si512()), first_b(first_a), plus(first_a), minus(first_a) {}

    WEIGHTSYNC_AVX512 WEIGHTSYNC_ALWAYS_INLINE void add(__m512i counter, __m512i a) {
        const __m512i multiplier = _mm512_set1_epi64(static_cast<long long>(kMixMultiplier));
        __m512i x = _mm512_xor_si512(counter, _mm512_srli_epi64(counter, 32));
        x = _mm512_mullo_epi64(x, multiplier);
        x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 32));
        x = _mm512_mullo_epi64(x, multiplier);
        const __m512i k1 = _mm512_srli_epi64(x, 32);
        const __m512i k0 = _mm512_or_si512(_mm512_xor_si512(x, k1), _mm512_set1_epi64(1));
        const __m512i b = _mm512_srli_epi64(a, 32);
        first_a = _mm512_add_epi64(first_a, _mm512_mul_epu32(a, k0));
        first_b = _mm512_add_epi64(first_b, _mm512_mul_epu32(b, k1));
        plus = _mm512_add_epi64(plus, _mm512_mul_epu32(a, k1));
        minus = _mm512_add_epi64(minus, _mm512_mul_epu32(b, k0));
    }

    WEIGHTSYNC_AVX512 WEIGHTSYNC_ALWAYS_INLINE void add(const Lanes512& other) {
        first_a = _mm512_add_epi64(first_a, other.first_a);
        first_b = _mm512_add_epi64(first_b, other.first_b);
        plus = _mm512_add_epi64(plus, other.plus);
        minus = _mm512_add_epi64(minus, other.minus);
    }

    WEIGHTSYNC_AVX512 WEIGHTSYNC_ALWAYS_INLINE void add_to(Sums& sums) const {
        sums.first += static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(first_a, first_b)));
        sums.second += static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_sub_epi64(plus, minus)));
    }
};

}  // namespace weightsync

#endif  // __x86_64__
