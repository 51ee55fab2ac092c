// The digest of a table of strided regions, as one grid of thread blocks computes it.
//
// The same text is compiled for the device (digest.cu) and for the host, where a simulated grid runs it in
// tests. What differs between the two stands in `Grid`:
//
//     block(), blocks(), thread(), threads()   this thread's place; threads() is a multiple of 32
//     load(address, value)                     value = what lies at a multiple of sizeof(value)
//     shuffle_xor(value, mask)                 the value that thread ^ mask of the same warp passed
//     shared()                                 2 * threads() / 32 words per block
//     barrier()                                for all threads of a block
//     atomic_add(address, value)               64-bit, modulo 2^64
//
// A region is cut into chunks and the chunks are dealt to the blocks, so that one launch keeps every block
// busy whatever the sizes are. All sums are of integers modulo 2^64: the order in which threads, blocks and
// chunks are added changes no bit, and the result equals the CPU's.
#pragma once

#include "digest.h"

namespace weightsync {

// A box of one checkpoint tensor and where its elements lie in memory: the row of the table that comes from
// the host, 30 columns of 64 bits.
struct Region {
    uint64_t address;  // of the element at index (0, ..., 0)
    uint64_t itemsize;
    uint64_t ndim;      // at most 8
    uint64_t start;     // where that element's first byte lies in the whole tensor
    uint64_t seed;      // of the whole tensor, for this update
    uint64_t out;       // which digest the region adds to
    uint64_t length[8];
    int64_t stride[8];        // bytes between neighbours in memory
    int64_t whole_stride[8];  // bytes between neighbours in the whole tensor
};
static_assert(sizeof(Region) == 240, "a row of the table has 30 columns of 8 bytes");

// Some of the bytes of a region, counted in row-major order of its own elements. Both numbers are multiples
// of the item size.
struct Chunk {
    uint64_t region;
    uint64_t first;
    uint64_t count;
};
static_assert(sizeof(Chunk) == 24, "a chunk has 3 columns of 8 bytes");

struct alignas(16) Vector {
    uint64_t low;
    uint64_t high;
};

constexpr uint32_t kWarp = 32;

// Runs up to this length are read by one thread each: a whole warp would mostly idle.
constexpr uint64_t kThreadRunBytes = 32;

// Adds up to 8 bytes, the lowest of which lies at `position` in the whole tensor. Where they cross the end
// of a word, each word takes its own part.
WEIGHTSYNC_INLINE void add_at(Sums& sums, uint64_t bytes, uint64_t position, uint64_t seed) {
    const uint32_t shift = 8 * static_cast<uint32_t>(position & 7);
    const uint64_t word = position >> 3;
    multiply_accumulate(sums, bytes << shift, key(word, seed));
    if (shift != 0 && (bytes >> (64 - shift)) != 0)
        multiply_accumulate(sums, bytes >> (64 - shift), key(word + 1, seed));
}

// Adds the two words of a vector.
WEIGHTSYNC_INLINE void add_words(Sums& sums, const Vector& vector, uint64_t word, uint64_t seed) {
    multiply_accumulate(sums, vector.low, key(word, seed));
    multiply_accumulate(sums, vector.high, key(word + 1, seed));
}

// Adds 16 bytes at a place where memory and tensor disagree on where words begin: they hold one word and
// parts of two.
WEIGHTSYNC_INLINE void add_shifted(Sums& sums, const Vector& vector, uint64_t position, uint64_t seed) {
    const uint32_t shift = 8 * static_cast<uint32_t>(position & 7);
    const uint32_t back = 64 - shift;
    const uint64_t word = position >> 3;
    multiply_accumulate(sums, vector.low << shift, key(word, seed));
    multiply_accumulate(sums, vector.low >> back | vector.high << shift, key(word + 1, seed));
    multiply_accumulate(sums, vector.high >> back, key(word + 2, seed));
}

template <class T, class Grid>
WEIGHTSYNC_INLINE uint64_t load_as(Grid& grid, uint64_t address) {
    T value;
    grid.load(address, value);
    return value;
}

// A short run, by one thread, in the largest aligned pieces that it is made of.
template <class Grid>
WEIGHTSYNC_INLINE void digest_short_run(Sums& sums, Grid& grid, uint64_t address, uint64_t nbytes,
                                        uint64_t position, uint64_t seed) {
    while (nbytes != 0) {
        uint64_t piece = 8;
        while (piece > nbytes || (address & (piece - 1)) != 0) piece >>= 1;
        const uint64_t bytes = piece == 8   ? load_as<uint64_t>(grid, address)
                               : piece == 4 ? load_as<uint32_t>(grid, address)
                               : piece == 2 ? load_as<uint16_t>(grid, address)
                                            : load_as<uint8_t>(grid, address);
        add_at(sums, bytes, position, seed);
        address += piece;
        position += piece;
        nbytes -= piece;
    }
}

// A long run, by `lanes` threads that each call this with their own `lane`: vectors that lie aligned in
// memory, read by neighbouring threads from neighbouring addresses, and single bytes at both ends.
template <class Grid>
WEIGHTSYNC_INLINE void digest_long_run(Sums& sums, Grid& grid, uint64_t address, uint64_t nbytes,
                                       uint64_t position, uint64_t seed, uint32_t lane, uint32_t lanes) {
    const uint64_t unaligned = (16 - (address & 15)) & 15;
    const uint64_t head = unaligned < nbytes ? unaligned : nbytes;
    const uint64_t vectors = (nbytes - head) / 16;
    const uint64_t ends = nbytes - 16 * vectors;
    for (uint64_t i = lane; i < ends; i += lanes) {
        const uint64_t offset = i < head ? i : i + 16 * vectors;
        add_at(sums, load_as<uint8_t>(grid, address + offset), position + offset, seed);
    }
    address += head;
    position += head;
    uint64_t v = lane;
    if ((position & 7) != 0) {
        for (; v < vectors; v += lanes) {
            Vector vector;
            grid.load(address + 16 * v, vector);
            add_shifted(sums, vector, position + 16 * v, seed);
        }
        return;
    }
    address += 16 * v;
    uint64_t word = (position >> 3) + 2 * v;
    const uint64_t step = 16 * lanes;
    // Several loads are under way before the first is used: memory's latency is the longest thing here.
    constexpr uint32_t kLoads = 4;
    for (; v + (kLoads - 1) * lanes < vectors; v += kLoads * lanes) {
        Vector loaded[kLoads];
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i, address += step) grid.load(address, loaded[i]);
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i, word += step / 8) add_words(sums, loaded[i], word, seed);
    }
    for (; v < vectors; v += lanes, address += step, word += step / 8) {
        Vector vector;
        grid.load(address, vector);
        add_words(sums, vector, word, seed);
    }
}

// The bytes that are consecutive in memory and in the whole tensor at once: the trailing dimensions that
// are. `outer` becomes the number of dimensions before them.
WEIGHTSYNC_INLINE uint64_t run_bytes(const Region& region, uint32_t& outer) {
    uint64_t run = region.itemsize;
    for (outer = static_cast<uint32_t>(region.ndim); outer != 0; --outer) {
        const uint32_t d = outer - 1;
        const int64_t step = static_cast<int64_t>(run);
        // The stride of an axis of length one means nothing.
        if (region.length[d] != 1 && (region.stride[d] != step || region.whole_stride[d] != step)) break;
        run *= region.length[d];
    }
    return run;
}

// What this thread adds for a chunk: its share of the words, and, in one thread, the number of bytes.
template <class Grid>
WEIGHTSYNC_INLINE Sums digest_chunk(Grid& grid, const Region& region, const Chunk& chunk) {
    Sums sums;
    if (grid.thread() == 0) count_bytes(sums, chunk.count, region.seed);
    uint32_t outer;
    const uint64_t run = run_bytes(region, outer);
    const uint64_t end = chunk.first + chunk.count;
    const uint64_t first_run = chunk.first / run;
    // Runs go to teams of threads. One thread suits single elements, a warp the rows of a slice, and the
    // whole block a chunk that has fewer runs than the block has warps: mostly one.
    const bool one_each = run <= kThreadRunBytes;
    const bool many = (end - 1) / run - first_run + 1 >= grid.threads() / kWarp;
    const uint32_t lanes = one_each ? 1 : many ? kWarp : grid.threads();
    const uint32_t lane = grid.thread() % lanes;
    for (uint64_t r = first_run + grid.thread() / lanes; r * run < end; r += grid.threads() / lanes) {
        // Chunks may begin and end inside a run.
        const uint64_t whole = r * run;
        const uint64_t from = whole < chunk.first ? chunk.first - whole : 0;
        const uint64_t to = end - whole < run ? end - whole : run;
        uint64_t address = region.address + from;
        uint64_t position = region.start + from;
        uint64_t index = r;
        for (uint32_t d = outer; d-- != 0;) {
            const uint64_t length = region.length[d];
            const uint64_t before = index / length;
            const uint64_t i = index - before * length;
            // Unsigned products wrap as signed ones would: negative strides come out right.
            address += i * static_cast<uint64_t>(region.stride[d]);
            position += i * static_cast<uint64_t>(region.whole_stride[d]);
            index = before;
        }
        if (one_each)
            digest_short_run(sums, grid, address, to - from, position, region.seed);
        else
            digest_long_run(sums, grid, address, to - from, position, region.seed, lane, lanes);
    }
    return sums;
}

template <class Grid>
WEIGHTSYNC_INLINE Sums sum_warp(Grid& grid, Sums sums) {
#pragma unroll
    for (uint32_t mask = kWarp / 2; mask != 0; mask /= 2) {
        const uint64_t first = grid.shuffle_xor(sums.first, mask);
        const uint64_t second = grid.shuffle_xor(sums.second, mask);
        sums.first += first;
        sums.second += second;
    }
    return sums;
}

// Adds the sums of all threads of the block to `out`, with two atomic additions per block.
template <class Grid>
WEIGHTSYNC_INLINE void add_block(Grid& grid, Sums sums, uint64_t* out) {
    const uint32_t lane = grid.thread() % kWarp;
    const uint32_t warp = grid.thread() / kWarp;
    uint64_t* shared = grid.shared();
    sums = sum_warp(grid, sums);
    if (lane == 0) {
        shared[2 * warp] = sums.first;
        shared[2 * warp + 1] = sums.second;
    }
    grid.barrier();
    if (warp == 0) {
        Sums total;
        if (lane < grid.threads() / kWarp) {
            total.first = shared[2 * lane];
            total.second = shared[2 * lane + 1];
        }
        total = sum_warp(grid, total);
        if (lane == 0) {
            grid.atomic_add(out, total.first);
            grid.atomic_add(out + 1, total.second);
        }
    }
    // The next chunk's sums go to the same shared words.
    grid.barrier();
}

// The kernel. Adds to out, (n_out, 2), the digest of every chunk; the caller has set it to zero.
template <class Grid>
WEIGHTSYNC_INLINE void digest_regions(Grid& grid, const Region* regions, const Chunk* chunks,
                                      uint64_t n_chunks, uint64_t* out) {
    for (uint64_t c = grid.block(); c < n_chunks; c += grid.blocks()) {
        const Chunk& chunk = chunks[c];
        const Region& region = regions[chunk.region];
        add_block(grid, digest_chunk(grid, region, chunk), out + 2 * region.out);
    }
}

}  // namespace weightsync
