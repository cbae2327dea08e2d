// compare_rows: plans a batch, and says which rows arrive, stay and leave when its rows follow
// those of another. Or of a plan that is there, whether its rows may follow them: a batch that must
// fit is looked at where it lies, so that nobody waits. Checks and the CPU loops; GPU kernels: .cu.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/tensor_checks.h"
#include "memory/host_memory.h"
#include "ops/compare_rows_launch.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "compare_rows";
constexpr size_t kNamedLists = 4, kLists = 6;  // those that are as long as `named` come first
constexpr int64_t kCounts = 4;

// The count stands in the status of a plan; without one every entry counts.
SortedIds sorted_ids(const Tensor& ids, const Tensor& status) {
  SortedIds list{.ids = data_of(ids), .size = ids.numel(), .count = nullptr};
  if (status.numel() > 0) list.count = &reinterpret_cast<PlanStatus*>(data_of(status))->distinct;
  return list;
}

void check_sorted_ids(const char* name, const Tensor& ids, const char* status_name,
                      const Tensor& status, const char* on_name, const Tensor& on) {
  check_list(kOp, name, ids, on_name, on);
  check_list(kOp, status_name, status, on_name, on);
  if (status.numel() > 0) check_shape(kOp, status_name, status, {kPlanStatusFields});
}

void check_count(const char* name, const SortedIds& list) {
  if (list.count == nullptr || (*list.count >= 0 && *list.count <= list.size)) return;
  throw_value_error(kOp, name, " says ", *list.count, " distinct ids, of ", list.size, " entries");
}

void compare_on_cpu(const SortedIds& named, const SortedIds& held, int64_t padding,
                    const ComparedRows& out) {
  const int64_t named_count = named.count ? *named.count : named.size;
  const int64_t held_count = held.count ? *held.count : held.size;
  int64_t arriving = 0, staying = 0, leaving = 0, place = 0, held_place = 0;
  for (int64_t i = 0, j = 0; i < named_count || j < held_count;) {
    const bool first_named = i < named_count && (j >= held_count || named.ids[i] < held.ids[j]);
    const bool both = i < named_count && j < held_count && named.ids[i] == held.ids[j];
    const int64_t id = first_named || both ? named.ids[i] : held.ids[j];
    const bool counts = id != padding;
    if (counts && both) {
      out.stay_places[staying] = place;
      out.stay_from[staying++] = held_place;
    } else if (counts && first_named) {
      out.arriving_ids[arriving] = id;
      out.arriving_places[arriving++] = place;
    } else if (counts) {
      out.leaving_ids[leaving] = id;
      out.leaving_places[leaving++] = held_place;
    }
    if (first_named || both) {
      ++i;
      place += counts;
    }
    if (!first_named) {
      ++j;
      held_place += counts;
    }
  }
  out.counts[0] = place;
  out.counts[1] = staying;
  out.counts[2] = arriving;
  out.counts[3] = leaving;
}

// Whether the batch is compared; word of why not.
bool fits_on_cpu(const SortedIds& named, int64_t padding, const Fitting& fitting) {
  if (fitting.halt[0] != 0) {
    ++fitting.halt[1];
    return false;
  }
  const int64_t* end = named.ids + *named.count;
  const int64_t distinct = *named.count - std::binary_search(named.ids, end, padding);
  const PlanStatus& status = *fitting.status;
  const Misfit why = status.bad_count != 0               ? Misfit::kBadIds
                     : status.rows != fitting.table_rows ? Misfit::kForeignPlan
                     : distinct > fitting.capacity       ? Misfit::kTooMany
                                                         : Misfit::kNone;
  if (why == Misfit::kNone) return true;
  fitting.halt[0] = 1;
  *fitting.fault = {.kind = static_cast<int64_t>(why),
                    .distinct = distinct,
                    .capacity = fitting.capacity,
                    .bad_count = status.bad_count,
                    .bad_position = status.bad_position,
                    .bad_id = status.bad_id,
                    .count = status.count,
                    .table_rows = fitting.table_rows};
  return false;
}

// Of checked arguments; how many rows there are of each kind goes to `counts`.
Tensors compare(SortedIds named, const SortedIds& held, int64_t padding, const Fitting* fitting,
                int64_t* counts, const Tensor& on, const std::optional<CurrentStream>& stream,
                const Arguments& all) {
  if (named.size + held.size > std::numeric_limits<int32_t>::max()) {
    throw_value_error(kOp, "named and held have ", named.size + held.size,
                      " entries, at most 2^31 - 1 fit");
  }
  if (on.is_cpu()) {
    check_count("named_status", named);
    check_count("held_status", held);
  }
  const int64_t named_size = fitting != nullptr ? fitting->capacity : named.size;
  Tensors made;
  for (size_t list = 0; list < kLists; ++list) {
    const int64_t size = list < kNamedLists ? named_size : held.size;
    made.push_back(new_tensor(kOp, {size}, ScalarType::Long, on));
  }
  const ComparedRows out{.arriving_ids = data_of(made[0]),
                         .arriving_places = data_of(made[1]),
                         .stay_places = data_of(made[2]),
                         .stay_from = data_of(made[3]),
                         .leaving_ids = data_of(made[4]),
                         .leaving_places = data_of(made[5]),
                         .counts = counts};
  if (!stream) {
    all.mark_written();
    const int64_t none = 0;
    if (fitting != nullptr && !fits_on_cpu(named, padding, *fitting)) named.count = &none;
    compare_on_cpu(named, held, padding, out);
  } else if constexpr (kWithCuda) {
    const int64_t bytes = compare_scratch_bytes(named.size, held.size);
    const Tensor scratch = new_tensor(kOp, {bytes}, ScalarType::Byte, on);
    all.mark_written();
    check_cuda(launch_compare_rows(named, held, padding, fitting, out, scratch.data_ptr(), bytes,
                                   stream->get()),
               kOp);
  }
  return made;
}

Tensors compare_rows(const Tensor& index, int64_t rows, const Tensor& held,
                     const Tensor& held_status, int64_t padding) {
  const Arguments all(kOp,
                      {read("index", index), read("held", held), read("held_status", held_status)});
  check_plannable(kOp, index, rows);
  check_sorted_ids("held", held, "held_status", held_status, "index", index);
  all.check_memory();
  std::optional<CurrentStream> stream;
  if (!index.is_cpu()) stream.emplace(kOp, index);
  const Tensor status = new_tensor(kOp, {kPlanStatusFields + kCounts}, ScalarType::Long, index);
  Tensors made = plan_index(kOp, index, rows, stream ? stream->get() : nullptr, &status);
  for (Tensor& list : compare(sorted_ids(made[0], status), sorted_ids(held, held_status), padding,
                              nullptr, data_of(status) + kPlanStatusFields, index, stream, all)) {
    made.push_back(std::move(list));
  }
  return made;
}

// The lists of ComparedRows and its counts. No Tensor[]: torch.compile takes none from an op that
// writes to its arguments.
using Compared = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Compared compare_rows_fitting(const Tensor& named, const Tensor& named_status, const Tensor& held,
                              const Tensor& held_status, int64_t padding, int64_t capacity,
                              int64_t table_rows, const Tensor& halt, const Tensor& fault) {
  const Arguments all(
      kOp, {read("named", named), read("named_status", named_status), read("held", held),
            read("held_status", held_status), written("halt", halt), written("fault", fault)});
  check_sorted_ids("named", named, "named_status", named_status, "named", named);
  check_shape(kOp, "named_status", named_status, {kPlanStatusFields});
  check_sorted_ids("held", held, "held_status", held_status, "named", named);
  check_shape(kOp, "held_status", held_status, {kPlanStatusFields});
  if (held.numel() != capacity) {
    throw_value_error(kOp, "held has ", held.numel(), " entries, the capacity is ", capacity);
  }
  check_list(kOp, "halt", halt, "named", named);
  check_shape(kOp, "halt", halt, {2});
  check_list(kOp, "fault", fault, "named", fault.is_cpu() ? fault : named);
  check_shape(kOp, "fault", fault, {kFaultFields});
  all.check_memory();
  std::optional<CurrentStream> stream;
  if (!named.is_cpu()) stream.emplace(kOp, named);
  const Rows word = as_rows(kOp, "fault", fault);
  if (stream && reach(kOp, fault, word, stream->device()) == Access::kNot) {
    throw_value_error(kOp,
                      "fault is in pageable memory, which the GPU cannot write to; pin it with "
                      "speedtorch.pin_memory_(fault)");
  }
  const Fitting fitting{.status = reinterpret_cast<PlanStatus*>(data_of(named_status)),
                        .capacity = capacity,
                        .table_rows = table_rows,
                        .halt = data_of(halt),
                        .fault = reinterpret_cast<Fault*>(data_of(fault))};
  const SortedIds now = sorted_ids(named, named_status), before = sorted_ids(held, held_status);
  const Tensor counts = new_tensor(kOp, {kCounts}, ScalarType::Long, named);
  auto compared = [&] {
    Tensors made = compare(now, before, padding, &fitting, data_of(counts), named, stream, all);
    return Compared{made[0], made[1], made[2], made[3], made[4], made[5], counts};
  };
  if (!stream) return compared();
  TableUse use{fault, word, stream->queue()};
  Compared made = compared();
  use.note();
  return made;
}

}  // namespace
}  // namespace speedtorch

STABLE_TORCH_LIBRARY_FRAGMENT(speedtorch, m) {
  // For speedtorch/ops/planned_batch.py.
  m.def(
      "compare_rows(Tensor index, int rows, Tensor held, Tensor held_status, int padding) -> "
      "Tensor[]");
  m.def(
      "compare_rows.fitting(Tensor named, Tensor named_status, Tensor held, Tensor held_status, "
      "int padding, int capacity, int table_rows, Tensor(a!) halt, Tensor(b!) fault) -> (Tensor, "
      "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(speedtorch, CompositeExplicitAutograd, m) {
  m.impl("compare_rows", TORCH_BOX(&speedtorch::compare_rows));
  m.impl("compare_rows.fitting", TORCH_BOX(&speedtorch::compare_rows_fitting));
}
