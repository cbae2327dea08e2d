// GPU address ranges whose physical memory can be unmapped and mapped again at the same addresses.
// Torch's pluggable allocator places tensors there: a thread that opened a range gets its segments
// from this range. Called by speedtorch/memory/address_range.py.
//
// A range without segments has no physical memory. The addresses are freed once the owner has
// called leave_range() and torch has freed every segment. Addresses of a freed segment are never
// reused.

#include <pthread.h>

#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>

#include "core/cuda_calls.h"
#include "core/process.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "core/text.h"

namespace speedtorch {
namespace {

struct Range {
  char* base;
  int device;
  size_t reserved;
  size_t used = 0;      // bytes up to the end of the last segment
  size_t segments = 0;  // bytes of segments that torch has not freed
  bool is_mapped = false;
  unsigned long long memory = 0;  // handle of the memory mapped at [base, base + used)
  bool has_owner = true;
  pid_t maker = process_id();
};

struct Ranges {
  std::mutex mutex;
  std::map<const char*, Range> all;  // by base
};

// Never destroyed, because torch may free segments after static destructors ran. A fork waits until
// no thread holds the mutex, so that the child finds the mutex unlocked.
Ranges& ranges() {
  static Ranges* const instance = [] {
    const auto unlock = [] { ranges().mutex.unlock(); };
    pthread_atfork([] { ranges().mutex.lock(); }, unlock, unlock);
    return new Ranges;
  }();
  return *instance;
}

// Rounds up, because CUDA maps whole pages.
size_t whole_pages(size_t bytes) {
  return (bytes + kAddressGranularity - 1) / kAddressGranularity * kAddressGranularity;
}

// The range that this thread opened, or null.
thread_local char* open_base = nullptr;

char* base_of(int64_t base) { return reinterpret_cast<char*>(base); }

Range& find(Ranges& ranges, int64_t base) {
  const auto found = ranges.all.find(base_of(base));
  if (found == ranges.all.end())
    throw_value_error("address range", "no range begins at address ", base);
  return found->second;
}

// Unmaps the physical memory, if any. Returns a cudaError_t.
int unmap(Range& range) {
  const bool has_memory = range.is_mapped && range.used > 0;
  const int error =
      has_memory ? cuda_calls().unmap_memory(range.base, range.used, range.memory) : 0;
  if (error == 0) range.is_mapped = false;
  return error;
}

// Waits for all work queued on the GPU.
void wait_for_gpu(int device) {
  int current = 0;
  succeeded(cuda_calls().get_device(&current));
  if (current != device) succeeded(cuda_calls().set_device(device));
  succeeded(cuda_calls().device_synchronize());
  if (current != device) succeeded(cuda_calls().set_device(current));
}

// Unmaps the memory of a range without segments. Without an owner, also frees the addresses.
// Ignores errors, because no caller could handle them.
void release_if_empty(Ranges& ranges, const char* base) noexcept {
  const auto found = ranges.all.find(base);
  if (found == ranges.all.end() || found->second.segments > 0) return;
  Range& range = found->second;
  if (!process_exits() && range.maker == process_id()) {
    const RelaxedCapture while_capturing;
    // Unlike cudaFree, cuMemUnmap does not wait for kernels that use memory freed by torch.
    if (range.is_mapped && range.used > 0) wait_for_gpu(range.device);
    succeeded(unmap(range));
    if (!range.has_owner) succeeded(cuda_calls().free_addresses(range.base, range.reserved));
  }
  if (!range.has_owner) ranges.all.erase(found);
}

// Reserves a range of at least `bytes` and returns its address. No memory is mapped yet.
int64_t reserve_range(int64_t bytes, int64_t device) {
  if (bytes < 1 || bytes > std::numeric_limits<int64_t>::max() - int64_t{kAddressGranularity}) {
    throw_value_error("address range", "bytes must be positive, got ", bytes);
  }
  const size_t reserved = whole_pages(static_cast<size_t>(bytes));
  watch_process_exit();
  void* base = nullptr;
  {
    const RelaxedCapture while_capturing;
    check_cuda(cuda_calls().reserve_addresses(&base, reserved),
               "address range: cuMemAddressReserve");
  }
  const std::lock_guard lock(ranges().mutex);
  auto* const first = static_cast<char*>(base);
  ranges().all.emplace(first, Range{first, static_cast<int>(device), reserved});
  return reinterpret_cast<int64_t>(base);
}

// Torch's allocator serves this thread's next segments of the pool from this range. 0: no range.
void open_range(int64_t base) {
  if (base != 0) {
    const std::lock_guard lock(ranges().mutex);
    find(ranges(), base);
  }
  open_base = base_of(base);
}

// Maps memory for all segments, or does nothing if the range is mapped. A mapped range accepts no
// further segments. A failure maps nothing.
void map_range(int64_t base) {
  const std::lock_guard lock(ranges().mutex);
  Range& range = find(ranges(), base);
  if (range.is_mapped) return;
  const RelaxedCapture while_capturing;
  const int error = range.used == 0 ? 0
                                    : cuda_calls().map_memory(range.base, range.used, range.device,
                                                              &range.memory);
  if (error == kNoMemory && !succeeded(error)) {
    throw std::runtime_error(text("address range: out of memory: GPU ", range.device,
                                  " has fewer than ", range.used, " free bytes"));
  }
  check_cuda(error, "address range: cuMemMap");
  range.is_mapped = true;
}

// Unmaps the memory. The caller must have waited for all GPU work that uses the range.
void unmap_range(int64_t base) {
  const std::lock_guard lock(ranges().mutex);
  const RelaxedCapture while_capturing;
  check_cuda(unmap(find(ranges(), base)), "address range: cuMemUnmap");
}

// Bytes of the segments that torch has not freed.
int64_t range_bytes(int64_t base) {
  const std::lock_guard lock(ranges().mutex);
  return static_cast<int64_t>(find(ranges(), base).segments);
}

// Ends the ownership; the range is freed with its last segment.
void leave_range(int64_t base) {
  const std::lock_guard lock(ranges().mutex);
  find(ranges(), base).has_owner = false;
  release_if_empty(ranges(), base_of(base));
}

const Ops kOps{
    {"reserve_range(int bytes, int device) -> int", TORCH_BOX(&reserve_range)},
    {"open_range(int base) -> ()", TORCH_BOX(&open_range)},
    {"map_range(int base) -> ()", TORCH_BOX(&map_range)},
    {"unmap_range(int base) -> ()", TORCH_BOX(&unmap_range)},
    {"range_bytes(int base) -> int", TORCH_BOX(&range_bytes)},
    {"leave_range(int base) -> ()", TORCH_BOX(&leave_range)},
};

}  // namespace
}  // namespace speedtorch

// The functions that torch.cuda.memory.CUDAPluggableAllocator calls. Torch's allocator is locked
// during the call, so these functions must not call torch. A null pointer means out of memory.
extern "C" __attribute__((visibility("default"))) void* speedtorch_range_allocate(size_t bytes, int,
                                                                                  void*) {
  using namespace speedtorch;
  const std::lock_guard lock(ranges().mutex);
  const auto found = ranges().all.find(open_base);
  if (found == ranges().all.end()) return nullptr;
  Range& range = found->second;
  const size_t taken = whole_pages(bytes);
  if (range.is_mapped || taken > range.reserved - range.used) return nullptr;
  char* const segment = range.base + range.used;
  range.used += taken;
  range.segments += taken;
  return segment;
}

extern "C" __attribute__((visibility("default"))) void speedtorch_range_free(void* segment,
                                                                             size_t bytes, int,
                                                                             void*) {
  using namespace speedtorch;
  const std::lock_guard lock(ranges().mutex);
  const auto* const at = static_cast<const char*>(segment);
  auto after = ranges().all.upper_bound(at);
  if (after == ranges().all.begin()) return;
  Range& range = std::prev(after)->second;
  if (at >= range.base + range.used) return;
  range.segments -= whole_pages(bytes);
  release_if_empty(ranges(), range.base);
}
