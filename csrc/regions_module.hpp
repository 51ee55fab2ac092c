// The Python side of regions.
#pragma once

#include <nanobind/nanobind.h>

namespace weightsync {

void bind_regions(nanobind::module_& m);

}  // namespace weightsync
