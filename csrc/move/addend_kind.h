// Kinds of numbers that accumulate adds. No CUDA, no torch here.
#pragma once

#include <cstdint>

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

// A bool of any non-zero byte pattern; adds as "or".
struct BoolByte {
  uint8_t value;
};

// Calls `use` with a value of the kind's type; Half and BFloat16 are the caller's types for those.
template <typename Half, typename BFloat16, typename Use>
void with_addend_type(AddendKind kind, Use use) {
  switch (kind) {
    case AddendKind::kBool:
      return use(BoolByte{});
    case AddendKind::kInt8:
      return use(uint8_t{});
    case AddendKind::kInt16:
      return use(uint16_t{});
    case AddendKind::kInt32:
      return use(uint32_t{});
    case AddendKind::kInt64:
      return use(uint64_t{});
    case AddendKind::kHalf:
      return use(Half{});
    case AddendKind::kBFloat16:
      return use(BFloat16{});
    case AddendKind::kFloat:
      return use(float{});
    case AddendKind::kDouble:
      return use(double{});
  }
}

}  // namespace speedtorch
