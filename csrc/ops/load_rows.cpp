// load_rows: rows of a table arrive in new memory while others leave. load_batch: the same for ids
// that it plans first. Both are how a step begins.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/registration.h"
#include "ops/begin_step.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

Tensor first(const Tensor& list, int64_t count) {
  return torch::stable::narrow(const_cast<Tensor&>(list), 0, 0, count);
}

// A row of each of the ids `load`, field by field, as those of `leaving` are held; the first rows
// of `leaving` go to the ids `evict`.
Tensors load_rows(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                  const Tensor& load) {
  constexpr const char* kOp = "load_rows";
  const Arguments all(kOp, {read("leaving", leaving), read("load", load)});
  Tensors made;
  for (size_t k = 0; k < leaving.size(); ++k) {
    as_rows(kOp, item("leaving", k).c_str(), leaving[k]);
    std::vector<int64_t> shape = shape_of(leaving[k]);
    shape[0] = load.numel();
    made.push_back(new_tensor(kOp, shape, leaving[k].scalar_type(), leaving[k]));
  }
  exchange(host, leaving, evict, made, load);
  return made;
}

// The plan of `index`, the distinct ids without and with the padding, rows as load_rows gives them,
// and a copy of `index`. On the CPU alone: on a GPU the host would wait for the plan here.
Tensors load_batch(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                   const Tensor& index, int64_t rows, int64_t padding) {
  constexpr const char* kOp = "load_batch";
  constexpr size_t kPlan = 5;  // tensors of a plan
  const Arguments all(kOp, {written("host", host, false), read("index", index)});
  check_fields(kOp, "leaving", leaving.size());
  if (!index.is_cpu()) throw_value_error(kOp, "index must be on the CPU");
  check_same_device(kOp, "index", index, "leaving[0]", leaving[0]);
  all.check_memory();
  Tensors made = plan_batch(index, rows, padding, -1, std::nullopt, std::nullopt);
  const auto& counts = *reinterpret_cast<const PlanStatus*>(data_of(made[kPlan - 1]));
  const Tensor named = first(made[0], counts.distinct);
  const Tensor loaded = padding < 0 ? named : first(made[0], counts.distinct + 1);
  Tensors found = load_rows(host, leaving, evict, loaded);
  found.insert(found.begin(), {named, loaded});
  made.insert(made.begin() + kPlan, found.begin(), found.end());
  return made;
}

// For speedtorch/step/row_store.py.
const Ops kOps{
    {"load_rows(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor evict, Tensor load) -> Tensor[]",
     TORCH_BOX(&load_rows)},
    {"load_batch(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor evict, Tensor index, int rows, "
     "int padding) -> Tensor[]",
     TORCH_BOX(&load_batch)},
};

}  // namespace
}  // namespace speedtorch
