// append_batch: adds the ids of another lookup to a step of many lookups, whose rows are in the
// order in which they joined. Finds the ids in a hash table. CPU only.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "move/cpu_copy.h"
#include "ops/begin_step.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "append_batch";
constexpr int64_t kEmpty = -1;

// Places in `ids`, found by open addressing with linear probing. `size` is a power of two; at least
// one entry is empty.
struct Table {
  int64_t* entries;
  int64_t size;
  const int64_t* ids;

  // The entry of an id, which is kEmpty if the id is new.
  int64_t& entry_of(int64_t id) const {
    constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;  // 2^64 over the golden ratio
    const int shift = 64 - std::countr_zero(static_cast<uint64_t>(size));
    auto at = static_cast<int64_t>((static_cast<uint64_t>(id) * kFactor) >> shift);
    while (entries[at] != kEmpty && ids[entries[at]] != id) at = (at + 1) & (size - 1);
    return entries[at];
  }
  // Enters the ids from place `begin` on, so that there are `end`.
  void enter(int64_t begin, int64_t end) const {
    for (int64_t place = begin; place < end; ++place) entry_of(ids[place]) = place;
    entries[size] = end;
  }
};

// The rows of a step, their ids and the hash table of the ids. Only the first `count` are valid.
struct Joined {
  Tensors rows;
  Tensor ids, table;

  Table found() const { return {data_of(table), table.numel() - 1, data_of(ids)}; }

  // Makes a hash table of the first `count` ids.
  void make_table(int64_t size, int64_t count) {
    table = new_tensor(kOp, {size + 1}, ScalarType::Long, ids);
    std::fill_n(data_of(table), size, kEmpty);
    found().enter(0, count);
  }

  // Copies the first `count` to memory with space for `more` others, and as many again.
  Joined with_space(int64_t count, int64_t more) const {
    const auto space =
        static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(2 * (count + more))));
    Joined longer{{}, new_tensor(kOp, {space}, ScalarType::Long, ids), table};
    std::copy_n(data_of(ids), count, data_of(longer.ids));
    longer.make_table(2 * space, count);
    for (const Tensor& each : rows) {
      std::vector<int64_t> shape = shape_of(each);
      shape[0] = space;
      longer.rows.push_back(new_tensor(kOp, shape, each.scalar_type(), ids));
      move_on_cpu(as_rows(kOp, "rows", each), nullptr, as_rows(kOp, "rows", longer.rows.back()),
                  nullptr, count);
    }
    return longer;
  }
};

// Plans `parts` for a step with `count` rows of unique ids, which include the padding's. `table` is
// empty, or the hash table of the ids: a power of two of entries, at most half of them used, then
// the number of ids in it; the table is made again if that is not `count`. Returns the results of
// count_batch for `parts`, then the place of each id in the step and the new ids, which got the
// places from `count` on. If the memory is too small, new ids, table and rows follow, field by
// field. The copy of the parts is the last result. New rows are loaded from `host`, unless that is
// empty. The rows `evict` are written to it if there are new rows.
Tensors append_batch(const Tensors& host, const Tensors& leaving,
                     const std::optional<Tensor>& evict, const std::optional<Tensor>& evict_places,
                     const Tensors& rows, const Tensor& ids, const Tensor& table, int64_t count,
                     const Tensors& parts, int64_t table_rows, int64_t padding) {
  const Arguments all(
      kOp, {written("host", host, false), read("leaving", leaving), read("evict", evict),
            read("evict_places", evict_places), written("rows", rows, true), written("ids", ids),
            written("table", table), read("parts", parts)});
  check_fields(kOp, "rows", rows.size());
  if (!ids.is_cpu()) throw_value_error(kOp, "ids must be on the CPU, got ", device_text(ids));
  check_list(kOp, "ids", ids, "ids", ids);
  check_list(kOp, "table", table, "ids", ids);
  for (size_t k = 0; k < rows.size(); ++k) {
    const std::string name = item("rows", k);
    as_rows_like(kOp, name.c_str(), rows[k], name.c_str(), rows[k], "ids", ids);
    check_count(kOp, "ids", ids.numel(), rows[k].size(0));
  }
  check_count(kOp, "count", count, ids.numel());
  const int64_t entries = table.numel() - 1;
  if (entries >= 0 &&
      (!std::has_single_bit(static_cast<uint64_t>(entries)) || entries < 2 * ids.numel())) {
    throw_value_error(kOp, "table has ", entries,
                      " entries, expected none or a power of two of at "
                      "least ",
                      2 * ids.numel());
  }
  all.check_memory();
  CountedPlan plan = counted_plan(kOp, parts, ids, table_rows, padding, std::nullopt);
  const Tensor& load = plan.loaded();
  Joined now{rows, ids, table};
  const bool grows = entries < 0 || count + load.numel() > ids.numel();
  const bool is_stale = !grows && data_of(table)[entries] != count;
  if (grows) now = now.with_space(count, load.numel());
  if (is_stale) now.make_table(entries, count);
  const Table found = now.found();
  std::vector<int64_t> places, fresh;
  for (int64_t k = 0; k < load.numel(); ++k) {
    const int64_t id = data_of(load)[k], entry = found.entry_of(id);
    places.push_back(entry == kEmpty ? count + static_cast<int64_t>(fresh.size()) : entry);
    if (entry == kEmpty) fresh.push_back(id);
  }
  const auto more = static_cast<int64_t>(fresh.size());
  const Tensor appended = new_tensor(kOp, {more}, ScalarType::Long, ids);
  std::copy(fresh.begin(), fresh.end(), data_of(appended));
  if (more > 0 && !host.empty()) {
    Tensors arriving, nothing;
    for (Tensor& each : now.rows) {
      arriving.push_back(torch::stable::narrow(each, 0, count, more));
      if (!evict) nothing.push_back(torch::stable::narrow(each, 0, 0, 0));
    }
    exchange(host, evict ? leaving : nothing, evict ? *evict : view_of_list(appended, 0, 0),
             evict_places, arriving, appended, std::nullopt, /*evicts=*/true);
  }
  if (!grows) all.mark_written();
  std::copy(fresh.begin(), fresh.end(), data_of(now.ids) + count);
  found.enter(count, count + more);
  if (is_stale) copy(kOp, now.table, table, /*wait=*/false);
  plan.made.insert(plan.made.end(), {positions_on_cpu(kOp, plan, places), appended});
  if (grows) {
    plan.made.insert(plan.made.end(), {now.ids, now.table});
    plan.made.insert(plan.made.end(), now.rows.begin(), now.rows.end());
  }
  return plan.with_copy();
}

// For speedtorch/step/row_store.py.
const Ops kOps{
    {"append_batch(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor? evict, Tensor? evict_places, "
     "Tensor(b! -> *)[] rows, Tensor(c!) ids, Tensor(d!) table, int count, Tensor[] parts, int "
     "table_rows, int padding) -> Tensor[]",
     TORCH_BOX(&append_batch)},
};

}  // namespace
}  // namespace speedtorch
