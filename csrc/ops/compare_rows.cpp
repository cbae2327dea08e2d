// compare_rows: which rows arrive, stay and leave when the rows of one batch follow those of
// another. Checks and the CPU loop; GPU kernels: .cu.

#include <torch/csrc/stable/library.h>

#include <limits>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/tensor_checks.h"
#include "ops/compare_rows_launch.h"
#include "plan/plan_launch.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "compare_rows";
constexpr size_t kNamedLists = 4, kLists = 6;  // those that are as long as `named` come first

// The count stands in the status of a plan; without one every entry counts.
SortedIds sorted_ids(const Tensor& ids, const Tensor& status) {
  SortedIds list{.ids = data_of(ids), .size = ids.numel(), .count = nullptr};
  if (status.numel() > 0) list.count = &reinterpret_cast<PlanStatus*>(data_of(status))->distinct;
  return list;
}

void check_sorted_ids(const char* name, const Tensor& ids, const char* status_name,
                      const Tensor& status, const Tensor& on) {
  check_list(kOp, name, ids, "named", on);
  check_list(kOp, status_name, status, "named", on);
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
  out.counts[1] = arriving;
  out.counts[2] = leaving;
}

std::vector<Tensor> compare_rows(const Tensor& named, const Tensor& named_status,
                                 const Tensor& held, const Tensor& held_status, int64_t padding) {
  const Arguments all(kOp, {read("named", named), read("named_status", named_status),
                            read("held", held), read("held_status", held_status)});
  check_sorted_ids("named", named, "named_status", named_status, named);
  check_sorted_ids("held", held, "held_status", held_status, named);
  all.check_memory();
  const SortedIds now = sorted_ids(named, named_status), before = sorted_ids(held, held_status);
  if (now.size + before.size > std::numeric_limits<int32_t>::max()) {
    throw_value_error(kOp, "named and held have ", now.size + before.size,
                      " entries, at most 2^31 - 1 fit");
  }
  if (named.is_cpu()) {
    check_count("named_status", now);
    check_count("held_status", before);
  }
  std::vector<Tensor> made;
  for (size_t list = 0; list < kLists; ++list) {
    const int64_t size = list < kNamedLists ? now.size : before.size;
    made.push_back(new_tensor(kOp, {size}, ScalarType::Long, named));
  }
  made.push_back(new_tensor(kOp, {3}, ScalarType::Long, named));
  const ComparedRows out{.arriving_ids = data_of(made[0]),
                         .arriving_places = data_of(made[1]),
                         .stay_places = data_of(made[2]),
                         .stay_from = data_of(made[3]),
                         .leaving_ids = data_of(made[4]),
                         .leaving_places = data_of(made[5]),
                         .counts = data_of(made[6])};
  if (named.is_cpu()) {
    compare_on_cpu(now, before, padding, out);
    return made;
  }
  const CurrentStream stream(kOp, named);
  if constexpr (kWithCuda) {
    const int64_t bytes = compare_scratch_bytes(now.size, before.size);
    const Tensor scratch = new_tensor(kOp, {bytes}, ScalarType::Byte, named);
    check_cuda(
        launch_compare_rows(now, before, padding, out, scratch.data_ptr(), bytes, stream.get()),
        kOp);
  }
  return made;
}

}  // namespace
}  // namespace speedtorch

STABLE_TORCH_LIBRARY_FRAGMENT(speedtorch, m) {
  // For speedtorch/ops/planned_batch.py.
  m.def(
      "compare_rows(Tensor named, Tensor named_status, Tensor held, Tensor held_status, int "
      "padding) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(speedtorch, CompositeExplicitAutograd, m) {
  m.impl("compare_rows", TORCH_BOX(&speedtorch::compare_rows));
}
