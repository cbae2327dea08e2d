// Rows of bytes: the view of a table or batch that kernels and CPU loops work on. This header
// includes no torch header.
#pragma once

#include <cstdint>

namespace speedtorch {

// Row r starts at base + r * stride_bytes and has row_bytes bytes.
struct Rows {
  char* base = nullptr;
  int64_t count = 0;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;

  char* row(int64_t r) const { return base + r * stride_bytes; }
  // The end of the last row.
  const char* end() const {
    return count == 0 ? base : base + (count - 1) * stride_bytes + row_bytes;
  }
  // The bitwise OR of address and stride: a power of two that divides this divides both.
  uint64_t bits() const {
    return reinterpret_cast<uint64_t>(base) | static_cast<uint64_t>(stride_bytes);
  }
};

}  // namespace speedtorch
