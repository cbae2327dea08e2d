// resident_slots, resident_read_ahead, resident_write and resident_counts: records of a file in
// slots of host memory, by a handle of resident_open. Called by speedtorch/table/resident_rows.py.
// Pending errors of earlier GPU ops are not raised, because they concern no file.

#include <pthread.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/registration.h"
#include "memory/host_memory.h"
#include "memory/resident_rows.h"
#include "ops/launchers.h"

namespace speedtorch {
namespace {

struct Opened {
  Opened(int file, int64_t file_rows, const Tensor& slots, const Tensor& index)
      : memory(slots),
        index(index),
        rows(file, file_rows, static_cast<char*>(slots.data_ptr()),
             static_cast<char*>(index.data_ptr()), slots.size(0), slots.size(1)) {}

  Tensor memory, index;
  ResidentRows rows;
};

struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::unordered_map<int64_t, std::shared_ptr<Opened>> opened;
};

Registry& registry();

void lock_all() {
  registry().mutex.lock();
  for (const auto& [_, each] : registry().opened) each->rows.mutex().lock();
}

void unlock_all() {
  for (const auto& [_, each] : registry().opened) each->rows.mutex().unlock();
  registry().mutex.unlock();
}

// Never destroyed: threads may use it at exit. A fork waits until no thread uses any rows, so that
// the child finds all mutexes unlocked.
Registry& registry() {
  static Registry* const all = [] {
    pthread_atfork(lock_all, unlock_all, unlock_all);
    return new Registry;
  }();
  return *all;
}

std::shared_ptr<Opened> opened_by(const char* op, int64_t handle) {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  const auto found = all.opened.find(handle);
  if (found == all.opened.end()) throw_value_error(op, "no open rows have the handle ", handle);
  return found->second;
}

void check_bytes(const char* op, const char* name, const Tensor& bytes) {
  if (!bytes.is_cpu() || bytes.scalar_type() != ScalarType::Byte || bytes.dim() != 2 ||
      bytes.numel() == 0) {
    throw_value_error(op, name, " must be uint8 [n, bytes] on the CPU and not empty, got ",
                      dtype_text(bytes), " of shape ", shape_text(shape_of(bytes)), " on ",
                      device_text(bytes));
  }
  check_contiguous(op, name, bytes);
}

// Returns a handle. `slots` is uint8 [slots, bytes of a record] on the CPU. `index` is uint8
// [slots + 2, 32] on the CPU.
int64_t resident_open(const Tensor& slots, const Tensor& index, int64_t file, int64_t file_rows) {
  constexpr const char* kOp = "resident_open";
  Arguments(kOp, {written("slots", slots), written("index", index)}, /*throws_pending=*/false)
      .check_memory();
  check_bytes(kOp, "slots", slots);
  check_bytes(kOp, "index", index);
  check_count(kOp, "slots", slots.size(0), (int64_t{1} << 31) - 2);
  check_shape(kOp, "index", index, {slots.size(0) + 2, 32});
  if (reinterpret_cast<uint64_t>(index.data_ptr()) % alignof(Slot) != 0) {
    throw_value_error(kOp, "index must be aligned to ", alignof(Slot), " bytes");
  }
  const auto made = std::make_shared<Opened>(static_cast<int>(file), file_rows, slots, index);
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  all.opened.emplace(++all.last, made);
  return all.last;
}

void check_rows_list(const char* op, const Tensor& rows, const char* on_name, const Tensor& on) {
  Arguments(op, {read("rows", rows)}, /*throws_pending=*/false).check_memory();
  check_list(op, "rows", rows, on_name, on);
}

void check_rows(const char* op, const Opened& opened, const Tensor& rows, int64_t changing) {
  check_count(op, "changing", changing, rows.numel());
  check_count(op, "rows", rows.numel(), opened.rows.slot_count());
}

void resident_close(int64_t handle) {
  Registry& all = registry();
  std::shared_ptr<Opened> closed;  // freed after the lock
  const std::scoped_lock lock(all.mutex);
  if (const auto place = all.opened.find(handle); place != all.opened.end()) {
    closed = std::move(place->second);
    all.opened.erase(place);
  }
}

Tensor failure_of(const char* op, const FileFailure& failure, const Tensor& on) {
  const Tensor made = new_tensor(op, {2}, ScalarType::Long, on);
  data_of(made)[0] = failure.error;
  data_of(made)[1] = failure.row;
  return made;
}

// Returns the slots of rows on the CPU, and [errno, row] of a failed file call. The caller will
// change the first `changing` rows. Rows keep their slots until resident_release.
Tensors resident_slots(int64_t handle, const Tensor& rows, int64_t changing, int64_t lease) {
  constexpr const char* kOp = "resident_slots";
  const auto found = opened_by(kOp, handle);
  check_rows_list(kOp, rows, "slots", found->memory);
  check_rows(kOp, *found, rows, changing);
  const Tensor slots = new_tensor(kOp, {rows.numel()}, ScalarType::Long, rows);
  const auto lock = found->rows.lock();
  wait_for_uses(kOp, found->memory);
  const FileFailure failure =
      found->rows.find(data_of(rows), rows.numel(), changing, lease, data_of(slots));
  return {slots, failure_of(kOp, failure, found->memory)};
}

// Queues a kernel that finds the slots of rows on a GPU, and returns them. They are valid if
// resident_end_find returns true.
Tensor resident_begin_find(int64_t handle, const Tensor& rows, int64_t changing, int64_t lease) {
  constexpr const char* kOp = "resident_begin_find";
  const auto found = opened_by(kOp, handle);
  check_rows_list(kOp, rows, "rows", rows);
  check_rows(kOp, *found, rows, changing);
  if (rows.is_cpu()) {
    throw_value_error(kOp, "rows must be on a GPU. Pass rows on the CPU to resident_slots");
  }
  const Tensor slots = new_tensor(kOp, {rows.numel()}, ScalarType::Long, rows);
  if constexpr (kWithCuda) {
    const CurrentStream stream(kOp, rows);
    stream.check_not_capturing(kOp, "a replay cannot read missing rows from the file");
    const Rows memory = as_rows(kOp, "index", found->index);
    const Access access = gpu_access(kOp, found->index, memory, stream.device());
    if (access == Access::kNot || !can_wait_for_uses(found->index) || rows.numel() == 0) {
      return slots;
    }
    const auto lock = found->rows.lock();
    found->rows.begin_find(
        rows.numel(), lease,
        [&](const ResidentIndex& index) {
          TableUse use{found->index, memory, stream.queue()};
          check_cuda(launch_find_slots(index, data_of(rows), rows.numel(), changing, data_of(slots),
                                       stream.get()),
                     kOp);
          use.note();
        },
        [index = found->index] { wait_for_uses(kOp, index); });
  }
  return slots;
}

// Whether resident_begin_find found slots of all rows for this lease. Waits for its kernel unless
// all rows of the file have slots.
bool resident_end_find(int64_t handle, int64_t lease) {
  const auto found = opened_by("resident_end_find", handle);
  const auto lock = found->rows.lock();
  return found->rows.end_find(lease);
}

// Begins to read records that have no slot into the page cache, and does not wait. A hint: invalid
// rows and errors are ignored.
void resident_read_ahead(int64_t handle, const Tensor& rows) {
  constexpr const char* kOp = "resident_read_ahead";
  const auto found = opened_by(kOp, handle);
  check_rows_list(kOp, rows, "slots", found->memory);
  const auto lock = found->rows.lock();
  found->rows.read_ahead(data_of(rows), rows.numel());
}

// Does nothing without such a handle or lease.
void resident_release(int64_t handle, int64_t lease) {
  std::shared_ptr<Opened> found;
  {
    Registry& all = registry();
    const std::scoped_lock lock(all.mutex);
    if (const auto place = all.opened.find(handle); place != all.opened.end()) {
      found = place->second;
    }
  }
  if (found == nullptr) return;
  const auto lock = found->rows.lock();
  found->rows.release(lease);
}

// Writes changed records of `rows`, or of all rows, to the file. `forgets`: then empties all slots.
// Returns [errno, row] of a file call that failed; no slot is emptied then. Slots of a lease keep
// their rows, which remain marked as changed.
Tensor resident_write(int64_t handle, const std::optional<Tensor>& rows, bool forgets) {
  constexpr const char* kOp = "resident_write";
  const auto found = opened_by(kOp, handle);
  if (rows) check_rows_list(kOp, *rows, "slots", found->memory);
  const auto lock = found->rows.lock();
  wait_for_uses(kOp, found->memory);
  FileFailure failure;
  if (!rows || rows->numel() > 0) {
    failure = found->rows.write(rows ? data_of(*rows) : nullptr, rows ? rows->numel() : 0);
  }
  if (forgets && failure.error == 0) found->rows.forget();
  return failure_of(kOp, failure, found->memory);
}

// Returns the rows in slots, hits, misses, reads, writes, nanoseconds of waits for the file, and
// records read ahead.
Tensor resident_counts(int64_t handle) {
  constexpr const char* kOp = "resident_counts";
  const auto found = opened_by(kOp, handle);
  const auto lock = found->rows.lock();
  found->rows.await_found();
  const Tensor made = new_tensor(kOp, {7}, ScalarType::Long, found->memory);
  const ResidentCounts& counts = found->rows.counts();
  int64_t* const numbers = data_of(made);
  numbers[0] = found->rows.resident();
  numbers[1] = counts.hits;
  numbers[2] = counts.misses;
  numbers[3] = counts.reads;
  numbers[4] = counts.writes;
  numbers[5] = counts.wait_ns;
  numbers[6] = counts.ahead;
  return made;
}

const Ops kOps{
    {"resident_open(Tensor slots, Tensor index, int file, int file_rows) -> int",
     TORCH_BOX(&resident_open)},
    {"resident_close(int handle) -> ()", TORCH_BOX(&resident_close)},
    {"resident_slots(int handle, Tensor rows, int changing, int lease) -> Tensor[]",
     TORCH_BOX(&resident_slots)},
    {"resident_begin_find(int handle, Tensor rows, int changing, int lease) -> Tensor",
     TORCH_BOX(&resident_begin_find)},
    {"resident_end_find(int handle, int lease) -> bool", TORCH_BOX(&resident_end_find)},
    {"resident_read_ahead(int handle, Tensor rows) -> ()", TORCH_BOX(&resident_read_ahead)},
    {"resident_release(int handle, int lease) -> ()", TORCH_BOX(&resident_release)},
    {"resident_write(int handle, Tensor? rows, bool forgets) -> Tensor",
     TORCH_BOX(&resident_write)},
    {"resident_counts(int handle) -> Tensor", TORCH_BOX(&resident_counts)},
};

}  // namespace
}  // namespace speedtorch
