// load_rows: loads rows of a table into new memory while evicting others. count_batch: plans ids
// and counts the unique ones. load_batch: does both. A step without a capacity begins with one of
// these ops.

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call/arguments.h"
#include "call/host_numbers.h"
#include "call/torch_calls.h"
#include "core/registration.h"
#include "ops/begin_step.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

// Index of the ids to load in the results of count_batch: the unique ids, then the padding's id if
// there is one.
constexpr size_t kLoaded = 6;

// Returns the rows of the ids `load`, field by field, in the form of `leaving`. The first rows of
// `leaving` are the newest copies of the ids `evict`. These rows are written to the host, except
// for rows in both lists; with `evicts` false, none is written.
Tensors load_rows(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                  const Tensor& load, bool evicts) {
  constexpr const char* kOp = "load_rows";
  const Arguments all(kOp, {read("leaving", leaving), read("load", load)});
  Tensors made;
  for (size_t k = 0; k < leaving.size(); ++k) {
    as_rows(kOp, item("leaving", k).c_str(), leaving[k]);
    std::vector<int64_t> shape = shape_of(leaving[k]);
    shape[0] = load.numel();
    made.push_back(new_tensor(kOp, shape, leaving[k].scalar_type(), leaving[k]));
  }
  exchange(host, leaving, evict, made, load, evicts);
  return made;
}

// Copies CPU ids to the planning device. Also returns a CPU copy that nothing else writes to.
std::pair<Tensor, Tensor> uploaded(const char* op, const Tensor& index, const Tensor& on) {
  const Tensor copied = new_pinned(op, shape_of(index), index);
  copy_ids(index, copied);
  const Tensor there = new_tensor(op, shape_of(index), index.scalar_type(), on);
  copy(op, copied, there, /*wait=*/false);
  return {there, copied};
}

// Returns the plan of `index` on the device of `like`, the unique ids without and with the padding,
// and, if `index` is on the CPU, a copy of it. On a GPU this waits for the plan, because the caller
// allocates memory for the number of ids.
Tensors count_batch(const Tensor& index, const Tensor& like, int64_t rows, int64_t padding) {
  constexpr const char* kOp = "count_batch";
  const Arguments all(kOp, {read("index", index), read("like", like)});
  check_plannable(kOp, index, rows);
  all.check_memory();
  if (like.is_cpu()) {
    check_same_device(kOp, "index", index, "like", like);
    Tensors made = plan_batch(index, rows, padding, -1, std::nullopt, std::nullopt);
    const auto& status = *reinterpret_cast<const PlanStatus*>(data_of(made[kPlanStatus]));
    made.insert(made.end() - 1, {view_of_list(made[0], 0, status.distinct),
                                 view_of_list(made[0], 0, status.distinct + (padding >= 0))});
    return made;
  }
  const CurrentStream stream(kOp, like);
  stream.check_not_capturing(kOp, "the number of unique ids changes from call to call");
  std::optional<std::pair<Tensor, Tensor>> moved;
  if (index.is_cpu()) moved = uploaded(kOp, index, like);
  const Tensor& ids = moved ? moved->first : index;
  check_same_device(kOp, "index", ids, "like", like);
  Tensors made = plan_batch(ids, rows, padding, -1, std::nullopt, std::nullopt);
  const HostNumbers numbers(kOp, made[kPlanStatus], stream);
  const auto& status = *reinterpret_cast<const PlanStatus*>(numbers.wait(kOp));
  if (status.bad_count > 0) {
    throw_bad_ids({.op = kOp,
                   .rows = rows,
                   .id = status.bad_id,
                   .position = status.bad_position,
                   .bad_count = status.bad_count,
                   .count = status.count});
  }
  made.push_back(view_of_list(made[0], 0, status.distinct));
  made.push_back(view_of_list(made[0], 0, status.distinct + (padding >= 0)));
  if (moved) made.push_back(moved->second);
  return made;
}

// Returns the results of count_batch, followed by the rows of load_rows.
Tensors load_batch(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                   const Tensor& index, int64_t rows, int64_t padding, bool evicts) {
  constexpr const char* kOp = "load_batch";
  const Arguments all(kOp, {written("host", host, false), read("index", index)});
  check_fields(kOp, "leaving", leaving.size());
  all.check_memory();
  Tensors made = count_batch(index, leaving[0], rows, padding);
  const Tensors found = load_rows(host, leaving, evict, made[kLoaded], evicts);
  made.insert(made.begin() + kLoaded + 1, found.begin(), found.end());
  return made;
}

// For speedtorch/step/row_store.py.
const Ops kOps{
    {"count_batch(Tensor index, Tensor like, int rows, int padding) -> Tensor[]",
     TORCH_BOX(&count_batch)},
    {"load_rows(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor evict, Tensor load, bool "
     "evicts=True) -> Tensor[]",
     TORCH_BOX(&load_rows)},
    {"load_batch(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor evict, Tensor index, int rows, "
     "int padding, bool evicts=True) -> Tensor[]",
     TORCH_BOX(&load_batch)},
};

}  // namespace
}  // namespace speedtorch
