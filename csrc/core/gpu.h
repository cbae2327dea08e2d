// The current stream, and the record of bad ids. An op on rows or ids of a GPU runs on the current
// stream and first throws the error in the record, if any. Checking ids on the GPU needs no
// synchronization: an op with a bad id writes to the record and moves nothing (exchange_rows: moves
// no row of a bad entry).
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

// The current torch stream of the device of `tensor`. The device is current during the lifetime of
// this object.
class CurrentStream {
 public:
#ifdef SPEEDTORCH_CUDA
  CurrentStream(const char* op, const Tensor& tensor);
#else  // always throws, so that code after it is not compiled
  [[noreturn]] CurrentStream(const char* op, const Tensor& tensor);
#endif
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

  void* get() const { return stream_; }
  int device() const { return device_; }
  Stream queue() const { return {stream_, device_}; }
  // Whether this GPU has Hopper's bulk copies, and its number of multiprocessors. Both are cached
  // per GPU.
  bool has_bulk_copies() const;
  int multiprocessors() const;
  // Throws while this stream captures a CUDA graph. `why` names the unsupported step or the remedy.
  void check_not_capturing(const char* op, const std::string& why) const;
  // Throws while this stream captures a CUDA graph, with the reason that `what` is in pageable
  // memory, which only the CPU can access. `name` is the argument in the remedy.
  void check_pageable_not_captured(const char* op, const std::string& what, const char* name) const;

 private:
  void* stream_ = nullptr;
  int device_ = 0;
  // torch's guard, because a plain CUDA call would create a context on an unused GPU.
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// Does the same as CurrentStream::check_not_capturing for the current device. Works without a GPU.
void check_not_capturing(const char* op, const std::string& why);

// Returns the error record of a GPU. The first call allocates the records of all GPUs. They do not
// share one, because a GPU's atomics on host memory are atomic only among its own threads.
ErrorRecord* error_record(int device);
// If a kernel has written an error record, marks the record as read and throws its error.
void throw_pending();

}  // namespace speedtorch
