#pragma once

#include <nanobind/nanobind.h>

namespace weightsync {

// Adds RingWriter, RingReader and ring_bytes to the module.
void bind_ring(nanobind::module_& m);

}  // namespace weightsync
