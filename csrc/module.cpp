// weightsync._native: tables of raw addresses in, digests out. Links neither torch nor the CUDA runtime,
// so that one build serves every version of both.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <string>
#include <vector>

#include "digest.hpp"
#include "regions_module.hpp"
#include "ring_module.hpp"
#include "rows.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using weightsync::check_span;
using weightsync::checked_isa;
using weightsync::checked_n_out;
using weightsync::checked_threads;
using weightsync::Isa;
using weightsync::read_spans;
using weightsync::refuse;
using weightsync::Rows;
using weightsync::Span;
using weightsync::Stores;
using weightsync::Sums;
using weightsync::Table;
using weightsync::to_table;

Stores checked_stores(int streaming) {
    if (streaming < -1 || streaming > 1)
        refuse("streaming must be -1 (by size), 0 (never) or 1 (always)");
    return static_cast<Stores>(streaming);
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

uint64_t one_read(uint64_t source, uint64_t nbytes) {
    Span span;
    span.source = reinterpret_cast<const uint8_t*>(source);
    span.nbytes = nbytes;
    check_span(span, false, 0);
    if (nbytes == 0) return 0;
    nb::gil_scoped_release release;
    return weightsync::read_words(span.source, nbytes);
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
    m.def("read", &one_read, "source"_a, "nbytes"_a,
          "Reads the bytes and returns the exclusive or of their words, the last one padded with zeros: the "
          "bandwidth against which digests are measured.");
    m.def("isa", [] { return static_cast<int>(weightsync::best_isa()); },
          "The best instruction set of this machine: 0 scalar, 1 avx2, 2 avx512.");
    m.def("isa_name", [](int isa) { return nb::str(isa_name(isa).c_str()); }, "isa"_a,
          "The name of an instruction set.");
    weightsync::bind_regions(m);
    weightsync::bind_ring(m);
}
