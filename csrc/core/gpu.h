// What an op needs of the GPU besides its kernels: the current stream, and the letter box in which
// kernels leave word of bad ids. Checking ids on the GPU costs no synchronisation this way: the op
// that has a bad id moves nothing, and a later call reads the letter and throws.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "core/cuda_calls.h"
#include "core/letter.h"
#include "core/rows.h"

namespace speedtorch {

// The stream that torch has made current on the device of `tensor`; that device is current while
// this lives.
class CurrentStream {
 public:
  CurrentStream(const char* op, const Tensor& tensor);
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

  void* get() const { return stream_; }
  // Whether this GPU has Hopper's bulk copies.
  bool has_bulk_copies() const;
  // Throws while this stream captures a CUDA graph; `why` says what cannot be done then, or the
  // remedy.
  void refuse_capture(const char* op, const char* why) const;

 private:
  void* stream_ = nullptr;
  int device_ = 0;
  // torch's own: one of CUDA's calls would open a context on a GPU that nobody uses.
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// As CurrentStream::refuse_capture, for the current device and without needing one.
void refuse_during_capture(const char* op, const char* why);

// The letter box of this process, mapped into every GPU; made at the first call.
Letter* letter_box();
// If a kernel has left word of bad ids: empties the letter box and throws IndexError.
void throw_pending();

}  // namespace speedtorch
