// numbers_to_host: queues a copy of a few numbers from a GPU to the CPU under a handle that the
// caller chose. read_numbers, numbers_have_come and drop_numbers take this handle. Called by
// speedtorch/plan/host_copy.py.

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "call/arguments.h"
#include "call/host_numbers.h"
#include "core/gpu.h"
#include "core/process.h"
#include "core/registration.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "numbers_to_host";
constexpr const char* kRead = "read_numbers";

using Copy = std::shared_ptr<const HostNumbers>;  // a thread may wait for a dropped copy

struct Copies {
  const pid_t owner = process_id();
  std::mutex mutex;
  std::unordered_map<int64_t, Copy> by_handle;
};

Copies& copies() {
  static auto* all = new Copies;  // never destroyed, like the pinned buffers
  return *all;
}

Copy copy_of(const char* op, int64_t handle) {
  Copies& all = copies();
  const std::scoped_lock lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  if (found == all.by_handle.end()) {
    throw_value_error(op, "handle ", handle, " names no copy. Start a copy with numbers_to_host");
  }
  return found->second;
}

// The caller chooses the handle, so that it can drop the copy even if this call fails.
void numbers_to_host(const Tensor& numbers, int64_t handle) {
  const Arguments all(kOp, {read("numbers", numbers)});
  check_contiguous(kOp, "numbers", numbers);
  if (numbers.scalar_type() != ScalarType::Long || numbers.is_cpu()) {
    throw_value_error(kOp, "numbers must be int64 on a GPU, got ", dtype_text(numbers), " on ",
                      device_text(numbers));
  }
  const CurrentStream stream(kOp, numbers);
  auto made = std::make_shared<const HostNumbers>(kOp, numbers, stream);
  Copies& started = copies();
  const std::scoped_lock lock(started.mutex);
  if (!started.by_handle.emplace(handle, std::move(made)).second) {
    throw_value_error(kOp, "handle ", handle, " already names another copy");
  }
}

std::vector<int64_t> read_numbers(int64_t handle) {
  const Copy copy = copy_of(kRead, handle);
  const int64_t* const numbers = copy->wait(kRead);
  return {numbers, numbers + copy->count()};
}

bool numbers_have_come(int64_t handle) {
  return copy_of("numbers_have_come", handle)->is_complete();
}

// Does nothing without such a copy. Does nothing in a forked child either, because another thread
// of the parent may have held the mutex.
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

// For speedtorch/plan/host_copy.py.
const Ops kOps{
    {"numbers_to_host(Tensor numbers, int handle) -> ()", TORCH_BOX(&numbers_to_host)},
    {"read_numbers(int handle) -> int[]", TORCH_BOX(&read_numbers)},
    {"numbers_have_come(int handle) -> bool", TORCH_BOX(&numbers_have_come)},
    {"drop_numbers(int handle) -> ()", TORCH_BOX(&drop_numbers)},
};

}  // namespace
}  // namespace speedtorch
