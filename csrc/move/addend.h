// The element types that accumulate can add, and their addition on the CPU. No CUDA here.
#pragma once

#include <cstdint>
#include <string>

#include "core/rows.h"
#include "move/addend_kind.h"

namespace speedtorch {

// How to add elements of the tensor's dtype. Signed and unsigned integers of one width add alike,
// modulo 2^bits; a complex number adds as two. Throws ValueError for dtypes without addition
// (float8 and the like).
inline AddendKind addend_of(const char* op, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Bool:
      return AddendKind::kBool;
    case ScalarType::Char:
    case ScalarType::Byte:
      return AddendKind::kInt8;
    case ScalarType::Short:
    case ScalarType::UInt16:
      return AddendKind::kInt16;
    case ScalarType::Int:
    case ScalarType::UInt32:
      return AddendKind::kInt32;
    case ScalarType::Long:
    case ScalarType::UInt64:
      return AddendKind::kInt64;
    case ScalarType::Half:
    case ScalarType::ComplexHalf:
      return AddendKind::kHalf;
    case ScalarType::BFloat16:
      return AddendKind::kBFloat16;
    case ScalarType::Float:
    case ScalarType::ComplexFloat:
      return AddendKind::kFloat;
    case ScalarType::Double:
    case ScalarType::ComplexDouble:
      return AddendKind::kDouble;
    default:
      throw_value_error(op, std::string("accumulate=True needs a dtype that has addition, got ") +
                                dtype_text(tensor) +
                                "; add in a wider dtype, or use accumulate=False");
  }
}

// Rounded to the type at each addition, as np.add.at rounds.
template <typename T>
T add(T a, T b) {
  return static_cast<T>(a + b);
}
inline BoolByte add(BoolByte a, BoolByte b) { return {static_cast<uint8_t>(a.value | b.value)}; }

}  // namespace speedtorch
