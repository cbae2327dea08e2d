// An asynchronous copy of a few numbers from a GPU to the CPU; only a reader waits. load_batch
// waits within its call. numbers_to_host and plan_parts pass the numbers to Python by a handle.
//
// Pinned memory and events are kept for later copies, because a new pair takes longer than a copy.
#pragma once

#include <cstdint>
#include <memory>

#include "core/gpu.h"
#include "core/tensor_checks.h"

namespace speedtorch {

struct PinnedBuffer;

class HostNumbers {
 public:
  // Queues the copy of a contiguous int64 tensor on the stream's GPU. The caller may free `numbers`
  // at once: torch reuses its memory only for later work on the same stream.
  HostNumbers(const char* op, const Tensor& numbers, const CurrentStream& stream);
  // Does not wait. The pinned memory is reused after its event has completed.
  ~HostNumbers();
  HostNumbers(const HostNumbers&) = delete;
  HostNumbers& operator=(const HostNumbers&) = delete;

  int64_t count() const { return count_; }
  // Whether wait() would return at once. Several threads may call both.
  bool is_complete() const;
  const int64_t* wait(const char* op) const;

 private:
  PinnedBuffer* buffer_;
  int64_t count_;
};

// Copies that Python reads by handles; see python/numbers_handle.cpp.

// Returns a handle that names no copy yet.
int64_t new_handle();
// Queues a copy under a handle, so that the owner of the handle drops the copy even if the caller
// fails afterwards. Throws while a CUDA graph is captured.
void queue_numbers(const char* op, const Tensor& numbers, int64_t handle);
// Returns the copy, which a thread may read even if another thread drops the handle. Throws
// std::invalid_argument if the handle names no copy, and std::runtime_error in a forked child.
std::shared_ptr<const HostNumbers> numbers_of(const char* op, int64_t handle);
// Drops the handle's copy, if there is one. Does nothing in a forked child, because another thread
// of the parent may have held the mutex.
void drop_numbers(int64_t handle);

}  // namespace speedtorch
