// One span at a time, with the best instructions of the machine: digest it, copy it, or both in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "digest.h"

namespace weightsync {

// Consecutive bytes of one tensor that lie consecutively in memory.
struct Span {
    const uint8_t* source = nullptr;
    uint8_t* destination = nullptr;  // where the bytes are copied; unused when only digesting
    uint64_t nbytes = 0;
    uint64_t start = 0;  // offset of the first byte in the whole tensor
    uint64_t seed = 0;   // of the whole tensor, for this update
    uint64_t out = 0;    // which digest the span adds to
    // What will be read soon, as much of it as of this span; unknown, the bytes some way further on are
    // taken for it. Whoever digests runs with gaps between them knows better.
    const uint8_t* ahead = nullptr;
};

enum class Isa : int { scalar = 0, avx2 = 1, avx512 = 2 };

// The best instruction set of this machine.
Isa best_isa();
const char* isa_name(Isa isa);

// What is done with the words that are read, besides digesting them.
enum class Write { none, cached, streaming };

// A span of a few lines gains nothing from streaming stores, and half-written lines at its ends are costly.
constexpr uint64_t kStreamingSpanBytes = 4096;

// Streaming stores where they pay.
inline Write streaming_write(uint64_t nbytes) {
    return nbytes >= kStreamingSpanBytes ? Write::streaming : Write::cached;
}

// One run of whole words. `source` and `destination` need no alignment, except that a streaming kernel
// wants its destination aligned to its vectors. While word i is digested, that of `ahead` is prefetched.
using Kernel = void (*)(Sums&, const uint8_t* source, uint8_t* destination, size_t words,
                        uint64_t first_word, uint64_t seed, const uint8_t* ahead);

// The kernels of one instruction set, chosen once per table.
struct Kernels {
    Kernel none, cached, streaming;
    explicit Kernels(Isa isa);
};

// Adds the digest of a span to `sums`, and copies it unless `write` is none. Every word is read once.
void digest_span(Sums& sums, const Span& span, const Kernels& kernels, Write write);

// The same without the number of bytes, for callers that count the bytes of many spans at once.
void digest_uncounted(Sums& sums, const Span& span, const Kernels& kernels, Write write);
void copy_span(const Span& span, Write write);

// Reads every byte once and does next to nothing with it: the bandwidth that a digest is measured against.
// Returns the exclusive or of all words, so that no compiler leaves the reading out.
uint64_t read_words(const uint8_t* source, uint64_t nbytes);

// Streaming stores are weakly ordered: whoever is told that a copy is done must see all of it. Call this
// after them and before telling.
void finish_streaming();

}  // namespace weightsync
