// Creates a stream with one owner. Called by speedtorch/memory/side_stream.py. torch's own streams
// are from a pool of 32, so two users may get the same stream. They would then wait for each other
// and share the memory that torch caches for this stream.

#include <torch/csrc/stable/accelerator.h>

#include "core/cuda_calls.h"
#include "core/registration.h"

namespace speedtorch {
namespace {

// Returns the handle of a new stream of a GPU. The stream is never destroyed.
int64_t make_stream(int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  const RelaxedCapture while_capturing;
  void* stream = nullptr;
  check_cuda(cuda_calls().stream_create(&stream), "make_stream: cudaStreamCreateWithFlags");
  return reinterpret_cast<int64_t>(stream);
}

const Ops kOps{
    {"make_stream(int device) -> int", TORCH_BOX(&make_stream)},
};

}  // namespace
}  // namespace speedtorch
