// Checks of ids that come with places; see slotted_ids.h.

#include "plan/slotted_ids.h"

#include "call/torch_calls.h"
#include "core/gpu.h"
#include "plan/slotted_ids_launch.h"

namespace speedtorch {
namespace {

PlanView view_of(const SlottedList& list, PlanStatus* status) {
  return {.unique = data_of(list.ids),
          .order = data_of(list.places),
          .status = status,
          .count = list.ids.numel()};
}

SlottedCheck check_of(const SlottedList& list, const PlanView& view) {
  return {.view = view,
          .count = list.count ? data_of(*list.count) : nullptr,
          .list = list.list,
          .side_rows = list.side_rows};
}

void check_on_cpu(const char* op, const SlottedList& list, PlanView& view, int64_t table_rows) {
  if (list.count) view.count = check_count(op, list.count_name, *data_of(*list.count), view.count);
  Ids ids = as_ids(list.ids);
  ids.count = view.count;
  check_ids_on_cpu(op, list.ids_name, ids, table_rows);
  for (int64_t i = 0; i < view.count; ++i) {
    const int64_t id = view.unique[i], place = view.order[i];
    const bool unordered = i > 0 && id <= view.unique[i - 1];
    if (!unordered && place >= 0 && place < list.side_rows) continue;
    throw_bad_ids({.kind = unordered ? IdError::kUnordered : IdError::kBadPlace,
                   .op = op,
                   .list = list.ids_name,
                   .rows = list.side_rows,
                   .id = unordered ? id : place,
                   .position = i,
                   .count = view.count});
  }
  *view.status = {.bad_count = 0,
                  .bad_position = view.count,
                  .bad_id = 0,
                  .distinct = view.count,
                  .rows = table_rows,
                  .count = view.count,
                  .repeat_position = view.count,
                  .repeat_id = 0};
}

}  // namespace

void check_slotted_kinds(const char* op, const SlottedList& list, const Tensor& on) {
  check_list(op, list.ids_name, list.ids, "arriving[0]", on);
  check_list(op, list.places_name, list.places, "arriving[0]", on);
  check_shape(op, list.places_name, list.places, {list.ids.numel()});
  if (list.count) check_count_kind(op, list.count_name, *list.count, "arriving[0]", on);
}

SlottedViews slotted_ids(const char* op, const SlottedList& evict, const SlottedList& load,
                         int64_t table_rows, const Tensor& on, void* stream) {
  const Tensor keep = new_tensor(op, {2 * kPlanStatusFields}, ScalarType::Long, on);
  auto* status = static_cast<PlanStatus*>(keep.data_ptr());
  SlottedViews made{
      .evict = view_of(evict, status), .load = view_of(load, status + 1), .keep = keep};
  if (on.is_cpu()) {
    check_on_cpu(op, evict, made.evict, table_rows);
    check_on_cpu(op, load, made.load, table_rows);
    return made;
  }
  if constexpr (kWithCuda) {
    check_cuda(launch_check_slotted(check_of(evict, made.evict), check_of(load, made.load),
                                    table_rows, error_record(on.get_device_index()), stream),
               op);
  }
  return made;
}

}  // namespace speedtorch
