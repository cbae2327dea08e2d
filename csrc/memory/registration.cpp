// Pinning in pieces; see registration.h.

#include "memory/registration.h"

#include <algorithm>

#include "core/cuda_calls.h"
#include "memory/host_pages.h"

namespace speedtorch {
namespace {

// One registration of 512 GiB or more fails on recent drivers, so memory is registered in pieces of
// at most this.
constexpr int64_t kBytesPerRegistration = int64_t{64} << 30;

}  // namespace

void unregister_pieces(char* base, int64_t bytes) noexcept {
  for (int64_t start = 0; start < bytes; start += kBytesPerRegistration) {
    if (cuda_calls().host_unregister(base + start) != 0) cuda_calls().last_error();
  }
}

int register_pieces(char* base, int64_t bytes, bool read_only) {
  for (int64_t start = 0; start < bytes; start += kBytesPerRegistration) {
    const int64_t piece = std::min(kBytesPerRegistration, bytes - start);
    const int error = cuda_calls().host_register(base + start, piece, read_only);
    if (error != 0) {
      cuda_calls().last_error();
      unregister_pieces(base, start);
      return error;
    }
  }
  return 0;
}

std::string registration_failure(int64_t bytes, int error) {
  if (is_without_gpu(error)) return std::string("host memory: pinning needs a GPU") + kWithoutGpu;
  return "host memory: pinning " + std::to_string(bytes) +
         " bytes with cudaHostRegister failed: " + cuda_calls().error_string(error) +
         " (CUDA error " + std::to_string(error) +
         "). Bytes available on this machine: " + std::to_string(available_bytes()) +
         ". Not possible: writable shared mappings of disk files, and memory that is registered "
         "already. Remedy: load "
         "the data into speedtorch.memory.empty(...), free host memory, or use memory='plain'";
}

}  // namespace speedtorch
