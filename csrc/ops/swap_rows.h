// The three sides of a swap, field by field, and the checks that they fit.
#pragma once

#include <vector>

#include "call/arguments.h"

namespace speedtorch {

struct SwapRows {
  Rows host, leaving, arriving;
};

// One entry for each field. Throws ValueError unless lists, shapes, dtypes and devices fit and
// there is room for the rows of both lists.
std::vector<SwapRows> check_swap(const char* op, const Tensors& host, const Tensors& leaving,
                                 const Tensors& arriving, int64_t evicted, int64_t loaded);

}  // namespace speedtorch
