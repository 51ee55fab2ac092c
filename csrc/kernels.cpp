#include "kernels.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "vectors.hpp"

static_assert(std::endian::native == std::endian::little,
              "words are read as they lie in memory; the digest is defined on little-endian bytes");

namespace weightsync {
namespace {

// The hardware prefetcher stops at every page and looks too short a way ahead for a loop this cheap.
// Measured on 256 MiB: AVX-512 streaming copies with digests gain about 40%, plain AVX-512 digests nothing
// measurable, AVX2 5 to 10%; 1 to 8 KiB ahead are alike. Where the source comes out of another core's cache
// (a ring), 8 KiB are 5% faster than 2.
// Asking for lines beyond the end of a buffer is harmless: a prefetch never faults.
constexpr size_t kPrefetchBytes = 8192;

inline uint64_t load_word(const uint8_t* from) {
    uint64_t word;
    std::memcpy(&word, from, 8);
    return word;
}

template <Write write>
void scalar_kernel(Sums& sums, const uint8_t* source, uint8_t* destination, size_t words,
                   uint64_t first_word, uint64_t seed, const uint8_t*) {
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

template <Write write>
WEIGHTSYNC_AVX2 void avx2_kernel(Sums& sums, const uint8_t* source, uint8_t* destination, size_t words,
                                 uint64_t first_word, uint64_t seed, const uint8_t* ahead) {
    const __m256i step = _mm256_set1_epi64x(4);
    __m256i counter = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(first_word + seed)),
                                       _mm256_setr_epi64x(0, 1, 2, 3));
    Lanes256 lanes;
    size_t i = 0;
    for (; i + 4 <= words; i += 4) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead + 8 * i), _MM_HINT_T0);
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 8 * i));
        if constexpr (write == Write::cached)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination + 8 * i), a);
        if constexpr (write == Write::streaming)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + 8 * i), a);
        lanes.add(counter, a);
        counter = _mm256_add_epi64(counter, step);
    }
    lanes.add_to(sums);
    scalar_kernel<write>(sums, source + 8 * i, destination ? destination + 8 * i : nullptr, words - i,
                         first_word + i, seed, nullptr);
}

template <Write write>
WEIGHTSYNC_AVX512 WEIGHTSYNC_ALWAYS_INLINE __m512i move_eight_words(const uint8_t* source,
                                                                    uint8_t* destination) {
    const __m512i a = _mm512_loadu_si512(source);
    if constexpr (write == Write::cached) _mm512_storeu_si512(destination, a);
    if constexpr (write == Write::streaming)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), a);
    return a;
}

template <Write write>
WEIGHTSYNC_AVX512 void avx512_kernel(Sums& sums, const uint8_t* source, uint8_t* destination,
                                     size_t words, uint64_t first_word, uint64_t seed,
                                     const uint8_t* ahead) {
    const __m512i half_step = _mm512_set1_epi64(8);
    const __m512i step = _mm512_set1_epi64(16);
    __m512i counter = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(first_word + seed)),
                                       _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    // Two groups, so that one group's multiplications fill the other's latencies.
    __m512i odd_counter = _mm512_add_epi64(counter, half_step);
    Lanes512 even, odd;
    size_t i = 0;
    for (; i + 16 <= words; i += 16) {
        const uint8_t* from = source + 8 * i;
        uint8_t* to = write == Write::none ? nullptr : destination + 8 * i;
        _mm_prefetch(reinterpret_cast<const char*>(ahead + 8 * i), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(ahead + 8 * i + 64), _MM_HINT_T0);
        even.add(counter, move_eight_words<write>(from, to));
        odd.add(odd_counter, move_eight_words<write>(from + 64, write == Write::none ? to : to + 64));
        counter = _mm512_add_epi64(counter, step);
        odd_counter = _mm512_add_epi64(odd_counter, step);
    }
    // The last vectors are masked: words that are not there are zero and add nothing.
    for (; i < words; i += 8) {
        const size_t left = words - i;
        const __mmask8 mask = static_cast<__mmask8>(left >= 8 ? 0xff : (1u << left) - 1);
        const __m512i a = _mm512_maskz_loadu_epi64(mask, source + 8 * i);
        if constexpr (write != Write::none) _mm512_mask_storeu_epi64(destination + 8 * i, mask, a);
        even.add(counter, a);
        counter = _mm512_add_epi64(counter, half_step);
    }
    even.add(odd);
    even.add_to(sums);
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

// Four lines at a time; lines that nobody needs again are kept out of the larger caches, which is the
// fastest way to read that was found.
WEIGHTSYNC_AVX512 uint64_t read_lines_avx512(const uint8_t* source, size_t lines) {
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                       _mm512_setzero_si512()};
    for (size_t i = 0; i + 4 <= lines; i += 4) {
        for (size_t k = 0; k < 4; ++k)
            _mm_prefetch(reinterpret_cast<const char*>(source + 64 * (i + k) + 4096), _MM_HINT_NTA);
        for (size_t k = 0; k < 4; ++k)
            sums[k] = _mm512_xor_si512(sums[k], _mm512_loadu_si512(source + 64 * (i + k)));
    }
    alignas(64) uint64_t words[8];
    _mm512_store_si512(words, _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]),
                                               _mm512_xor_si512(sums[2], sums[3])));
    uint64_t all = 0;
    for (const uint64_t word : words) all ^= word;
    return all;
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
    count_bytes(sums, span.nbytes, span.seed);
    digest_uncounted(sums, span, kernels, write);
}

void digest_uncounted(Sums& sums, const Span& span, const Kernels& kernels, Write write) {
    const uint8_t* source = span.source;
    uint8_t* destination = span.destination;
    uint64_t start = span.start;
    size_t left = span.nbytes;
    const bool copies = write != Write::none;
    // A word read once is copied and digested from the same register: another writer in between cannot
    // make the digest speak of bytes that were not copied. The partial words get the same care.
    const auto partial = [&](size_t count) {
        uint8_t bytes[8];
        std::memcpy(bytes, source, count);
        if (copies) std::memcpy(destination, bytes, count);
        add_partial_word(sums, bytes, count, start, span.seed);
    };
    const uint8_t* ahead = span.ahead ? span.ahead : source + kPrefetchBytes;
    const auto advance = [&](size_t count) {
        ahead += count;
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
            kernels.cached(sums, source, destination, words, start >> 3, span.seed, ahead);
            advance(8 * words);
        }
    }
    const Kernel kernel = write == Write::none     ? kernels.none
                          : write == Write::cached ? kernels.cached
                                                   : kernels.streaming;
    const size_t words = left / 8;
    kernel(sums, source, destination, words, start >> 3, span.seed, ahead);
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

uint64_t read_words(const uint8_t* source, uint64_t nbytes) {
    uint64_t all = 0;
    size_t done = 0;
#if WEIGHTSYNC_X86
    if (best_isa() == Isa::avx512) {
        // Loads that cross lines would be slower; the words before the first line are read apart.
        const size_t head = std::min<size_t>(bytes_to_alignment(source, kLine), nbytes) / 8 * 8;
        const size_t lines = (nbytes - head) / 256 * 4;
        all = read_lines_avx512(source + head, lines);
        for (size_t i = 0; i < head; i += 8) all ^= load_word(source + i);
        done = head + lines * 64;
    }
#endif
    for (; done + 8 <= nbytes; done += 8) all ^= load_word(source + done);
    uint64_t tail = 0;
    std::memcpy(&tail, source + done, nbytes - done);
    return all ^ tail;
}

void finish_streaming() {
#if WEIGHTSYNC_X86
    _mm_sfence();
#endif
}

}  // namespace weightsync
