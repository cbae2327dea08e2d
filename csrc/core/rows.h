// Rows of bytes, as kernels and CPU loops see them. No torch here.
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
  // One past the last byte that any row reaches.
  const char* end() const {
    return count == 0 ? base : base + (count - 1) * stride_bytes + row_bytes;
  }
  // The address and the stride, or'ed together: what both are multiples of.
  uint64_t bits() const {
    return reinterpret_cast<uint64_t>(base) | static_cast<uint64_t>(stride_bytes);
  }
};

}  // namespace speedtorch
