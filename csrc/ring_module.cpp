// The ring's bindings. A fault is returned as a tuple (kind, who, detail), which weightsync.transport.ring
// turns into a typed error that knows the peer's name. The caller keeps the memory mapped during a call.
#include "ring_module.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ring.hpp"
#include "rows.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace weightsync {
namespace {

using Fault = std::tuple<int, size_t, std::string>;  // kind 0: none

// So that Ctrl-C ends a wait in the main thread; elsewhere it does nothing.
void check_signals() {
    nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

WaitLimits limits_of(std::vector<int> peers, double deadline) {
    return WaitLimits{deadline, std::move(peers), check_signals};
}

template <class Work>
Fault guarded(const Work& work) {
    try {
        nb::gil_scoped_release release;
        work();
    } catch (const RingError& error) {
        return {static_cast<int>(error.fault), error.who, error.what()};
    }
    return {0, 0, ""};
}

void* checked_base(uint64_t address) {
    if (address == 0 || address % kPageBytes != 0) refuse("a ring must lie at the start of a page");
    return reinterpret_cast<void*>(address);
}

void make_writer(RingWriter* self, uint64_t address, uint64_t nbytes, uint32_t readers, uint64_t capacity,
                 bool carries_bytes, uint64_t chunk) {
    new (self) RingWriter(checked_base(address), nbytes, readers, capacity, carries_bytes, chunk);
}

Fault push(RingWriter& self, const Rows& rows, bool arena, bool digests, const std::vector<int>& peers, 
           double deadline) {
    if (arena == self.carries_bytes())
        refuse(arena ? "this ring carries the bytes: spans have no destination"
                     : "this ring is a journal: spans need a destination in the arena");
    const std::vector<Span> spans = read_spans(rows, arena, true, self.tensors());
    return guarded([&] { self.push(spans, digests, limits_of(peers, deadline)); });
}

std::vector<Tensor> read_tensors(const Rows& rows) {
    const uint64_t* row = checked_rows(rows, 3);
    std::vector<Tensor> tensors(rows.shape(0));
    for (size_t i = 0; i < tensors.size(); ++i, row += 3) {
        if (row[0] == 0 && row[1] != 0)
            refuse("row " + std::to_string(i) + ": null pointer with nbytes > 0");
        check_range(row[0], row[1], "address", i);
        tensors[i] = {reinterpret_cast<uint8_t*>(row[0]), row[1], row[2]};
    }
    return tensors;
}

std::tuple<Fault, Table> follow(RingReader& self, uint64_t update, const Rows& rows, bool digests,
                                const std::vector<int>& peers, double deadline) {
    const std::vector<Tensor> tensors = read_tensors(rows);
    std::vector<Sums> sums;
    Fault fault =
        guarded([&] { sums = self.follow(update, tensors, digests, limits_of(peers, deadline)); });
    return {std::move(fault), to_table(sums)};
}

// (fault, reader): a header that is none must not leave half an object behind.
std::tuple<Fault, nb::object> open_reader(uint64_t address, uint64_t nbytes, uint32_t reader) {
    void* base = checked_base(address);
    try {
        return {Fault{0, 0, ""}, nb::cast(RingReader(base, nbytes, reader))};
    } catch (const RingError& error) {
        return {Fault{static_cast<int>(error.fault), error.who, error.what()}, nb::none()};
    }
}

}  // namespace

void bind_ring(nb::module_& m) {
    m.def("ring_bytes", &ring_bytes, "readers"_a, "capacity"_a,
          "Bytes of memory that a ring of so many readers and so many bytes of records takes.");
    nb::class_<RingWriter>(m, "RingWriter")
        .def("__init__", &make_writer, "address"_a, "nbytes"_a, "readers"_a, "capacity"_a,
             "carries_bytes"_a, "chunk"_a)
        .def("begin", &RingWriter::begin, "tensors"_a)
        .def("push", &push, "rows"_a, "arena"_a, "digests"_a, "peers"_a, "deadline"_a)
        .def("finish", &RingWriter::finish)
        .def("abort", &RingWriter::abort)
        .def("sums", [](const RingWriter& self) { return to_table(self.sums()); });
    nb::class_<RingReader>(m, "RingReader")
        .def("follow", &follow, "update"_a, "rows"_a, "digests"_a, "peers"_a, "deadline"_a)
        .def_prop_ro("carries_bytes", &RingReader::carries_bytes);
    m.def("open_ring_reader", &open_reader, "address"_a, "nbytes"_a, "reader"_a);
}

}  // namespace weightsync
