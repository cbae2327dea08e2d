// merge_rows: inserts space for more rows among rows in ascending order of ids. This file has the
// checks and the CPU loops; the GPU kernels are in merge_rows.cu.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "move/cpu_copy.h"
#include "ops/begin_step.h"
#include "ops/launchers.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "merge_rows";

// One pass over both lists.
void merge_on_cpu(const MergedIds& work) {
  int64_t i = 0, j = 0;
  while (i < work.held_count || j < work.more_count) {
    const bool is_held =
        j == work.more_count || (i < work.held_count && work.held[i] < work.more[j]);
    const int64_t place = i + j;
    work.ids[place] = is_held ? work.held[i] : work.more[j];
    (is_held ? work.held_places[i++] : work.more_places[j++]) = place;
  }
}

}  // namespace

// Returns the merged ids, the places of the held and of the added ids, and for each field memory
// for all rows, with the held rows copied in. A row of `rows` after the rows of `held` has no id
// and becomes the last row.
Tensors merge_rows(const Tensors& rows, const Tensor& held, const Tensor& more) {
  const Arguments all(kOp, {read("rows", rows), read("held", held), read("more", more)});
  check_fields(kOp, "rows", rows.size());
  check_list(kOp, "held", held, "rows[0]", rows[0]);
  check_list(kOp, "more", more, "rows[0]", rows[0]);
  const int64_t count = as_rows(kOp, "rows[0]", rows[0]).count;
  const int64_t padding_rows = count - held.numel();
  if (padding_rows < 0 || padding_rows > 1) {
    throw_value_error(kOp, "rows[0] has ", count, " rows, expected one for each of ", held.numel(),
                      " held ids, or one more");
  }
  std::vector<Rows> from, to;
  for (size_t k = 0; k < rows.size(); ++k) {
    const std::string name = item("rows", k);
    from.push_back(
        as_rows_like(kOp, name.c_str(), rows[k], name.c_str(), rows[k], "rows[0]", rows[0]));
    if (from[k].count != count) {
      throw_value_error(kOp, name, " has ", from[k].count, " rows, expected ", count,
                        " like rows[0]");
    }
  }
  all.check_memory();
  Tensors made = new_lists(kOp, {held.numel() + more.numel(), count, more.numel()}, held, true);
  for (size_t k = 0; k < rows.size(); ++k) {
    std::vector<int64_t> shape = shape_of(rows[k]);
    shape[0] = count + more.numel();
    made.push_back(new_tensor(kOp, shape, rows[k].scalar_type(), held));
    to.push_back(as_rows(kOp, "made", made.back()));
  }
  const MergedIds work{.held = data_of(held),
                       .held_count = held.numel(),
                       .more = data_of(more),
                       .more_count = more.numel(),
                       .padding_rows = padding_rows,
                       .ids = data_of(made[0]),
                       .held_places = data_of(made[1]),
                       .more_places = data_of(made[2])};
  if (held.is_cpu()) {
    merge_on_cpu(work);
    if (padding_rows > 0) work.held_places[work.held_count] = work.all();
    for (size_t k = 0; k < from.size(); ++k) {
      move_on_cpu(from[k], nullptr, to[k], work.held_places, count);
    }
    return made;
  }
  const CurrentStream stream(kOp, held);
  if constexpr (kWithCuda) {
    check_cuda(launch_merge_ids(work, stream.get()), kOp);
    for (size_t first = 0; first < from.size(); first += kFieldsPerLaunch) {
      const auto field_count = std::min<size_t>(from.size() - first, kFieldsPerLaunch);
      check_cuda(launch_spread_rows(&from[first], &to[first], static_cast<int>(field_count),
                                    work.held_places, stream.get()),
                 kOp);
    }
  }
  return made;
}

namespace {

// For speedtorch/step/counted_memory.py.
const Ops kOps{
    {"merge_rows(Tensor[] rows, Tensor held, Tensor more) -> Tensor[]", TORCH_BOX(&merge_rows)},
};

}  // namespace
}  // namespace speedtorch
