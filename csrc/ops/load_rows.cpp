// load_rows: rows of a table arrive in new memory while others leave. load_batch: the same for ids
// that it plans first. Both are how a step begins.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <utility>
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

// The plan of `index`; a copy of it, or itself where it is on a GPU; the distinct ids without and
// with the padding; and rows as load_rows gives them. If ids on a GPU are out of range no row has
// moved, and behind the plan comes its status alone, on the CPU.
Tensors load_batch(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                   const Tensor& index, int64_t rows, int64_t padding) {
  constexpr const char* kOp = "load_batch";
  constexpr size_t kStatus = 4;  // among the tensors of a plan
  const Arguments all(kOp, {written("host", host, false), read("index", index)});
  check_fields(kOp, "leaving", leaving.size());
  all.check_memory();
  check_same_device(kOp, "index", index, "leaving[0]", leaving[0]);
  Tensors made = plan_batch(index, rows, padding, -1, std::nullopt, std::nullopt);
  const Tensor status = index.is_cpu() ? made[kStatus] : copy_to_cpu(kOp, made[kStatus]);
  const auto& counts = *reinterpret_cast<const PlanStatus*>(data_of(status));
  if (counts.bad_count > 0) {
    made.push_back(status);
    return made;
  }
  if (!index.is_cpu()) made.push_back(index);
  const Tensor named = first(made[0], counts.distinct);
  made.push_back(named);
  made.push_back(padding < 0 ? named : first(made[0], counts.distinct + 1));
  for (Tensor& each : load_rows(host, leaving, evict, made.back())) made.push_back(std::move(each));
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
