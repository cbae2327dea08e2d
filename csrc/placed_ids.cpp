// Checks of ids that come with places; see placed_ids.h.

#include "placed_ids.h"

#include <algorithm>
#include <string>

#include "gpu.h"
#include "placed_ids_launch.h"
#include "torch_calls.h"

namespace speedtorch {
namespace {

const int64_t* data_of(const Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<const int64_t*>(tensor.data_ptr());
}

void check_kind(const char* op, const char* name, const Tensor& tensor, const Tensor& on) {
  if (tensor.scalar_type() != ScalarType::Long || tensor.dim() != 1 || !tensor.is_contiguous()) {
    throw_value_error(op, std::string(name) + " must be a contiguous int64 tensor [n]");
  }
  check_same_device(op, name, tensor, "arriving[0]", on);
}

}  // namespace

PlacedIds placed_ids(const char* op, const PlacedNames& names, const Tensor& ids,
                     const Tensor& places, int64_t table_rows, int64_t side_rows, const Tensor& on,
                     void* stream) {
  check_kind(op, names.ids, ids, on);
  check_kind(op, names.places, places, on);
  const int64_t count = ids.numel();
  check_shape(op, names.places, places, {count});
  PlacedIds made{.view = {.unique = data_of(ids), .order = data_of(places), .count = count},
                 .keep = new_tensor(op, {kPlanStatusFields}, ScalarType::Long, on)};
  auto* status = static_cast<PlanStatus*>(made.keep.data_ptr());
  made.view.status = status;
  if (!on.is_cpu()) {
    if constexpr (kWithCuda) {
      check_cuda(launch_check_placed(made.view.unique, made.view.order, count, table_rows,
                                     side_rows, names.list, status, letter_box(), stream),
                 op);
    }
    return made;
  }
  check_ids_on_cpu(op, names.ids, as_ids(op, names.ids, ids), table_rows);
  for (int64_t i = 0; i < count; ++i) {
    BadIds bad{.op = op, .rows = side_rows, .position = i, .count = count};
    if (i > 0 && made.view.unique[i] <= made.view.unique[i - 1]) {
      bad.kind = LetterKind::kUnordered;
      bad.list = names.ids;
      bad.id = made.view.unique[i];
      throw_bad_ids(bad);
    }
    if (made.view.order[i] < 0 || made.view.order[i] >= side_rows) {
      bad.kind = LetterKind::kBadPlace;
      bad.list = names.ids;
      bad.id = made.view.order[i];
      throw_bad_ids(bad);
    }
  }
  *status = {.bad_count = 0,
             .bad_position = count,
             .bad_id = 0,
             .distinct = count,
             .rows = table_rows,
             .count = count,
             .repeat_position = count,
             .repeat_id = 0};
  return made;
}

}  // namespace speedtorch
