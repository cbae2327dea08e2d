// Numbers that ops add up rows of.
#pragma once

#include "core/tensor_checks.h"
#include "move/number_kind.h"

namespace speedtorch {

inline NumberKind float_kind_of(const char* op, const char* name, const Tensor& rows) {
  switch (rows.scalar_type()) {
    case ScalarType::Half:
      return NumberKind::kHalf;
    case ScalarType::BFloat16:
      return NumberKind::kBFloat16;
    case ScalarType::Float:
      return NumberKind::kFloat;
    case ScalarType::Double:
      return NumberKind::kDouble;
    default:
      throw_value_error(op, name, " must be float16, bfloat16, float32 or float64, got ",
                        dtype_text(rows));
  }
}

}  // namespace speedtorch
