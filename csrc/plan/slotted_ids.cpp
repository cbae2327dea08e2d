// Checks of slotted ids; see slotted_ids.h. The kernels are in slotted_ids.cu.

#include "plan/slotted_ids.h"

#include <string>

#include "call/torch_calls.h"
#include "core/gpu.h"

namespace speedtorch {
namespace {

SlottedCheck check_of(const SlottedList& list, PlanStatus* status) {
  return {.view = {.unique = data_of(list.ids),
                   .order = data_of(list.places),
                   .status = status,
                   .count = list.ids.numel()},
          .count = list.count ? data_of(*list.count) : nullptr,
          .list = list.list,
          .side_rows = list.side_rows};
}

void check_on_cpu(const char* op, const SlottedList& list, PlanView& view, int64_t table_rows,
                  bool must_ascend = true) {
  const std::string name = name_of(list.list);
  if (list.count) {
    view.count = check_count(op, (name + "_count").c_str(), *data_of(*list.count), view.count);
  }
  Ids ids = as_ids(list.ids);
  ids.count = view.count;
  check_ids_on_cpu(op, name.c_str(), ids, table_rows);
  for (int64_t i = 0; i < view.count; ++i) {
    const int64_t id = view.unique[i], place = view.order[i];
    const bool unordered = must_ascend && i > 0 && id <= view.unique[i - 1];
    if (!unordered && place >= 0 && place < list.side_rows) continue;
    throw_bad_ids({.kind = unordered ? IdError::kUnordered : IdError::kBadPlace,
                   .op = op,
                   .list = name.c_str(),
                   .rows = list.side_rows,
                   .id = unordered ? id : place,
                   .position = i,
                   .count = view.count});
  }
  *view.status = status_of_distinct(view.count, table_rows);
}

}  // namespace

void check_slotted_kinds(const char* op, const SlottedList& list, const Tensor& on) {
  const std::string name = name_of(list.list);
  check_list(op, name.c_str(), list.ids, "arriving[0]", on);
  check_list(op, (name + "_places").c_str(), list.places, "arriving[0]", on, list.ids.numel());
  if (list.count) check_list(op, (name + "_count").c_str(), *list.count, "arriving[0]", on, 1);
}

SlottedViews planned_slots(const char* op, const SlottedList& evict, const SlottedList& load,
                           int64_t table_rows, const Tensor& on) {
  const Tensor keep = new_tensor(op, {2 * kPlanStatusFields}, ScalarType::Long, on);
  auto* status = static_cast<PlanStatus*>(keep.data_ptr());
  SlottedViews made{
      .evict = check_of(evict, status).view, .load = check_of(load, status + 1).view, .keep = keep};
  if (on.is_cpu()) {
    check_on_cpu(op, evict, made.evict, table_rows, false);
    check_on_cpu(op, load, made.load, table_rows, false);
  }
  return made;
}

SlottedViews slotted_ids(const char* op, const SlottedList& evict, const SlottedList& load,
                         int64_t table_rows, const Tensor& on, void* stream) {
  const Tensor keep = new_tensor(op, {2 * kPlanStatusFields}, ScalarType::Long, on);
  auto* status = static_cast<PlanStatus*>(keep.data_ptr());
  const SlottedCheck leaving = check_of(evict, status), arriving = check_of(load, status + 1);
  SlottedViews made{.evict = leaving.view, .load = arriving.view, .keep = keep};
  if (on.is_cpu()) {
    check_on_cpu(op, evict, made.evict, table_rows);
    check_on_cpu(op, load, made.load, table_rows);
  } else if constexpr (kWithCuda) {
    check_cuda(launch_check_slotted(leaving, arriving, table_rows,
                                    error_record(on.get_device_index()), stream),
               op);
  }
  return made;
}

}  // namespace speedtorch
