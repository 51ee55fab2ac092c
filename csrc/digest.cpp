#include "digest.hpp"

#include <algorithm>

#include "shares.hpp"

namespace weightsync {
namespace {

uint64_t total_bytes(const std::vector<Span>& spans) {
    uint64_t total = 0;
    for (const Span& span : spans) total += span.nbytes;
    return total;
}

// Below this a table's destination can still be in cache when its reader comes; above it, the cache is too
// small and reading lines only to overwrite them costs a third of the traffic.
constexpr uint64_t kStreamingTableBytes = uint64_t{8} << 20;

Write write_for(const Span& span, Stores stores, uint64_t total) {
    const bool large = stores == Stores::streaming ||
                       (stores == Stores::automatic && total >= kStreamingTableBytes);
    return large ? streaming_write(span.nbytes) : Write::cached;
}

constexpr uint64_t kBytesPerThread = uint64_t{1} << 20;  // less than this is not worth a thread
constexpr uint64_t kCutAlignment = 4096;

// Calls work(share, part) for each span or part of one, share by share, shares in parallel. Shares have
// equal numbers of bytes; a span is cut where it crosses a boundary, which the digest allows anywhere.
template <class Work>
void split_by_bytes(const std::vector<Span>& spans, uint64_t total, unsigned shares, const Work& work) {
    const uint64_t per_share =
        (total / shares + kCutAlignment - 1) / kCutAlignment * kCutAlignment;
    const auto run_share = [&](unsigned share) {
        const uint64_t begin = std::min(total, share * per_share);
        const uint64_t end = share + 1 == shares ? total : std::min(total, begin + per_share);
        uint64_t position = 0;
        for (const Span& span : spans) {
            const uint64_t from = std::max(begin, position);
            const uint64_t to = std::min(end, position + span.nbytes);
            if (from < to) {
                Span part = span;
                const uint64_t skipped = from - position;
                part.source += skipped;
                if (part.destination) part.destination += skipped;
                part.start += skipped;
                part.nbytes = to - from;
                work(share, part);
            }
            position += span.nbytes;
            if (position >= end) break;
        }
        finish_streaming();
    };
    run_shares(shares, run_share);
}

unsigned shares_for(uint64_t total, unsigned threads) {
    const uint64_t useful = std::max<uint64_t>(1, total / kBytesPerThread);
    return static_cast<unsigned>(std::clamp<uint64_t>(threads, 1, useful));
}

// Runs the table with private sums per share, so that shares never write to the same line.
template <class WriteOf>
void digest_table(const std::vector<Span>& spans, std::vector<Sums>& sums, Isa isa, unsigned threads,
                  const WriteOf& write_of) {
    const Kernels kernels(isa);
    const uint64_t total = total_bytes(spans);
    const unsigned shares = shares_for(total, threads);
    std::vector<std::vector<Sums>> extra(shares - 1, std::vector<Sums>(sums.size()));
    split_by_bytes(spans, total, shares, [&](unsigned share, const Span& part) {
        std::vector<Sums>& mine = share == 0 ? sums : extra[share - 1];
        // Summed on the stack first: the kernels would otherwise write through memory word by word.
        Sums local;
        digest_span(local, part, kernels, write_of(part, total));
        mine[part.out] += local;
    });
    for (const std::vector<Sums>& partial : extra)
        for (size_t i = 0; i < sums.size(); ++i) sums[i] += partial[i];
}

}  // namespace

void digest_spans(const std::vector<Span>& spans, std::vector<Sums>& sums, Isa isa, unsigned threads) {
    digest_table(spans, sums, isa, threads, [](const Span&, uint64_t) { return Write::none; });
}

void copy_and_digest_spans(const std::vector<Span>& spans, std::vector<Sums>& sums, Isa isa,
                           unsigned threads, Stores stores) {
    digest_table(spans, sums, isa, threads, [stores](const Span& span, uint64_t total) {
        return write_for(span, stores, total);
    });
}

void copy_spans(const std::vector<Span>& spans, unsigned threads, Stores stores) {
    const uint64_t total = total_bytes(spans);
    split_by_bytes(spans, total, shares_for(total, threads), [&](unsigned, const Span& part) {
        copy_span(part, write_for(part, stores, total));
    });
}

}  // namespace weightsync
