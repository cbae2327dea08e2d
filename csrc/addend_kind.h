// Kinds of numbers that accumulate adds. No CUDA, no torch here.
#pragma once

namespace speedtorch {

enum class AddendKind : int {
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kHalf,
  kBFloat16,
  kFloat,
  kDouble
};

}  // namespace speedtorch
