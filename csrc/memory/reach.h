// How a GPU reaches a table. No torch here.
#pragma once

#include <cstdint>

namespace speedtorch {

// Values are part of the contract with speedtorch/memory/cost_model.py. Memory that is mapped but
// not managed has small pages.
enum class Reach : int64_t { kManaged = 0, kMapped = 1, kOnGpu = 2, kNot = 3 };

}  // namespace speedtorch
