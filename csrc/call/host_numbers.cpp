// Slots of pinned memory and their events; see host_numbers.h.

#include "call/host_numbers.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <mutex>
#include <vector>

namespace speedtorch {

// Pinned memory of `capacity` numbers, and the event behind its last copy.
struct HostSlot {
  int device;
  size_t capacity;
  int64_t* memory = nullptr;
  void* event = nullptr;
  std::atomic<bool> is_complete{true};  // whether the event is known to be complete
};

namespace {

constexpr size_t kFewNumbers = 16;  // capacity of the smallest slot

// The free slots of all GPUs. Never destroyed, because events and pinned memory cannot be freed
// during process exit.
struct FreeSlots {
  std::mutex mutex;
  std::vector<HostSlot*> slots;
};

FreeSlots& free_slots() {
  static auto* all = new FreeSlots;
  return *all;
}

// A GPU error is reported to the thread that waits.
bool has_passed(HostSlot& slot) {
  if (slot.is_complete) return true;
  const RelaxedCapture while_capturing;
  if (!succeeded(cuda_calls().event_query(slot.event))) return false;
  slot.is_complete = true;
  return true;
}

#ifdef SPEEDTORCH_CUDA

HostSlot* new_slot(const char* op, int device, size_t capacity) {
  const RelaxedCapture while_capturing;
  auto made = std::make_unique<HostSlot>(device, capacity);
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

// Returns a slot that no copy writes to.
HostSlot* take_slot(const char* op, int device, size_t count) {
  const size_t capacity = std::bit_ceil(std::max(count, kFewNumbers));
  {
    FreeSlots& free = free_slots();
    const std::scoped_lock lock(free.mutex);
    for (HostSlot*& slot : free.slots) {
      if (slot->device != device || slot->capacity != capacity || !has_passed(*slot)) continue;
      HostSlot* const taken = slot;
      slot = free.slots.back();
      free.slots.pop_back();
      return taken;
    }
  }
  return new_slot(op, device, capacity);
}

#endif

void give_back(HostSlot* slot) {
  FreeSlots& free = free_slots();
  const std::scoped_lock lock(free.mutex);
  free.slots.push_back(slot);
}

}  // namespace

#ifdef SPEEDTORCH_CUDA

HostNumbers::HostNumbers(const char* op, const Tensor& numbers, const CurrentStream& stream)
    : slot_(take_slot(op, stream.device(), static_cast<size_t>(numbers.numel()))),
      count_(numbers.numel()) {
  const auto bytes = static_cast<size_t>(count_) * sizeof(int64_t);
  const int copied = bytes == 0 ? 0
                                : cuda_calls().copy_to_host(slot_->memory, numbers.data_ptr(),
                                                            bytes, stream.get());
  if (copied != 0) {
    give_back(slot_);
    check_cuda(copied, op);
  }
  slot_->is_complete = false;
  // If recording fails, the slot is never reused, because its copy has no event.
  check_cuda(cuda_calls().event_record(slot_->event, stream.get()), op);
}

#endif

HostNumbers::~HostNumbers() { give_back(slot_); }

bool HostNumbers::is_complete() const { return has_passed(*slot_); }

const int64_t* HostNumbers::wait(const char* op) const {
  if (!slot_->is_complete) {
    const RelaxedCapture while_capturing;
    check_cuda(cuda_calls().event_synchronize(slot_->event), op);
    slot_->is_complete = true;
  }
  return slot_->memory;
}

}  // namespace speedtorch
