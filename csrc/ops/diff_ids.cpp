// diff_ids: lists the rows to load, keep and evict when a batch with a capacity replaces held rows.
// A batch that does not fit is recorded in `halt` and `fault`, so that no host waits. This file has
// the checks and the CPU loops; the GPU kernels are in diff_ids.cu.

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "call/torch_calls.h"
#include "core/registration.h"
#include "memory/host_memory.h"
#include "ops/diff_ids.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "diff_ids";
constexpr size_t kNamedLists = 4, kLists = 6;  // lists as long as `named` come first

int64_t checked_count(const char* op, const char* name, const SortedIds& list) {
  if (list.count == nullptr) return list.size;
  if (*list.count >= 0 && *list.count <= list.size) return *list.count;
  throw_value_error(op, name, " must report 0 to ", list.size,
                    " unique ids, the length of its list, got ", *list.count);
}

void diff_on_cpu(const SortedIds& named, int64_t named_count, const SortedIds& held,
                 int64_t held_count, const IdDiff& out) {
  int64_t loaded = 0, kept = 0, evicted = 0;
  for (int64_t i = 0, j = 0; i < named_count || j < held_count;) {
    const bool is_named = j >= held_count || (i < named_count && named.ids[i] <= held.ids[j]);
    if (is_named && j < held_count && named.ids[i] == held.ids[j]) {
      out.keep_places[kept] = i++;
      out.keep_from[kept++] = j++;
    } else if (is_named) {
      out.load_ids[loaded] = named.ids[i];
      out.load_places[loaded++] = i++;
    } else {
      out.evict_ids[evicted] = held.ids[j];
      out.evict_places[evicted++] = j++;
    }
  }
  if (out.padding >= 0) {
    out.load_ids[loaded] = out.padding;
    out.load_places[loaded++] = named_count;
  }
  out.counts[0] = named_count;
  out.counts[1] = kept;
  out.counts[2] = loaded;
  out.counts[3] = evicted;
}

}  // namespace

SortedIds check_sorted_ids(const char* op, const char* name, const Tensor& ids,
                           const char* status_name, const Tensor& status, const char* on_name,
                           const Tensor& on) {
  check_list(op, name, ids, on_name, on);
  check_list(op, status_name, status, on_name, on);
  if (status.numel() == 0) return {.ids = data_of(ids), .size = ids.numel(), .count = nullptr};
  check_status(op, status_name, status);
  return {.ids = data_of(ids),
          .size = ids.numel(),
          .count = &reinterpret_cast<PlanStatus*>(data_of(status))->distinct};
}

Tensors diff(const char* op, const SortedIds& named, const SortedIds& held, int64_t padding,
             const Fitting* fitting, int64_t* counts, const Tensor& on,
             const std::optional<CurrentStream>& stream, const Arguments& all) {
  if (named.size + held.size > std::numeric_limits<int32_t>::max()) {
    throw_value_error(op, "named and held must have at most 2^31 - 1 entries together, got ",
                      named.size + held.size);
  }
  int64_t named_count = 0, held_count = 0;
  if (on.is_cpu()) {
    named_count = checked_count(op, "named_status", named);
    held_count = checked_count(op, "held_status", held);
  }
  const int64_t named_size = fitting != nullptr ? fitting->capacity : named.size;
  std::vector<int64_t> sizes(kLists, held.size);
  std::fill_n(sizes.begin(), kNamedLists, named_size);
  const Tensors made = new_lists(op, sizes, on, fitting == nullptr);
  const IdDiff out{.load_ids = data_of(made[0]),
                   .load_places = data_of(made[1]),
                   .keep_places = data_of(made[2]),
                   .keep_from = data_of(made[3]),
                   .evict_ids = data_of(made[4]),
                   .evict_places = data_of(made[5]),
                   .counts = counts,
                   .padding = padding};
  if (!stream) {
    all.mark_written();
    if (fitting != nullptr) {
      if (!fitting->fits()) named_count = 0;
      const Misfit why = fitting->record();
      if (why != Misfit::kNone) fitting->fault->kind = static_cast<int64_t>(why);
    }
    diff_on_cpu(named, named_count, held, held_count, out);
  } else if constexpr (kWithCuda) {
    const int64_t bytes = diff_scratch_bytes(named.size, held.size);
    const Tensor scratch = new_tensor(op, {bytes}, ScalarType::Byte, on);
    all.mark_written();
    check_cuda(launch_diff_ids(named, held, fitting, out, scratch.data_ptr(), bytes, stream->get()),
               op);
  }
  return made;
}

namespace {

// The lists of IdDiff and its counts. Not a Tensor[], because torch.compile does not support this
// result for an op that writes to its arguments.
using Diff = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Diff diff_ids(const Tensor& named, const Tensor& named_status, const Tensor& held,
              const Tensor& held_status, int64_t table_rows, const Tensor& halt,
              const Tensor& fault) {
  const Arguments all(
      kOp, {read("named", named), read("named_status", named_status), read("held", held),
            read("held_status", held_status), written("halt", halt), written("fault", fault)});
  const SortedIds now =
      check_sorted_ids(kOp, "named", named, "named_status", named_status, "named", named);
  check_status(kOp, "named_status", named_status);
  const SortedIds before =
      check_sorted_ids(kOp, "held", held, "held_status", held_status, "named", named);
  check_status(kOp, "held_status", held_status);
  check_list(kOp, "halt", halt, "named", named, 2);
  check_list(kOp, "fault", fault, "named", fault.is_cpu() ? fault : named, kFaultFields);
  all.check_memory();
  std::optional<CurrentStream> stream;
  if (!named.is_cpu()) stream.emplace(kOp, named);
  const Rows word = as_rows(kOp, "fault", fault);
  if (stream && gpu_access(kOp, fault, word, stream->device()) == Access::kNot) {
    throw_value_error(kOp,
                      "fault is in pageable memory, which the GPU cannot write to. Pin it with "
                      "speedtorch.pin_memory_(fault)");
  }
  const Fitting fitting{.status = reinterpret_cast<PlanStatus*>(data_of(named_status)),
                        .capacity = held.numel(),
                        .table_rows = table_rows,
                        .halt = data_of(halt),
                        .fault = reinterpret_cast<Fault*>(data_of(fault))};
  const Tensor counts = new_tensor(kOp, {kChangeCounts}, ScalarType::Long, named);
  auto made_of = [&] {
    Tensors made = diff(kOp, now, before, -1, &fitting, data_of(counts), named, stream, all);
    return Diff{made[0], made[1], made[2], made[3], made[4], made[5], counts};
  };
  if (!stream) return made_of();
  TableUse use{fault, word, stream->queue()};
  Diff made = made_of();
  use.note();
  return made;
}

// For speedtorch/plan/fixed_size_batch.py.
const Ops kOps{
    {"diff_ids(Tensor named, Tensor named_status, Tensor held, Tensor held_status, int "
     "table_rows, Tensor(a!) halt, Tensor(b!) fault) -> (Tensor, Tensor, Tensor, Tensor, "
     "Tensor, Tensor, Tensor)",
     TORCH_BOX(&diff_ids)},
};

}  // namespace
}  // namespace speedtorch
