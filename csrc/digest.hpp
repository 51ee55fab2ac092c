// Tables of spans: digest them, copy them, or both in one pass over memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

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
};

enum class Isa : int { scalar = 0, avx2 = 1, avx512 = 2 };

// How a copy writes. Streaming (non-temporal) stores do not first read the line that they overwrite and
// leave the cache alone: right for an arena nobody reads soon, wrong for a ring whose reader is next.
enum class Stores : int { automatic = -1, cached = 0, streaming = 1 };

// The best instruction set of this machine.
Isa best_isa();
const char* isa_name(Isa isa);

// Each adds the digest of every span to sums[span.out]. Copies need sources and destinations that do not
// overlap. None of them throws once its threads run; a thread that cannot be started has its share done
// by the caller.
void digest_spans(const std::vector<Span>& spans, std::vector<Sums>& sums, Isa isa, unsigned threads);
void copy_and_digest_spans(const std::vector<Span>& spans, std::vector<Sums>& sums, Isa isa,
                           unsigned threads, Stores stores);
void copy_spans(const std::vector<Span>& spans, unsigned threads, Stores stores);

}  // namespace weightsync
