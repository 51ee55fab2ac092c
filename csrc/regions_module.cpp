#include "regions_module.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <vector>

#include "regions.hpp"
#include "rows.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace weightsync {
namespace {

// address, itemsize, ndim, start, seed, out, then lengths, memory strides and whole strides.
constexpr size_t kColumns = 6 + 3 * kMaxDims;

__extension__ typedef unsigned __int128 Wide;  // extents are summed without overflow
constexpr Wide kEndOfWhole = Wide{1} << 64;
// Far beyond any address space, and far enough from 64 bits that no step of a walk overflows.
constexpr Wide kLongestExtent = Wide{1} << 62;

void check_dims(const Region& region, const std::string& row) {
    for (unsigned d = region.ndim; d < kMaxDims; ++d)
        if (region.dims[d].length != 1 || region.dims[d].memory != 0 || region.dims[d].whole != 0)
            refuse(row + "unused dimensions must have length 1 and strides 0");
    for (const Dim& dim : region.dims)
        if (static_cast<int64_t>(dim.length) < 0) refuse(row + "negative length");
}

bool is_empty(const Region& region) {
    return std::any_of(region.dims, region.dims + region.ndim,
                       [](const Dim& dim) { return dim.length == 0; });
}

// Where the elements stand in the whole: inside 64 bits, none upon another, none across two words.
void check_whole(const Region& region, const std::string& row) {
    Dim dims[kMaxDims];
    std::copy_n(region.dims, kMaxDims, dims);
    std::sort(dims, dims + kMaxDims, [](const Dim& a, const Dim& b) { return a.whole < b.whole; });
    Wide extent = region.itemsize;
    for (const Dim& dim : dims) {
        if (dim.length == 1) continue;
        if (dim.whole < extent) refuse(row + "elements overlap in the whole tensor");
        if (dim.whole % region.itemsize != 0)
            refuse(row + "whole strides must be multiples of the itemsize");
        extent += Wide{dim.length - 1} * dim.whole;
        if (extent > kEndOfWhole) refuse(row + "extent in the whole tensor exceeds 64 bits");
    }
    if (region.start % region.itemsize != 0) refuse(row + "start must be a multiple of the itemsize");
    if (region.start + extent > kEndOfWhole) refuse(row + "start + extent exceeds 64 bits");
}

void check_memory(const Region& region, const std::string& row) {
    Wide below = 0, above = region.itemsize;
    for (const Dim& dim : region.dims) {
        if (dim.length == 1) continue;
        const uint64_t step = dim.memory < 0 ? -static_cast<uint64_t>(dim.memory) : dim.memory;
        Wide& side = dim.memory < 0 ? below : above;
        side += Wide{dim.length - 1} * step;
        if (side > kLongestExtent) refuse(row + "extent in memory exceeds the address space");
    }
    const Wide address = reinterpret_cast<uint64_t>(region.source);
    if (address == 0) refuse(row + "null pointer with elements to read");
    if (below >= address || address + above > kEndOfWhole)
        refuse(row + "address + extent exceeds 64 bits");
}

std::vector<Region> read_regions(const Rows& rows, size_t n_out) {
    const auto* row = static_cast<const uint64_t*>(checked_table(rows, kColumns, true));
    std::vector<Region> regions(rows.shape(0));
    for (size_t i = 0; i < regions.size(); ++i, row += kColumns) {
        const std::string prefix = "row " + std::to_string(i) + ": ";
        Region& region = regions[i];
        region.source = reinterpret_cast<const uint8_t*>(row[0]);
        region.itemsize = row[1];
        if (!std::has_single_bit(region.itemsize) || region.itemsize > 16)
            refuse(prefix + "itemsize must be 1, 2, 4, 8 or 16");
        if (row[2] > kMaxDims) refuse(prefix + "ndim must be between 0 and 8");
        region.ndim = static_cast<unsigned>(row[2]);
        region.start = row[3];
        region.seed = row[4];
        region.out = row[5];
        if (region.out >= n_out)
            refuse(prefix + "out " + std::to_string(region.out) + " is not below n_out " +
                   std::to_string(n_out));
        for (unsigned d = 0; d < kMaxDims; ++d)
            region.dims[d] = Dim{row[6 + d], static_cast<int64_t>(row[14 + d]), row[22 + d]};
        check_dims(region, prefix);
        if (is_empty(region)) continue;
        check_whole(region, prefix);
        check_memory(region, prefix);
    }
    return regions;
}

Table digest_table_of_regions(const Rows& rows, int64_t n_out, int isa, int threads) {
    std::vector<Sums> sums(checked_n_out(n_out));
    const Isa chosen = checked_isa(isa);
    const unsigned workers = checked_threads(threads);
    const std::vector<Region> regions = read_regions(rows, sums.size());
    {
        nb::gil_scoped_release release;
        digest_regions(regions, sums, chosen, workers);
    }
    return to_table(sums);
}

}  // namespace

void bind_regions(nb::module_& m) {
    m.def("digest_regions", &digest_table_of_regions, "rows"_a, "n_out"_a, "isa"_a = -1, "threads"_a = 1,
          "Digests regions. rows: (n, 30) uint64 or int64 [address, itemsize, ndim, start, seed, "
          "out_index, 8 lengths, 8 strides in memory, 8 strides in the whole], all in bytes.");
    m.def(
        "check_regions",
        [](const Rows& rows, int64_t n_out) { read_regions(rows, checked_n_out(n_out)); }, "rows"_a,
        "n_out"_a, "Raises the ValueError that digest_regions would raise for these rows.");
}

}  // namespace weightsync
