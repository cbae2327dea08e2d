// hold_rows: the rows of one batch replace the held rows of the batch before. diff_ids lists the
// kept and evicted rows; new rows are loaded before the call. This file has the checks and the CPU
// loops; the GPU kernels are in hold_rows.cu.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "call/arguments.h"
#include "core/gpu.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "move/cpu_copy.h"
#include "ops/launchers.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "hold_rows";

std::vector<HeldField> check_held(const Tensors& held, const Tensors& incoming,
                                  const Tensors& evicted, const Tensor& held_ids) {
  check_fields(kOp, "held", held.size());
  if (incoming.size() != held.size() || (!evicted.empty() && evicted.size() != held.size())) {
    throw_value_error(
        kOp, "held, incoming and evicted must have the same length (evicted may be empty), got ",
        held.size(), ", ", incoming.size(), " and ", evicted.size());
  }
  std::vector<HeldField> fields(held.size());
  for (size_t k = 0; k < held.size(); ++k) {
    auto check_side = [&](const char* list, const Tensor& side) {
      const std::string name = item(list, k);
      const Rows rows = as_rows_like(kOp, name.c_str(), side, item("held", k).c_str(), held[k],
                                     "held_ids", held_ids);
      if (rows.count == held_ids.numel()) return rows;
      throw_value_error(kOp, name, " has ", rows.count, " rows, expected ", held_ids.numel(),
                        ", the length of held_ids");
    };
    fields[k].held = check_side("held", held[k]);
    fields[k].incoming = check_side("incoming", incoming[k]);
    if (!evicted.empty()) fields[k].evicted = check_side("evicted", evicted[k]);
  }
  return fields;
}

void hold_on_cpu(const std::vector<HeldField>& fields, const HeldChanges& changes,
                 const HeldIds& ids, const Arguments& all) {
  const int64_t named = check_count(kOp, "counts[0]", changes.counts[0], changes.max_named);
  const int64_t kept = check_count(kOp, "counts[1]", changes.counts[1], ids.size);
  const int64_t evicted = check_count(kOp, "counts[3]", changes.counts[3], ids.size);
  check_places_on_cpu(kOp, "kept_places", changes.kept_places, kept, ids.size);
  check_places_on_cpu(kOp, "kept_from", changes.kept_from, kept, ids.size);
  check_places_on_cpu(kOp, "evicted_places", changes.evicted_places, evicted, ids.size);
  all.mark_written();
  for (const HeldField& field : fields) {
    const Rows &held = field.held, &incoming = field.incoming;
    move_on_cpu(held, changes.kept_from, incoming, changes.kept_places, kept);
    move_on_cpu(held, changes.evicted_places, field.evicted, nullptr,
                std::min(evicted, field.evicted.count));
    const int64_t empty_bytes = (ids.size - named) * incoming.row_bytes;
    if (empty_bytes > 0) std::memset(incoming.row(named), 0, static_cast<size_t>(empty_bytes));
  }
  for (const HeldField& field : fields) {
    move_on_cpu(field.incoming, nullptr, field.held, nullptr, ids.size);
  }
  std::copy(ids.ids, ids.ids + named, ids.held_ids);
  std::fill(ids.held_ids + named, ids.held_ids + ids.size, kNoId);
  if (ids.saved_count != nullptr) {
    std::copy(ids.evicted_ids, ids.evicted_ids + ids.size, ids.saved_ids);
    *ids.saved_count = evicted;
  }
  *ids.status = status_of_distinct(named, ids.status->rows);
}

void hold_rows(const Tensors& held, const Tensors& incoming, const Tensors& evicted,
               const Tensor& kept_places, const Tensor& kept_from, const Tensor& evicted_ids,
               const Tensor& evicted_places, const Tensor& counts, const Tensor& ids,
               const Tensor& held_ids, const Tensor& held_status, const Tensor& saved_ids,
               const Tensor& saved_count) {
  const Arguments all(
      kOp, {written("held", held, true), written("incoming", incoming, true),
            written("evicted", evicted, true), read("kept_places", kept_places),
            read("kept_from", kept_from), read("evicted_ids", evicted_ids),
            read("evicted_places", evicted_places), read("counts", counts), read("ids", ids),
            written("held_ids", held_ids), written("held_status", held_status),
            written("saved_ids", saved_ids), written("saved_count", saved_count)});
  auto check_as_list = [&](const char* name, const Tensor& list, int64_t size) {
    check_list(kOp, name, list, "held_ids", held_ids, size);
  };
  const int64_t rows = held_ids.numel();
  check_as_list("held_ids", held_ids, rows);
  check_as_list("held_status", held_status, kPlanStatusFields);
  check_as_list("kept_places", kept_places, rows);
  check_as_list("kept_from", kept_from, rows);
  check_as_list("evicted_ids", evicted_ids, rows);
  check_as_list("evicted_places", evicted_places, rows);
  check_as_list("saved_ids", saved_ids, rows);
  check_as_list("saved_count", saved_count, 1);
  check_as_list("counts", counts, 4);
  check_as_list("ids", ids, ids.numel());
  const std::vector<HeldField> fields = check_held(held, incoming, evicted, held_ids);
  all.check_memory();
  const HeldChanges changes{.kept_places = data_of(kept_places),
                            .kept_from = data_of(kept_from),
                            .evicted_places = data_of(evicted_places),
                            .counts = data_of(counts),
                            .max_named = std::min(rows, ids.numel())};
  const HeldIds now{.ids = data_of(ids),
                    .held_ids = data_of(held_ids),
                    .status = reinterpret_cast<PlanStatus*>(data_of(held_status)),
                    .size = rows,
                    .evicted_ids = data_of(evicted_ids),
                    .saved_ids = data_of(saved_ids),
                    .saved_count = evicted.empty() ? nullptr : data_of(saved_count)};
  if (held_ids.is_cpu()) return hold_on_cpu(fields, changes, now, all);
  const CurrentStream stream(kOp, held_ids);
  all.mark_written();
  if constexpr (kWithCuda) {
    auto for_field_groups = [&](auto launch) {
      for (size_t first = 0; first < fields.size(); first += kFieldsPerLaunch) {
        const auto field_count = std::min<size_t>(fields.size() - first, kFieldsPerLaunch);
        check_cuda(launch(first, static_cast<int>(field_count)), kOp);
      }
    };
    for_field_groups([&](size_t first, int count) {
      return launch_complete_incoming(&fields[first], count, changes, stream.get());
    });
    for_field_groups([&](size_t first, int count) {
      return launch_take_over(&fields[first], count, changes, first == 0 ? &now : nullptr,
                              stream.get());
    });
  }
}

const Ops kOps{
    {"hold_rows(Tensor(a! -> *)[] held, Tensor(b! -> *)[] incoming, Tensor(c! -> *)[] evicted, "
     "Tensor "
     "kept_places, Tensor kept_from, Tensor evicted_ids, Tensor evicted_places, Tensor counts, "
     "Tensor "
     "ids, Tensor(d!) held_ids, Tensor(e!) held_status, Tensor(f!) saved_ids, Tensor(g!) "
     "saved_count) -> ()",
     TORCH_BOX(&hold_rows)},
};

}  // namespace
}  // namespace speedtorch
