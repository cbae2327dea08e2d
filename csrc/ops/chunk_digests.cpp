// chunk_digests: the CRC-32C of each chunk of bytes on the CPU, computed on the calling thread
// without the GIL. Called by threads of speedtorch/files/file_digests.py and field_blocks.py. Does
// not raise pending errors of earlier GPU ops, because they concern no file.

#include <algorithm>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/checksum.h"
#include "core/registration.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "chunk_digests";

// Returns int64 `[chunks]`; the last chunk may be shorter. `by_tables`: compute as on a CPU without
// CRC instructions.
Tensor chunk_digests(const Tensor& data, int64_t chunk_bytes, bool by_tables) {
  Arguments(kOp, {read("data", data)}, /*throws_pending=*/false).check_memory();
  if (!data.is_cpu() || data.scalar_type() != ScalarType::Byte || data.dim() != 1) {
    throw_value_error(kOp, "data must be uint8 of one dimension on the CPU, got ", dtype_text(data),
                      " of shape ", shape_text(shape_of(data)), " on ", device_text(data));
  }
  check_contiguous(kOp, "data", data);
  if (chunk_bytes < 1) throw_value_error(kOp, "chunk_bytes must be at least 1, got ", chunk_bytes);
  const int64_t count = data.numel(), chunks = count / chunk_bytes + (count % chunk_bytes != 0);
  const Tensor digests = new_tensor(kOp, {chunks}, ScalarType::Long, data);
  const auto* const bytes = static_cast<const uint8_t*>(data.data_ptr());
  int64_t* const found = data_of(digests);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = chunk * chunk_bytes, size = std::min(chunk_bytes, count - begin);
    found[chunk] = by_tables ? crc32c_by_tables(bytes + begin, size) : crc32c(bytes + begin, size);
  }
  return digests;
}

const Ops kOps{
    {"chunk_digests(Tensor data, int chunk_bytes, bool by_tables=False) -> Tensor",
     TORCH_BOX(&chunk_digests)},
};

}  // namespace
}  // namespace speedtorch
