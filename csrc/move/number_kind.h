// The kinds of numbers that kernels and CPU loops add. Includes no CUDA or torch header.
#pragma once

#include <cstdint>
#include <type_traits>

namespace speedtorch {

enum class NumberKind : int {
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

// A bool in a byte, which is true for any non-zero value; addition is "or".
struct BoolByte {
  uint8_t value;
};

// Rounds to the type at each addition, as np.add.at does.
template <typename T>
constexpr T plus(T a, T b) {
  return static_cast<T>(a + b);
}
constexpr BoolByte plus(BoolByte a, BoolByte b) {
  return {static_cast<uint8_t>(a.value | b.value)};
}

// The type of a sum: half precision is summed in single precision and rounded once.
template <typename Number>
using SumOf = std::conditional_t<std::is_same_v<Number, double>, double, float>;

// Calls `use` with a value of the kind's type; the caller supplies its types for Half and BFloat16.
template <typename Half, typename BFloat16, typename Use>
auto with_float_type(NumberKind kind, const Use& use) {
  switch (kind) {
    case NumberKind::kHalf:
      return use(Half{});
    case NumberKind::kBFloat16:
      return use(BFloat16{});
    case NumberKind::kFloat:
      return use(float{});
    default:
      return use(double{});
  }
}

template <typename Half, typename BFloat16, typename Use>
void with_number_type(NumberKind kind, const Use& use) {
  switch (kind) {
    case NumberKind::kBool:
      return use(BoolByte{});
    case NumberKind::kInt8:
      return use(uint8_t{});
    case NumberKind::kInt16:
      return use(uint16_t{});
    case NumberKind::kInt32:
      return use(uint32_t{});
    case NumberKind::kInt64:
      return use(uint64_t{});
    default:
      return with_float_type<Half, BFloat16>(kind, use);
  }
}

}  // namespace speedtorch
