// What an op needs of the GPU besides its kernels: the current stream, and the record in which
// kernels leave word of bad ids. Checking ids on the GPU costs no synchronisation this way: the op
// that has a bad id moves nothing, and a later call reads the record and throws.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <string>

#include "core/cuda_calls.h"
#include "core/error_record.h"
#include "core/tensor_checks.h"

namespace speedtorch {

// A stream of a GPU. The default streams of all GPUs have the same handle.
struct Stream {
  void* handle;
  int device;
};

// The stream that torch has made current on the device of `tensor`; that device is current while
// this lives.
class CurrentStream {
 public:
#ifdef SPEEDTORCH_CUDA
  CurrentStream(const char* op, const Tensor& tensor);
#else  // throws, so that no code behind a stream is compiled
  [[noreturn]] CurrentStream(const char* op, const Tensor& tensor);
#endif
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

  void* get() const { return stream_; }
  int device() const { return device_; }
  Stream queue() const { return {stream_, device_}; }
  // Whether this GPU has Hopper's bulk copies, and how many multiprocessors; asked for once per
  // GPU.
  bool has_bulk_copies() const;
  int multiprocessors() const;
  // Throws while this stream captures a CUDA graph; `why` says what cannot be done then, or the
  // remedy.
  void refuse_capture(const char* op, const std::string& why) const;
  // The same for a way through the host, which `what` (an argument `name`) needs in pageable
  // memory.
  void refuse_capture_of_pageable(const char* op, const std::string& what, const char* name) const;

 private:
  void* stream_ = nullptr;
  int device_ = 0;
  // torch's own: one of CUDA's calls would open a context on a GPU that is not used.
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// As CurrentStream::refuse_capture, for the current device and without needing one.
void refuse_during_capture(const char* op, const std::string& why);

// The error record of a GPU; all are made at the first call. One for each GPU: kernels claim it by
// an atomic, which in host memory is one among the threads of a GPU alone.
ErrorRecord* error_record(int device);
// If a kernel has left word of bad ids: takes it out of the error record and throws IndexError.
void throw_pending();

}  // namespace speedtorch
