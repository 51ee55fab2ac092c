// The arithmetic of the weightsync digest, and nothing else: what one 64-bit word of a tensor adds, and
// what the number of its bytes adds.
//
// A tensor is its canonical byte string (row-major, little-endian). Word w is bytes 8w..8w+7 of the
// WHOLE tensor, whichever part of it is at hand; bytes that are not at hand count as zero. With a, b the
// low and high halves of the word:
//
//     K  = mix(w + seed)       k0 = low32(K) | 1       k1 = high32(K)
//     F  = ( sum a*k0 + b*k1 ,  sum a*k1 - b*k0 )      each modulo 2^64
//
// Zero bytes add nothing to these sums, so that their number is one more term. n bytes add, under the key
// of a word that no tensor has (w = 2^64 - 1; the last real one is 2^61 - 1):
//
//     F += ( n*k0 ,  n*k1 )                            each modulo 2^64
//
// n is taken as one number and not as two halves, whose carry from the low into the high one would make
// parts of 2^32 bytes and more not add up. k0 is odd: no two n add the same.
//
// F is linear in the bytes and in their number, and keyed by position, so the digests of disjoint parts
// add up to the digest of the whole. It detects faults; it is no authentication code.
//
// Free of includes that a run-time CUDA compiler lacks, so that host and device share this one text.
#pragma once

#if defined(__CUDACC_RTC__)
typedef unsigned long long uint64_t;
typedef long long int64_t;
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;
typedef unsigned char uint8_t;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define WEIGHTSYNC_INLINE __host__ __device__ __forceinline__
#else
#define WEIGHTSYNC_INLINE inline
#endif

namespace weightsync {

// The odd multiplier of the two-round xor-shift-multiply mixer ("rrmxmx" family).
constexpr uint64_t kMixMultiplier = 0xd6e8feb86659fd93ULL;

WEIGHTSYNC_INLINE uint64_t mix(uint64_t x) {
    x ^= x >> 32;
    x *= kMixMultiplier;
    x ^= x >> 32;
    x *= kMixMultiplier;
    x ^= x >> 32;
    return x;
}

WEIGHTSYNC_INLINE uint64_t key(uint64_t word_index, uint64_t seed) { return mix(word_index + seed); }

// The two sums of a digest. Unsigned wrap-around is the arithmetic that is meant.
struct Sums {
    uint64_t first = 0;
    uint64_t second = 0;

    WEIGHTSYNC_INLINE Sums& operator+=(const Sums& other) {
        first += other.first;
        second += other.second;
        return *this;
    }
};

// Adds one word under its key K. Products of two 32-bit numbers never lose a bit in 64.
WEIGHTSYNC_INLINE void multiply_accumulate(Sums& sums, uint64_t word, uint64_t k) {
    const uint64_t a = static_cast<uint32_t>(word);
    const uint64_t b = word >> 32;
    const uint64_t k0 = static_cast<uint32_t>(k) | 1u;
    const uint64_t k1 = k >> 32;
    sums.first += a * k0 + b * k1;
    sums.second += a * k1 - b * k0;
}

// The index of the word whose key counts bytes.
constexpr uint64_t kCountWord = ~0ULL;

// Adds the number of bytes of a span or of any part of one.
WEIGHTSYNC_INLINE void count_bytes(Sums& sums, uint64_t nbytes, uint64_t seed) {
    const uint64_t k = key(kCountWord, seed);
    sums.first += nbytes * (static_cast<uint32_t>(k) | 1u);
    sums.second += nbytes * (k >> 32);
}

}  // namespace weightsync
