// Pinned buffers and their events; see host_numbers.h.

#include "call/host_numbers.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "core/process.h"

namespace speedtorch {

// Pinned memory of `capacity` numbers, and the event behind its last copy.
struct PinnedBuffer {
  int device;
  size_t capacity;
  int64_t* memory = nullptr;
  void* event = nullptr;
  std::atomic<bool> is_complete{true};  // whether the event is known to be complete
  PinnedBuffer* next = nullptr;         // in the list of free buffers
};

namespace {

constexpr size_t kMinNumbers = 16;  // capacity of the smallest buffer

// The free buffers of all GPUs, a list to which a destructor adds without an allocation. Never
// destroyed, because events and pinned memory cannot be freed during process exit.
struct FreeBuffers {
  std::mutex mutex;
  PinnedBuffer* first = nullptr;
};

FreeBuffers& free_buffers() {
  static auto* all = new FreeBuffers;
  return *all;
}

// A GPU error is reported to the thread that waits.
bool is_copied(PinnedBuffer& buffer) {
  if (buffer.is_complete) return true;
  const RelaxedCapture while_capturing;
  if (!succeeded(cuda_calls().event_query(buffer.event))) return false;
  buffer.is_complete = true;
  return true;
}

#ifdef SPEEDTORCH_CUDA

PinnedBuffer* new_buffer(const char* op, int device, size_t capacity) {
  const RelaxedCapture while_capturing;
  auto made = std::make_unique<PinnedBuffer>(device, capacity);
  void* memory = nullptr;
  check_cuda(cuda_calls().host_alloc(&memory, capacity * sizeof(int64_t)), op);
  made->memory = static_cast<int64_t*>(memory);
  const int error = cuda_calls().event_create(&made->event);
  if (error != 0) {
    succeeded(cuda_calls().host_free(memory));
    check_cuda(error, op);
  }
  return made.release();
}

// Returns a buffer that no copy writes to.
PinnedBuffer* acquire_buffer(const char* op, int device, size_t count) {
  const size_t capacity = std::bit_ceil(std::max(count, kMinNumbers));
  {
    FreeBuffers& free = free_buffers();
    const std::scoped_lock lock(free.mutex);
    for (PinnedBuffer** link = &free.first; *link != nullptr; link = &(*link)->next) {
      PinnedBuffer* const buffer = *link;
      if (buffer->device != device || buffer->capacity != capacity || !is_copied(*buffer)) continue;
      *link = buffer->next;
      return buffer;
    }
  }
  return new_buffer(op, device, capacity);
}

#endif

void release_buffer(PinnedBuffer* buffer) {
  FreeBuffers& free = free_buffers();
  const std::scoped_lock lock(free.mutex);
  buffer->next = free.first;
  free.first = buffer;
}

using Copy = std::shared_ptr<const HostNumbers>;

struct Copies {
  const pid_t owner = process_id();
  std::mutex mutex;
  std::unordered_map<int64_t, Copy> by_handle;
};

Copies& copies() {
  static auto* all = new Copies;  // never destroyed, like the pinned buffers
  return *all;
}

}  // namespace

#ifdef SPEEDTORCH_CUDA

HostNumbers::HostNumbers(const char* op, const Tensor& numbers, const CurrentStream& stream)
    : buffer_(acquire_buffer(op, stream.device(), static_cast<size_t>(numbers.numel()))),
      count_(numbers.numel()) {
  const auto bytes = static_cast<size_t>(count_) * sizeof(int64_t);
  const int copied = bytes == 0 ? 0
                                : cuda_calls().copy_to_host(buffer_->memory, numbers.data_ptr(),
                                                            bytes, stream.get());
  if (copied != 0) {
    release_buffer(buffer_);
    check_cuda(copied, op);
  }
  buffer_->is_complete = false;
  // If recording fails, the buffer is never reused, because its copy has no event.
  check_cuda(cuda_calls().event_record(buffer_->event, stream.get()), op);
}

#endif

HostNumbers::~HostNumbers() { release_buffer(buffer_); }

bool HostNumbers::is_complete() const { return is_copied(*buffer_); }

const int64_t* HostNumbers::wait(const char* op) const {
  if (!buffer_->is_complete) {
    const RelaxedCapture while_capturing;
    check_cuda(cuda_calls().event_synchronize(buffer_->event), op);
    buffer_->is_complete = true;
  }
  return buffer_->memory;
}

int64_t new_handle() {
  static std::atomic<int64_t> next{0};
  return next++;
}

void queue_numbers(const char* op, const Tensor& numbers, int64_t handle) {
  const CurrentStream stream(op, numbers);
  stream.check_not_capturing(op, "the CPU reads the numbers of one call, not of each replay");
  auto made = std::make_shared<const HostNumbers>(op, numbers, stream);
  Copies& started = copies();
  const std::scoped_lock lock(started.mutex);
  if (!started.by_handle.emplace(handle, std::move(made)).second) {
    throw_value_error(op, "handle ", handle, " already names another copy");
  }
}

Copy numbers_of(const char* op, int64_t handle) {
  Copies& all = copies();
  if (all.owner != process_id()) {
    throw std::runtime_error(
        text(op, ": a forked child cannot read copies of the process that forked it"));
  }
  const std::scoped_lock lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  if (found == all.by_handle.end()) throw_value_error(op, "no copy was queued under this handle");
  return found->second;
}

void drop_numbers(int64_t handle) {
  Copy dropped;  // freed after the lock
  Copies& all = copies();
  if (all.owner != process_id()) return;
  const std::scoped_lock lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  if (found == all.by_handle.end()) return;
  dropped = std::move(found->second);
  all.by_handle.erase(found);
}

}  // namespace speedtorch
