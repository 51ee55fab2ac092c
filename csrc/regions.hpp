// Regions: parts of tensors in memory of any layout, digested where they lie.
//
// A span is consecutive in the whole tensor and in memory. A region is neither: its elements are counted by
// up to eight indices, each with a stride in memory and one in the whole tensor. Boxes of transposed,
// sliced, stepped or expanded tensors are regions. The digest is that of exactly these bytes of the whole,
// in one pass and without a contiguous copy.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace weightsync {

constexpr unsigned kMaxDims = 8;

struct Dim {
    uint64_t length = 1;
    int64_t memory = 0;  // bytes from one element to the next, of either sign; zero repeats the element
    uint64_t whole = 0;  // bytes from one element to the next in the whole tensor
};

// Elements of `itemsize` bytes. No two of them have a byte of the whole in common, and all of the
// whole's offsets are multiples of `itemsize`.
struct Region {
    const uint8_t* source = nullptr;
    uint64_t itemsize = 1;
    unsigned ndim = 0;
    Dim dims[kMaxDims];
    uint64_t start = 0;  // byte offset of the first element in the whole tensor
    uint64_t seed = 0;   // of the whole tensor, for this update
    uint64_t out = 0;    // which digest the region adds to

    uint64_t nbytes() const;
};

// Adds the digest of every region to sums[region.out]. Never throws once its threads run.
void digest_regions(const std::vector<Region>& regions, std::vector<Sums>& sums, Isa isa,
                    unsigned threads);

}  // namespace weightsync
