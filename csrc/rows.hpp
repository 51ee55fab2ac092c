// Tables between Python and the native code: rows of raw addresses in, sums out. Everything that comes from
// Python is checked here; whether an address is readable is the caller's promise.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "kernels.hpp"

namespace weightsync {

// Any array: dtype and shape are checked by hand, because nanobind would convert a wrong dtype in silence
// or raise TypeError for a wrong shape.
using Rows = nanobind::ndarray<nanobind::ro, nanobind::device::cpu>;
using Table = nanobind::ndarray<nanobind::numpy, uint64_t, nanobind::ndim<2>>;

// Raises ValueError.
[[noreturn]] void refuse(const std::string& message);

// The rows of a C-contiguous array (n, columns) of uint64 or, if `or_signed`, of int64.
const void* checked_table(const Rows& rows, size_t columns, bool or_signed);
// The first of the rows of a C-contiguous uint64 array (n, columns).
const uint64_t* checked_rows(const Rows& rows, size_t columns);

size_t checked_n_out(int64_t n_out);
Isa checked_isa(int isa);  // -1: the best of this machine
unsigned checked_threads(int threads);

// Refuses first + nbytes beyond 64 bits.
void check_range(uint64_t first, uint64_t nbytes, const char* what, size_t row);
void check_span(const Span& span, bool copies, size_t row);

// Columns: source, destination (if `copies`), nbytes, and, if `digests`, start, seed, out_index. They are
// copied out of the array: Python may change it while the work runs without the GIL.
std::vector<Span> read_spans(const Rows& rows, bool copies, bool digests, size_t n_out);

// (n, 2) uint64.
Table to_table(const std::vector<Sums>& sums);

}  // namespace weightsync
