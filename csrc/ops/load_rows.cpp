// load_rows: loads rows of a table into new memory while evicting others. count_batch: plans ids
// and counts the unique ones. load_batch: does both. A step without a capacity begins with one of
// these ops. join_batch: adds the ids of another lookup to a step, with the rows that it lacks.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call/arguments.h"
#include "call/host_numbers.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/parallel_for.h"
#include "core/registration.h"
#include "ops/begin_step.h"
#include "ops/launchers.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

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
  exchange(host, leaving, evict, std::nullopt, made, load, std::nullopt, evicts);
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

}  // namespace

CountedPlan counted_plan(const char* op, const Tensors& parts, const Tensor& like, int64_t rows,
                         int64_t padding, const std::optional<Tensor>& held) {
  const Tensor index = joined_ids(op, parts);
  CountedPlan counted;
  std::optional<CurrentStream> stream;
  Tensor ids = index;
  if (!like.is_cpu()) {
    stream.emplace(op, like);
    stream->check_not_capturing(op, "the number of unique ids changes from call to call");
    if (index.is_cpu()) {
      auto [there, copied] = uploaded(op, index, like);
      ids = there;
      counted.copied = copied;
    }
  }
  check_same_device(op, "index", ids, "like", like);
  std::optional<Tensor> held_status;  // empty: all held ids are valid
  if (held) held_status = view_of_list(*held, 0, 0);
  counted.made = plan_batch(ids, rows, padding, -1, held, held_status);
  if (index.is_cpu() && !stream) {
    counted.copied = counted.made.back();
    counted.made.pop_back();
  }
  std::optional<HostNumbers> numbers;
  const int64_t* status = data_of(counted.made[kPlanStatus]);
  if (stream) status = numbers.emplace(op, counted.made[kPlanStatus], *stream).wait(op);
  const auto& plan = *reinterpret_cast<const PlanStatus*>(status);
  if (plan.bad_count > 0) {
    throw_bad_ids({.op = op,
                   .rows = rows,
                   .id = plan.bad_id,
                   .position = plan.bad_position,
                   .bad_count = plan.bad_count,
                   .count = plan.count});
  }
  if (held) {
    const int64_t more = status[kPlanStatusFields + kLoadedCount] - (padding >= 0);
    counted.more = view_of_list(counted.made[kPlanStatus + 1], 0, more);
    counted.made.resize(kPlanStatus + 1);
  }
  counted.made.push_back(view_of_list(counted.made[0], 0, plan.distinct));
  counted.made.push_back(view_of_list(counted.made[0], 0, plan.distinct + (padding >= 0)));
  return counted;
}

Tensor positions_on_cpu(const char* op, const CountedPlan& plan,
                        const std::vector<int64_t>& places) {
  const Tensor& inverse = plan.made[1];
  const Tensor positions = new_tensor(op, {inverse.numel()}, ScalarType::Long, inverse);
  parallel_for(0, inverse.numel(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) data_of(positions)[i] = places[data_of(inverse)[i]];
  });
  return positions;
}

namespace {

// Returns the place of each id of a plan among the ascending `ids`; the padding's row follows them.
Tensor positions_among(const char* op, const CountedPlan& plan, const Tensor& ids,
                       int64_t padding) {
  const Tensor& unique = plan.loaded();
  const int64_t count = ids.numel();
  if (ids.is_cpu()) {
    std::vector<int64_t> places(static_cast<size_t>(unique.numel()), count);
    const int64_t *const begin = data_of(ids), *at = begin;
    for (size_t k = 0; k < places.size() - (padding >= 0); ++k) {
      at = std::lower_bound(at, begin + count, data_of(unique)[k]);
      places[k] = at - begin;
    }
    return positions_on_cpu(op, plan, places);
  }
  const Tensor& inverse = plan.made[1];
  const Tensor positions = new_tensor(op, {inverse.numel()}, ScalarType::Long, ids);
  if constexpr (kWithCuda) {
    const Positions work{.unique = data_of(unique),
                         .inverse = data_of(inverse),
                         .n = inverse.numel(),
                         .ids = data_of(ids),
                         .count = count,
                         .padding = padding,
                         .out = data_of(positions)};
    check_cuda(launch_positions(work, CurrentStream(op, ids).get()), op);
  }
  return positions;
}

// Returns the plan of `parts` on the device of `like`, the unique ids without and with the padding,
// and, if the ids are on the CPU, a copy of them. On a GPU this waits for the plan, because the
// caller allocates memory for the number of ids.
Tensors count_batch(const Tensors& parts, const Tensor& like, int64_t rows, int64_t padding) {
  constexpr const char* kOp = "count_batch";
  const Arguments all(kOp, {read("parts", parts), read("like", like)});
  all.check_memory();
  return counted_plan(kOp, parts, like, rows, padding, std::nullopt).with_copy();
}

// Returns the results of count_batch, followed by the rows of load_rows.
Tensors load_batch(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                   const Tensors& parts, int64_t rows, int64_t padding, bool evicts) {
  constexpr const char* kOp = "load_batch";
  const Arguments all(kOp, {written("host", host, false), read("parts", parts)});
  check_fields(kOp, "leaving", leaving.size());
  all.check_memory();
  CountedPlan plan = counted_plan(kOp, parts, leaving[0], rows, padding, std::nullopt);
  const Tensors found = load_rows(host, leaving, evict, plan.loaded(), evicts);
  plan.made.insert(plan.made.end(), found.begin(), found.end());
  return plan.with_copy();
}

// Plans `parts` for a step with the rows `rows` of the ids `held`, in ascending order and
// optionally followed by the padding's row. Returns the results of count_batch, then the place of
// each id in the step. If `held` lacks some of the ids, all ids follow, the places of the held ids
// among them, the new ids, their places, and memory for all rows, field by field, with the held
// rows copied in. New rows are loaded from `host`, unless that is empty. The rows `evict` are
// written to it if there are new rows.
Tensors join_batch(const Tensors& host, const Tensors& leaving, const std::optional<Tensor>& evict,
                   const std::optional<Tensor>& evict_places, const Tensors& rows,
                   const Tensor& held, const Tensors& parts, int64_t table_rows, int64_t padding) {
  constexpr const char* kOp = "join_batch";
  const Arguments all(kOp, {written("host", host, false), read("rows", rows), read("held", held),
                            read("parts", parts)});
  check_fields(kOp, "rows", rows.size());
  all.check_memory();
  CountedPlan plan = counted_plan(kOp, parts, held, table_rows, padding, held);
  if (plan.more.numel() == 0) {
    plan.made.push_back(positions_among(kOp, plan, held, padding));
    return plan.with_copy();
  }
  Tensors merged = merge_rows(rows, held, plan.more);
  const Tensor new_places = merged[2];
  const Tensors made(merged.begin() + 3, merged.end());
  if (!host.empty()) {
    exchange(host, evict ? leaving : rows, evict ? *evict : view_of_list(held, 0, 0), evict_places,
             made, plan.more, new_places, /*evicts=*/true);
  }
  plan.made.insert(plan.made.end(), {positions_among(kOp, plan, merged[0], padding), merged[0],
                                     merged[1], plan.more, new_places});
  plan.made.insert(plan.made.end(), made.begin(), made.end());
  return plan.with_copy();
}

// For speedtorch/step/row_store.py.
const Ops kOps{
    {"count_batch(Tensor[] parts, Tensor like, int rows, int padding) -> Tensor[]",
     TORCH_BOX(&count_batch)},
    {"load_rows(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor evict, Tensor load, bool "
     "evicts=True) -> Tensor[]",
     TORCH_BOX(&load_rows)},
    {"load_batch(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor evict, Tensor[] parts, int "
     "rows, int padding, bool evicts=True) -> Tensor[]",
     TORCH_BOX(&load_batch)},
    {"join_batch(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor? evict, Tensor? evict_places, "
     "Tensor[] rows, Tensor held, Tensor[] parts, int table_rows, int padding) -> Tensor[]",
     TORCH_BOX(&join_batch)},
};

}  // namespace
}  // namespace speedtorch
