// A copy of a few numbers of a GPU to the CPU, for which nothing waits until they are read.
// load_batch waits for one within its call; numbers_to_host hands them to Python by a handle.
//
// Pinned memory and events are kept for later copies: a new pair takes longer than a copy.
#pragma once

#include <cstdint>

#include "core/gpu.h"
#include "core/tensor_checks.h"

namespace speedtorch {

struct HostSlot;

class HostNumbers {
 public:
  // Queues the copy of a contiguous int64 tensor of the stream's GPU. `numbers` may be freed at
  // once: torch gives its memory to work behind this on the same stream.
  HostNumbers(const char* op, const Tensor& numbers, const CurrentStream& stream);
  // Nothing waits here. The memory is used again once its event has passed.
  ~HostNumbers();
  HostNumbers(const HostNumbers&) = delete;
  HostNumbers& operator=(const HostNumbers&) = delete;

  int64_t count() const { return count_; }
  // Whether wait() would return at once. Several threads may ask and wait.
  bool is_complete() const;
  const int64_t* wait(const char* op) const;

 private:
  HostSlot* slot_;
  int64_t count_;
};

}  // namespace speedtorch
