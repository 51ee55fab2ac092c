// Tables of spans: digest them, copy them, or both in one pass over memory.
#pragma once

#include <vector>

#include "kernels.hpp"

namespace weightsync {

// How a copy writes. Streaming (non-temporal) stores do not first read the line that they overwrite and
// leave the cache alone: right for an arena nobody reads soon, wrong for a ring whose reader is next.
enum class Stores : int { automatic = -1, cached = 0, streaming = 1 };

// Each adds the digest of every span to sums[span.out]. Copies need sources and destinations that do not
// overlap. None of them throws once its threads run; a thread that cannot be started has its share done
// by the caller.
void digest_spans(const std::vector<Span>& spans, std::vector<Sums>& sums, Isa isa, unsigned threads);
void copy_and_digest_spans(const std::vector<Span>& spans, std::vector<Sums>& sums, Isa isa,
                           unsigned threads, Stores stores);
void copy_spans(const std::vector<Span>& spans, unsigned threads, Stores stores);

}  // namespace weightsync
