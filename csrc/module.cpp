// weightsync._native: tables of raw addresses in, digests out. Links neither torch nor the CUDA runtime,
// so that one build serves every version of both. Everything that comes from Python is checked here;
// whether an address is readable is the caller's promise.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "digest.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using weightsync::Isa;
using weightsync::Span;
using weightsync::Stores;
using weightsync::Sums;

// Any array: dtype and shape are checked by hand, because nanobind would convert a wrong dtype in silence
// or raise TypeError for a wrong shape.
using Rows = nb::ndarray<nb::ro, nb::device::cpu>;
using Table = nb::ndarray<nb::numpy, uint64_t, nb::ndim<2>>;

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

const uint64_t* checked_rows(const Rows& rows, size_t columns) {
    if (rows.dtype() != nb::dtype<uint64_t>()) refuse("rows must have dtype uint64");
    if (rows.ndim() != 2 || rows.shape(1) != columns)
        refuse("rows must have shape (n, " + std::to_string(columns) + ")");
    const bool empty = rows.shape(0) == 0;
    // The stride of an axis of length one means nothing.
    const bool contiguous = rows.stride(1) == 1 &&
                            (rows.shape(0) <= 1 || rows.stride(0) == static_cast<int64_t>(columns));
    if (!empty && !contiguous) refuse("rows must be C-contiguous");
    return static_cast<const uint64_t*>(rows.data());
}

void check_range(uint64_t first, uint64_t nbytes, const char* what, size_t row) {
    if (nbytes > std::numeric_limits<uint64_t>::max() - first)
        refuse("row " + std::to_string(row) + ": " + what + " + nbytes exceeds 64 bits");
}

void check_span(const Span& span, bool copies, size_t row) {
    const auto source = reinterpret_cast<uint64_t>(span.source);
    const auto destination = reinterpret_cast<uint64_t>(span.destination);
    check_range(span.start, span.nbytes, "start", row);
    if (span.nbytes == 0) return;
    if (source == 0 || (copies && destination == 0))
        refuse("row " + std::to_string(row) + ": null pointer with nbytes > 0");
    check_range(source, span.nbytes, "source address", row);
    if (!copies) return;
    check_range(destination, span.nbytes, "destination address", row);
    if (source < destination + span.nbytes && destination < source + span.nbytes)
        refuse("row " + std::to_string(row) + ": source and destination overlap");
}

Isa checked_isa(int isa) {
    const int best = static_cast<int>(weightsync::best_isa());
    if (isa == -1) return static_cast<Isa>(best);
    if (isa < -1 || isa > 2) refuse("isa must be -1 (best), 0 (scalar), 1 (avx2) or 2 (avx512)");
    if (isa > best)
        refuse(std::string("this machine lacks ") + weightsync::isa_name(static_cast<Isa>(isa)));
    return static_cast<Isa>(isa);
}

unsigned checked_threads(int threads) {
    if (threads < 1 || threads > 1024) refuse("threads must be between 1 and 1024");
    return static_cast<unsigned>(threads);
}

Stores checked_stores(int streaming) {
    if (streaming < -1 || streaming > 1)
        refuse("streaming must be -1 (by size), 0 (never) or 1 (always)");
    return static_cast<Stores>(streaming);
}

size_t checked_n_out(int64_t n_out) {
    if (n_out < 0) refuse("n_out must not be negative");
    return static_cast<size_t>(n_out);
}

// The spans are copied out of the array: Python may change it while the work runs without the GIL.
std::vector<Span> read_spans(const Rows& rows, bool copies, bool digests, size_t n_out) {
    const size_t columns = 2u + copies + (digests ? 3u : 0u);
    const uint64_t* row = checked_rows(rows, columns);
    std::vector<Span> spans(rows.shape(0));
    for (size_t i = 0; i < spans.size(); ++i, row += columns) {
        const uint64_t* next = row;
        Span& span = spans[i];
        span.source = reinterpret_cast<const uint8_t*>(*next++);
        if (copies) span.destination = reinterpret_cast<uint8_t*>(*next++);
        span.nbytes = *next++;
        if (digests) {
            span.start = *next++;
            span.seed = *next++;
            span.out = *next++;
            if (span.out >= n_out)
                refuse("row " + std::to_string(i) + ": out_index " + std::to_string(span.out) +
                       " is not below n_out " + std::to_string(n_out));
        }
        check_span(span, copies, i);
    }
    return spans;
}

Table to_table(const std::vector<Sums>& sums) {
    auto data = std::make_unique<uint64_t[]>(2 * sums.size());
    for (size_t i = 0; i < sums.size(); ++i) {
        data[2 * i] = sums[i].first;
        data[2 * i + 1] = sums[i].second;
    }
    uint64_t* released = data.release();
    nb::capsule owner(released, [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
    return Table(released, {sums.size(), 2}, owner);
}

Table digest_table(const Rows& rows, int64_t n_out, int isa, int threads) {
    std::vector<Sums> sums(checked_n_out(n_out));
    const Isa chosen = checked_isa(isa);
    const unsigned workers = checked_threads(threads);
    const std::vector<Span> spans = read_spans(rows, false, true, sums.size());
    {
        nb::gil_scoped_release release;
        weightsync::digest_spans(spans, sums, chosen, workers);
    }
    return to_table(sums);
}

Table copy_digest_table(const Rows& rows, int64_t n_out, int isa, int threads, int streaming) {
    std::vector<Sums> sums(checked_n_out(n_out));
    const Isa chosen = checked_isa(isa);
    const unsigned workers = checked_threads(threads);
    const Stores stores = checked_stores(streaming);
    const std::vector<Span> spans = read_spans(rows, true, true, sums.size());
    {
        nb::gil_scoped_release release;
        weightsync::copy_and_digest_spans(spans, sums, chosen, workers, stores);
    }
    return to_table(sums);
}

void copy_table(const Rows& rows, int threads, int streaming) {
    const unsigned workers = checked_threads(threads);
    const Stores stores = checked_stores(streaming);
    const std::vector<Span> spans = read_spans(rows, true, false, 0);
    nb::gil_scoped_release release;
    weightsync::copy_spans(spans, workers, stores);
}

void one_memcpy(uint64_t destination, uint64_t source, uint64_t nbytes) {
    Span span;
    span.source = reinterpret_cast<const uint8_t*>(source);
    span.destination = reinterpret_cast<uint8_t*>(destination);
    span.nbytes = nbytes;
    check_span(span, true, 0);
    if (nbytes == 0) return;
    nb::gil_scoped_release release;
    std::memcpy(span.destination, span.source, nbytes);
}

std::string isa_name(int isa) {
    if (isa < 0 || isa > 2) refuse("isa must be 0 (scalar), 1 (avx2) or 2 (avx512)");
    return weightsync::isa_name(static_cast<Isa>(isa));
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of weightsync: digests and copies of tables of raw spans.";
    m.def("digest_table", &digest_table, "rows"_a, "n_out"_a, "isa"_a = -1, "threads"_a = 1,
          "Digests spans. rows: (n, 5) uint64 [address, nbytes, start, seed, out_index].");
    m.def("copy_digest_table", &copy_digest_table, "rows"_a, "n_out"_a, "isa"_a = -1, "threads"_a = 1,
          "streaming"_a = -1,
          "Copies spans and digests what was read. rows: (n, 6) uint64 "
          "[source, destination, nbytes, start, seed, out_index].");
    m.def("copy_table", &copy_table, "rows"_a, "threads"_a = 1, "streaming"_a = -1,
          "Copies spans. rows: (n, 3) uint64 [source, destination, nbytes].");
    m.def("memcpy", &one_memcpy, "destination"_a, "source"_a, "nbytes"_a,
          "One memcpy of the C library: the unit in which copies are measured.");
    m.def("isa", [] { return static_cast<int>(weightsync::best_isa()); },
          "The best instruction set of this machine: 0 scalar, 1 avx2, 2 avx512.");
    m.def("isa_name", [](int isa) { return nb::str(isa_name(isa).c_str()); }, "isa"_a,
          "The name of an instruction set.");
}
