// resident_slots, resident_read_ahead, resident_write and resident_counts: records of a file in
// slots of host memory, by a handle of resident_open. Called by speedtorch/table/resident_rows.py.

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/parallel_for.h"
#include "core/registration.h"
#include "core/sort_positions.h"
#include "memory/resident_rows.h"

namespace speedtorch {
namespace {

constexpr int64_t kFewRows = 4096;  // one thread sorts fewer rows faster than two

struct Opened {
  Opened(int file, const Tensor& slots)
      : memory(slots),
        rows(file, static_cast<char*>(slots.data_ptr()), slots.size(0), slots.size(1)) {}

  Tensor memory;
  ResidentRows rows;
};

struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::unordered_map<int64_t, std::shared_ptr<Opened>> opened;
};

Registry& registry() {
  static auto* all = new Registry;  // never destroyed: threads may use it at exit
  return *all;
}

std::shared_ptr<Opened> opened_by(const char* op, int64_t handle) {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  const auto found = all.opened.find(handle);
  if (found == all.opened.end()) throw_value_error(op, "no open rows have the handle ", handle);
  return found->second;
}

// Returns a handle. `slots` is uint8 [slots, bytes of a record] on the CPU.
int64_t resident_open(const Tensor& slots, int64_t file) {
  constexpr const char* kOp = "resident_open";
  if (!slots.is_cpu() || slots.scalar_type() != ScalarType::Byte || slots.dim() != 2 ||
      slots.numel() == 0) {
    throw_value_error(kOp, "slots must be uint8 [slots, bytes] on the CPU and not empty, got ",
                      dtype_text(slots), " of shape ", shape_text(shape_of(slots)), " on ",
                      device_text(slots));
  }
  check_contiguous(kOp, "slots", slots);
  check_count(kOp, "slots", slots.size(0), (int64_t{1} << 31) - 2);
  const auto made = std::make_shared<Opened>(static_cast<int>(file), slots);
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  all.opened.emplace(++all.last, made);
  return all.last;
}

void resident_close(int64_t handle) {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  all.opened.erase(handle);
}

Tensor failure_of(const char* op, const FileFailure& failure, const Tensor& on) {
  const Tensor made = new_tensor(op, {2}, ScalarType::Long, on);
  data_of(made)[0] = failure.error;
  data_of(made)[1] = failure.row;
  return made;
}

// Finds the slots of two lists: the first `changing` entries of `rows`, which the caller will
// change, and the other entries. Returns the slots of each list in ascending order, the positions
// of their rows in the list, and [errno, row] of a failed file call. Rows keep their slots until
// resident_release. With `only_hits` a row without a slot is the failure EAGAIN.
Tensors resident_slots(int64_t handle, const Tensor& rows, int64_t changing, int64_t lease,
                       bool only_hits) {
  constexpr const char* kOp = "resident_slots";
  const auto found = opened_by(kOp, handle);
  check_list(kOp, "rows", rows, "slots", found->memory);
  check_count(kOp, "changing", changing, rows.numel());
  check_count(kOp, "rows", rows.numel(), found->rows.slot_count());
  const int64_t count = rows.numel();
  const Tensor slots = new_tensor(kOp, {count}, ScalarType::Long, rows);
  const Tensor order = new_tensor(kOp, {count}, ScalarType::Long, rows);
  std::vector<int64_t> by_row(static_cast<size_t>(count));
  FileFailure failure;
  {
    const std::scoped_lock lock(found->rows.mutex());
    failure = found->rows.find(data_of(rows), count, changing, lease, only_hits, by_row.data());
  }
  if (failure.error == 0) {
    parallel_for(0, 2, count < kFewRows ? 2 : 1, [&](int64_t first_list, int64_t end_list) {
      for (int64_t list = first_list; list < end_list; ++list) {
        const int64_t begin = list == 0 ? 0 : changing, end = list == 0 ? changing : count;
        const int64_t* const own = by_row.data() + begin;
        int64_t* const positions = data_of(order) + begin;
        sort_positions(
            end - begin, found->rows.slot_count() - 1, [&](int64_t i) { return own[i]; },
            positions);
        for (int64_t k = 0; k < end - begin; ++k) data_of(slots)[begin + k] = own[positions[k]];
      }
    });
  }
  return {slots, order, failure_of(kOp, failure, rows)};
}

// Begins to read records that have no slot into the page cache, and does not wait. A hint: invalid
// rows and errors are ignored.
void resident_read_ahead(int64_t handle, const Tensor& rows) {
  constexpr const char* kOp = "resident_read_ahead";
  const auto found = opened_by(kOp, handle);
  check_list(kOp, "rows", rows, "slots", found->memory);
  const std::scoped_lock lock(found->rows.mutex());
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
  const std::scoped_lock lock(found->rows.mutex());
  found->rows.release(lease);
}

// Writes changed records of `rows`, or of all rows, to the file. `forgets`: then empties all slots.
// Returns [errno, row] of a file call that failed; no slot is emptied then. Slots of a lease keep
// their rows, which remain marked as changed.
Tensor resident_write(int64_t handle, const std::optional<Tensor>& rows, bool forgets) {
  constexpr const char* kOp = "resident_write";
  const auto found = opened_by(kOp, handle);
  if (rows) check_list(kOp, "rows", *rows, "slots", found->memory);
  const std::scoped_lock lock(found->rows.mutex());
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
  const std::scoped_lock lock(found->rows.mutex());
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
    {"resident_open(Tensor slots, int file) -> int", TORCH_BOX(&resident_open)},
    {"resident_close(int handle) -> ()", TORCH_BOX(&resident_close)},
    {"resident_slots(int handle, Tensor rows, int changing, int lease, bool only_hits=False) -> "
     "Tensor[]",
     TORCH_BOX(&resident_slots)},
    {"resident_read_ahead(int handle, Tensor rows) -> ()", TORCH_BOX(&resident_read_ahead)},
    {"resident_release(int handle, int lease) -> ()", TORCH_BOX(&resident_release)},
    {"resident_write(int handle, Tensor? rows, bool forgets) -> Tensor",
     TORCH_BOX(&resident_write)},
    {"resident_counts(int handle) -> Tensor", TORCH_BOX(&resident_counts)},
};

}  // namespace
}  // namespace speedtorch
