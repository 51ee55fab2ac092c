#include "regions.hpp"

#include <algorithm>
#include <atomic>
#include <bit>

#include "shares.hpp"
#include "words.hpp"

namespace weightsync {
namespace {

uint64_t magnitude(int64_t stride) {
    return stride < 0 ? -static_cast<uint64_t>(stride) : static_cast<uint64_t>(stride);
}

// The same bytes with as few dimensions as possible, in the order of the whole, the longest stride first.
// `itemsize` becomes the longest run that is consecutive both in memory and in the whole.
Region normalized(const Region& region) {
    Region result = region;
    Dim* const dims = result.dims;
    unsigned n = static_cast<unsigned>(
        std::remove_if(dims, dims + result.ndim, [](const Dim& d) { return d.length == 1; }) - dims);
    std::sort(dims, dims + n, [](const Dim& a, const Dim& b) { return a.whole > b.whole; });
    while (n != 0 && dims[n - 1].whole == result.itemsize &&
           dims[n - 1].memory == static_cast<int64_t>(result.itemsize))
        result.itemsize *= dims[--n].length;
    unsigned kept = 0;
    for (unsigned d = 0; d < n; ++d) {
        const Dim dim = dims[d];
        if (kept != 0) {
            Dim& outer = dims[kept - 1];
            if (outer.whole == dim.length * dim.whole &&
                outer.memory == static_cast<int64_t>(dim.length) * dim.memory) {
                outer = Dim{outer.length * dim.length, dim.memory, dim.whole};
                continue;
            }
        }
        dims[kept++] = dim;
    }
    result.ndim = kept;
    return result;
}

// Memory order: the longest stride first. A digest does not depend on the order of its terms, so memory
// is walked as it lies, whatever the order of the whole.
void sort_by_memory(Dim* dims, unsigned n) {
    std::stable_sort(dims, dims + n, [](const Dim& a, const Dim& b) {
        return magnitude(a.memory) > magnitude(b.memory);
    });
}

// Calls visit(source, start) for every index of the dimensions.
template <class Visit>
void for_each_index(const Dim* dims, unsigned n, const uint8_t* source, uint64_t start,
                    const Visit& visit) {
    if (n == 0) {
        visit(source, start);
        return;
    }
    for (uint64_t i = 0; i < dims->length; ++i) {
        const uint8_t* at = source + static_cast<int64_t>(i) * dims->memory;
        const uint64_t position = start + i * dims->whole;
        if (n == 1)
            visit(at, position);
        else
            for_each_index(dims + 1, n - 1, at, position, visit);
    }
}

// Digests normalized regions into one sum.
class RegionDigest {
  public:
    RegionDigest(Sums& sums, const Kernels& kernels, const WordKernels& word_kernels)
        : sums_(sums), kernels_(kernels), buffer_(sums, word_kernels) {}

    void add(Region region) {
        Dim* const dims = region.dims;
        const unsigned n = region.ndim;
        const uint64_t unit = region.itemsize;
        sort_by_memory(dims, n);
        const bool within_words =
            n != 0 && unit <= 8 && std::has_single_bit(unit) && region.start % unit == 0 &&
            std::all_of(dims, dims + n, [unit](const Dim& d) { return d.whole % unit == 0; });
        if (!within_words) {
            add_runs(region);
            return;
        }
        // Along the innermost dimension lines are read whole, if they can be at all. Where it repeats
        // one element, the next one is the better walk.
        unsigned walk = n - 1;
        while (walk != 0 && dims[walk].memory == 0) --walk;
        std::rotate(dims + walk, dims + walk + 1, dims + n);
        const auto adjacent = std::find_if(dims, dims + n, [unit](const Dim& d) {
            return unit < 8 && d.whole == unit;
        });
        if (adjacent == dims + n - 1)
            add_gathered(region);
        else if (!std::all_of(dims, dims + n, [adjacent](const Dim& d) {
                     return &d == adjacent || d.whole % 8 == 0;
                 }))
            add_elements(region);
        else if (adjacent == dims + n)
            add_words(region, 1, 0);
        else
            add_packed(region, static_cast<unsigned>(adjacent - dims));
    }

    void flush() { buffer_.flush(); }

  private:
    // A kernel of spans pays from here on.
    static constexpr uint64_t kDirectBytes = 192;
    static_assert(kDirectBytes <= WordBuffer::kLongestRun);

    static constexpr uint64_t kAheadBytes = 8192;

    void add_run(const uint8_t* source, uint64_t nbytes, uint64_t start, uint64_t seed,
                 const uint8_t* ahead) {
        if (nbytes < kDirectBytes) {
            buffer_.add_run(source, nbytes, start, seed);
            return;
        }
        Span span;
        span.source = source;
        span.nbytes = nbytes;
        span.start = start;
        span.seed = seed;
        span.ahead = ahead;
        Sums local;  // in registers, where the caller's may not be
        digest_uncounted(local, span, kernels_, Write::none);
        sums_ += local;
    }

    // Runs that are consecutive in memory and in the whole.
    void add_runs(const Region& region) {
        const uint64_t nbytes = region.itemsize;
        if (region.ndim == 0) {
            add_run(region.source, nbytes, region.start, region.seed, nullptr);
            return;
        }
        // Past the end of a run lies what nobody asked for: the prefetch goes on in the runs to come.
        const int64_t step = region.dims[region.ndim - 1].memory;
        const auto runs_ahead = std::clamp<uint64_t>(kAheadBytes / nbytes, 1, 16);
        const int64_t to_ahead = step * static_cast<int64_t>(runs_ahead);
        const uint64_t own = nbytes > kAheadBytes ? (nbytes - kAheadBytes) / 64 * 64 : 0;
        for_each_index(region.dims, region.ndim, region.source, region.start,
                       [&](const uint8_t* source, uint64_t start) {
                           const uint8_t* ahead = source + to_ahead;
                           if (nbytes < kDirectBytes)
                               for (uint64_t line = 0; line < nbytes; line += 64)
                                   __builtin_prefetch(ahead + line);
                           if (own != 0) add_run(source, own, start, region.seed, nullptr);
                           add_run(source + own, nbytes - own, start + own, region.seed, ahead);
                       });
    }

    // Runs that are consecutive in the whole and have gaps in memory (stepped slices): the last
    // dimension, gathered into a buffer.
    void add_gathered(const Region& region) {
        switch (region.itemsize) {
            case 1: return add_gathered_units<uint8_t>(region);
            case 2: return add_gathered_units<uint16_t>(region);
            default: return add_gathered_units<uint32_t>(region);
        }
    }

    template <class Unit>
    void add_gathered_units(const Region& region) {
        constexpr uint64_t kCapacity = 4096 / sizeof(Unit);
        const Dim run = region.dims[region.ndim - 1];
        for_each_index(
            region.dims, region.ndim - 1, region.source, region.start,
            [&](const uint8_t* source, uint64_t start) {
                Unit gathered[kCapacity];
                for (uint64_t done = 0; done < run.length; done += kCapacity) {
                    const uint64_t now = std::min(kCapacity, run.length - done);
                    const uint8_t* from = source + static_cast<int64_t>(done) * run.memory;
                    for (uint64_t k = 0; k < now; ++k)
                        __builtin_memcpy(&gathered[k], from + static_cast<int64_t>(k) * run.memory,
                                         sizeof(Unit));
                    add_run(reinterpret_cast<const uint8_t*>(gathered), now * sizeof(Unit),
                            start + done * sizeof(Unit), region.seed,
                            from + static_cast<int64_t>(kCapacity) * run.memory);
                }
            });
    }

    // Words that run across the rows of memory (transposed matrices). Dimension `across` is consecutive in
    // the whole; it is cut where words end, and each group of rows is walked along the last dimension.
    void add_packed(const Region& region, unsigned across) {
        const uint64_t unit = region.itemsize;
        const Dim dim = region.dims[across];
        const uint64_t per_word = 8 / unit;
        const uint64_t phase = region.start % 8 / unit;
        const uint64_t head = std::min((per_word - phase) % per_word, dim.length);
        const uint64_t words = (dim.length - head) / per_word;
        const uint64_t tail = dim.length - head - words * per_word;
        const auto add_groups = [&](uint64_t skipped, uint64_t count, uint64_t lanes) {
            if (count == 0 || lanes == 0) return;
            Region groups = region;
            groups.source += static_cast<int64_t>(skipped) * dim.memory;
            groups.start += skipped * unit;
            groups.dims[across] = Dim{count, dim.memory * static_cast<int64_t>(per_word), 8};
            add_words(groups, static_cast<unsigned>(lanes), dim.memory);
        };
        add_groups(0, 1, head);
        add_groups(head, words, per_word);
        add_groups(head + words * per_word, 1, tail);
    }

    // Every index is one word of `lanes` elements, at the same place within its word.
    void add_words(const Region& region, unsigned lanes, int64_t lane_step) {
        const Dim walk = region.dims[region.ndim - 1];
        Progression words;
        words.step = walk.memory;
        words.lanes = lanes;
        words.lane_step = lane_step;
        words.shift = static_cast<unsigned>(8 * (region.start % 8));
        words.counter_step = walk.whole / 8;
        const auto unit_log2 = static_cast<unsigned>(std::countr_zero(region.itemsize));
        for_each_index(region.dims, region.ndim - 1, region.source, region.start,
                       [&](const uint8_t* source, uint64_t start) {
                           words.source = source;
                           words.counter = (start >> 3) + region.seed;
                           buffer_.add_progression(words, unit_log2, walk.length);
                       });
    }

    // Elements at places within their words that differ (rows of an odd number of bytes).
    void add_elements(const Region& region) {
        const Dim walk = region.dims[region.ndim - 1];
        Elements elements;
        elements.step = walk.memory;
        elements.whole_step = walk.whole;
        elements.seed = region.seed;
        const auto unit_log2 = static_cast<unsigned>(std::countr_zero(region.itemsize));
        for_each_index(region.dims, region.ndim - 1, region.source, region.start,
                       [&](const uint8_t* source, uint64_t start) {
                           elements.source = source;
                           elements.start = start;
                           buffer_.add_elements(elements, unit_log2, walk.length);
                       });
    }

    Sums& sums_;
    const Kernels& kernels_;
    WordBuffer buffer_;
};

constexpr uint64_t kBytesPerThread = uint64_t{1} << 20;  // less than this is not worth a thread
constexpr uint64_t kPiecesPerThread = 4;                 // so that no thread waits long for another

// Halves a region along its longest memory stride until no piece has more than `limit` bytes.
void cut(const Region& region, uint64_t limit, std::vector<Region>& pieces) {
    Dim const* longest = nullptr;
    for (const Dim& dim : region.dims)
        if (dim.length > 1 && (!longest || magnitude(dim.memory) > magnitude(longest->memory)))
            longest = &dim;
    if (!longest || region.nbytes() <= limit) {
        pieces.push_back(region);
        return;
    }
    const auto at = longest - region.dims;
    const uint64_t half = longest->length / 2;
    Region part = region;
    part.dims[at].length = half;
    cut(part, limit, pieces);
    part.source += static_cast<int64_t>(half) * longest->memory;
    part.start += half * longest->whole;
    part.dims[at].length = longest->length - half;
    cut(part, limit, pieces);
}

void digest_piece(const Region& piece, Sums& sums, const Kernels& kernels,
                  const WordKernels& word_kernels) {
    Sums local;
    count_bytes(local, piece.nbytes(), piece.seed);
    RegionDigest digest(local, kernels, word_kernels);
    digest.add(normalized(piece));
    digest.flush();
    sums += local;
}

}  // namespace

uint64_t Region::nbytes() const {
    uint64_t total = itemsize;
    for (unsigned d = 0; d < ndim; ++d) total *= dims[d].length;
    return total;
}

void digest_regions(const std::vector<Region>& regions, std::vector<Sums>& sums, Isa isa,
                    unsigned threads) {
    const Kernels kernels(isa);
    const WordKernels word_kernels(isa);
    uint64_t total = 0;
    for (const Region& region : regions) total += region.nbytes();
    const uint64_t useful = std::max<uint64_t>(1, total / kBytesPerThread);
    const auto shares = static_cast<unsigned>(std::clamp<uint64_t>(threads, 1, useful));
    const uint64_t limit =
        shares == 1 ? ~uint64_t{0} : std::max(kBytesPerThread / 2, total / (shares * kPiecesPerThread));
    std::vector<Region> pieces;
    pieces.reserve(regions.size());
    for (const Region& region : regions)
        if (region.nbytes() != 0) cut(region, limit, pieces);

    // Private sums per share, so that shares never write to the same line.
    std::vector<std::vector<Sums>> extra(shares - 1, std::vector<Sums>(sums.size()));
    std::atomic<size_t> next{0};
    run_shares(shares, [&](unsigned share) {
        std::vector<Sums>& mine = share == 0 ? sums : extra[share - 1];
        for (size_t i = next++; i < pieces.size(); i = next++)
            digest_piece(pieces[i], mine[pieces[i].out], kernels, word_kernels);
    });
    for (const std::vector<Sums>& partial : extra)
        for (size_t i = 0; i < sums.size(); ++i) sums[i] += partial[i];
}

}  // namespace weightsync
