// append_ids: finds ids in a list by a hash table, and appends those that the list lacks. CPU only.
// Called by speedtorch/step/joined_rows.py.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <bit>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/registration.h"
#include "core/tensor_checks.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "append_ids";
constexpr int64_t kEmpty = -1;

// Places in `ids`, found by open addressing with linear probing. `size` is a power of two.
struct Table {
  int64_t* entries;
  int64_t size;
  int64_t* ids;
  int64_t count;

  // Returns the place of an id, appended if it is new. At least one entry must be empty.
  int64_t place_of(int64_t id) {
    int64_t& entry = entry_of(id);
    if (entry == kEmpty) {
      ids[count] = id;
      entry = count++;
    }
    return entry;
  }

  // Enters the first `count` ids again.
  void rebuild() {
    std::fill_n(entries, size, kEmpty);
    for (int64_t place = 0; place < count; ++place) entry_of(ids[place]) = place;
  }

  int64_t& entry_of(int64_t id) const {
    constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;  // 2^64 over the golden ratio
    const int shift = 64 - std::countr_zero(static_cast<uint64_t>(size));
    auto at = static_cast<int64_t>((static_cast<uint64_t>(id) * kFactor) >> shift);
    while (entries[at] != kEmpty && ids[entries[at]] != id) at = (at + 1) & (size - 1);
    return entries[at];
  }
};

// `held` has `count` ids at its begin. `table` has a power of two of entries, at most half of them
// used, and at its end the number of ids in it; the table is rebuilt if that is not `count`.
// Returns the places of `ids` in `held`, and the appended ids.
Tensors append_ids(const Tensor& table, const Tensor& held, int64_t count, const Tensor& ids) {
  const Arguments all(kOp, {written("table", table), written("held", held), read("ids", ids)});
  if (!ids.is_cpu()) throw_value_error(kOp, "ids must be on the CPU, got ", device_text(ids));
  check_list(kOp, "table", table, "ids", ids);
  check_list(kOp, "held", held, "ids", ids);
  check_list(kOp, "ids", ids, "ids", ids);
  check_count(kOp, "count", count, held.numel() - ids.numel());
  const int64_t size = table.numel() - 1;
  if (size < 2 || !std::has_single_bit(static_cast<uint64_t>(size)) ||
      size < 2 * (count + ids.numel())) {
    throw_value_error(kOp, "table has ", size, " entries, expected a power of two of at least ",
                      2 * (count + ids.numel()));
  }
  all.check_memory();
  const Tensor places = new_tensor(kOp, {ids.numel()}, ScalarType::Long, ids);
  all.mark_written();
  int64_t* const entries = data_of(table);
  Table found{.entries = entries, .size = size, .ids = data_of(held), .count = count};
  if (entries[size] != count) found.rebuild();
  for (int64_t k = 0; k < ids.numel(); ++k) data_of(places)[k] = found.place_of(data_of(ids)[k]);
  entries[size] = found.count;
  const Tensor appended = new_tensor(kOp, {found.count - count}, ScalarType::Long, ids);
  std::copy(found.ids + count, found.ids + found.count, data_of(appended));
  return {places, appended};
}

const Ops kOps{
    {"append_ids(Tensor(a!) table, Tensor(b!) held, int count, Tensor ids) -> Tensor[]",
     TORCH_BOX(&append_ids)},
};

}  // namespace
}  // namespace speedtorch
