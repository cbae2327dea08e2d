// optimizer_state_swap: rows of `evict` leave for host fields while rows of `load` arrive; rows in
// both lists pass from leaving to arriving and do not touch the host. Checks, the CPU kernel and
// the choice of path; GPU kernels: .cu.

#include "ops/optimizer_state_swap_launch.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/rows.h"
#include "memory/host_blocks.h"
#include "move/cost_model.h"
#include "ops/pinned_gather_launch.h"
#include "ops/pinned_scatter_launch.h"
#include "ops/swap_rows.h"
#include "plan/claims.h"
#include "plan/placed_ids.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "optimizer_state_swap";
constexpr int64_t kBytesPerTask = int64_t{64} << 10;  // a thread's share that is worth waking it

using Plan = std::optional<Tensors>;

// For ids that lie on the CPU, whose plan is there too.
void check_distinct(const char* list, const PlanView& plan, int64_t rows) {
  const PlanStatus& status = *plan.status;
  if (status.distinct == status.count) return;
  throw_bad_ids({.kind = LetterKind::kRepeated,
                 .op = kOp,
                 .list = list,
                 .rows = rows,
                 .id = status.repeat_id,
                 .position = status.repeat_position,
                 .bad_count = status.count - status.distinct,
                 .count = status.count});
}

void swap_on_cpu(const std::vector<SwapRows>& fields, const PlanView& evict, const PlanView& load) {
  int64_t record_bytes = 1;
  for (const SwapRows& field : fields) record_bytes += field.host.row_bytes;
  const int64_t entries_per_task = kBytesPerTask / record_bytes + 1;
  const int64_t* evict_end = evict.unique + evict.count;
  const int64_t* load_end = load.unique + load.count;
  auto move = [](char* to, const char* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  };
  torch::stable::parallel_for(0, load.count, entries_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const int64_t id = load.unique[m];
      const int64_t* found = std::lower_bound(evict.unique, evict_end, id);
      const bool stays = found != evict_end && *found == id;
      for (const SwapRows& field : fields) {
        const char* from =
            stays ? field.leaving.row(evict.order[found - evict.unique]) : field.host.row(id);
        if (field.host.row_bytes > 0)
          move(field.arriving.row(load.order[m]), from, field.host.row_bytes);
      }
    }
  });
  torch::stable::parallel_for(0, evict.count, entries_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const int64_t id = evict.unique[m];
      if (std::binary_search(load.unique, load_end, id)) continue;
      for (const SwapRows& field : fields) {
        if (field.host.row_bytes > 0)
          move(field.host.row(id), field.leaving.row(evict.order[m]), field.host.row_bytes);
      }
    }
  });
}

// Whether a row of one field begins within the first two rows of another, as those of a record do.
bool lies_among(const Rows& field, const Rows& other) {
  const char* end = other.base + other.stride_bytes;
  return field.stride_bytes == other.stride_bytes && field.base > other.base && field.base < end &&
         other.count > 1;
}

void launch_fields(const Tensors& host, const std::vector<SwapRows>& fields, size_t first,
                   const PlanView& evict, const PlanView& load, const SwapScratch& scratch,
                   const CurrentStream& stream) {
  const size_t last = std::min(fields.size(), first + kFieldsPerLaunch);
  std::vector<SwapField> some;
  bool crosses_link = false;
  for (size_t k = first; k < last; ++k) {
    some.push_back({.host = fields[k].host.base,
                    .host_stride_bytes = fields[k].host.stride_bytes,
                    .leaving = fields[k].leaving.base,
                    .arriving = fields[k].arriving.base,
                    .row_bytes = fields[k].host.row_bytes});
    crosses_link |= !host[k].is_cuda();
  }
  if constexpr (kWithCuda) {
    check_cuda(launch_swap(some.data(), static_cast<int>(some.size()), fields[0].host.count, evict,
                           load, scratch, crosses_link ? swap_sms() : kDeviceBlocks,
                           first == 0 ? letter_box() : nullptr, stream.get()),
               kOp);
  }
  for (size_t k = first; k < last; ++k) {
    // Fields of one record are one piece of memory.
    const bool noted = k > first && lies_among(fields[k].host, fields[first].host);
    if (!noted) note_use(host[k], fields[k].host, stream.get());
  }
}

void swap_on_gpu(const Tensors& host, const std::vector<SwapRows>& fields, const PlanView& evict,
                 const PlanView& load, const Tensor& on, const CurrentStream& stream,
                 const Arguments& all) {
  if constexpr (kWithCuda) {
    const int64_t load_bytes = load.count * static_cast<int64_t>(sizeof(int64_t));
    const Tensor matched = new_tensor(kOp, {load_bytes + evict.count}, ScalarType::Byte, on);
    auto* memory = static_cast<char*>(matched.data_ptr());
    const SwapScratch scratch{.arrives_from = reinterpret_cast<int64_t*>(memory),
                              .stays = reinterpret_cast<uint8_t*>(memory + load_bytes)};
    check_cuda(launch_swap_match(evict, load, scratch, stream.get()), kOp);
    all.mark_written();
    for (size_t first = 0; first < fields.size(); first += kFieldsPerLaunch) {
      launch_fields(host, fields, first, evict, load, scratch, stream);
    }
  }
}

// Whether the GPU reaches every field where it is.
bool all_mapped(const Tensors& host, const std::vector<SwapRows>& fields) {
  bool mapped = true, on_gpu = false;
  for (size_t k = 0; k < host.size(); ++k) {
    const Reach reach = reach_of(kOp, host[k], fields[k].host);
    mapped &= reach != Reach::kNot;
    on_gpu |= reach == Reach::kOnGpu;
  }
  if (!mapped && on_gpu) {
    throw_value_error(kOp,
                      "some host fields are on the GPU and others in pageable memory, which the "
                      "CPU would have to move; pin those with speedtorch.pin_memory_(field)");
  }
  return mapped;
}

constexpr const char* kPinIt =
    "a host field is in pageable memory, which takes the host; pin it with "
    "speedtorch.pin_memory_(field) or keep it in a HostTable";

// Ids on the CPU in address order, from the user's plan or a new one; refuses ids that stand twice.
struct CpuPlan {
  Tensors made;
  PlanView view;
};

CpuPlan plan_on_cpu(const char* list, const Ids& ids, const Plan& plan, int64_t rows) {
  check_ids_on_cpu(kOp, list, ids, rows);
  CpuPlan result{.made = plan ? *plan : make_plan(kOp, ids, rows, ids.keep, nullptr), .view = {}};
  result.view = view_plan(kOp, list, result.made, ids.count, rows);
  if (plan) check_plan_of(kOp, list, result.view, ids);
  check_distinct(list, result.view, rows);
  return result;
}

// The rows of both sides on the CPU, as long as the lists of ids; `take` brings a side's rows
// there.
struct Staged {
  Tensors leaving, arriving;
  std::vector<SwapRows> fields;
};

template <typename Take>
Staged stage(const Tensors& host, const Tensors& leaving, int64_t evicted, const Tensors& arriving,
             int64_t loaded, const Take& take) {
  Staged staged;
  for (size_t k = 0; k < host.size(); ++k) {
    staged.leaving.push_back(copy_to_cpu(kOp, take(leaving[k])));
    std::vector<int64_t> shape = shape_of(arriving[k]);
    shape[0] = loaded;
    staged.arriving.push_back(new_pinned(kOp, shape, arriving[k]));
  }
  staged.fields = check_swap(kOp, host, staged.leaving, staged.arriving, evicted, loaded);
  return staged;
}

Tensor first_rows(const Tensor& side, int64_t rows) {
  return torch::stable::narrow(const_cast<Tensor&>(side), 0, 0, rows);
}

void swap_staged(const Tensors& host, const Tensors& leaving, const Ids& evict,
                 const Plan& evict_plan, const Tensors& arriving, const Ids& load,
                 const Plan& load_plan, const CurrentStream& stream, const Arguments& all) {
  stream.refuse_capture(kOp, kPinIt);
  // Fields that the GPU reaches may have been written by work that is still queued.
  copy_to_cpu(kOp, new_tensor(kOp, {1}, ScalarType::Byte, arriving[0]));
  const int64_t rows = host[0].size(0);
  const Ids evict_ids = as_ids(copy_to_cpu(kOp, evict.keep));
  const Ids load_ids = as_ids(copy_to_cpu(kOp, load.keep));
  const CpuPlan evict_made = plan_on_cpu("evict", evict_ids, std::nullopt, rows);
  const CpuPlan load_made = plan_on_cpu("load", load_ids, std::nullopt, rows);
  if (evict_plan) check_plan_on_cpu(kOp, "evict", *evict_plan, evict.count, rows);
  if (load_plan) check_plan_on_cpu(kOp, "load", *load_plan, load.count, rows);
  const Staged staged = stage(host, leaving, evict.count, arriving, load.count,
                              [&](const Tensor& side) { return first_rows(side, evict.count); });
  all.mark_written();
  swap_on_cpu(staged.fields, evict_made.view, load_made.view);
  for (size_t k = 0; k < host.size(); ++k) {
    copy_async(kOp, staged.arriving[k], first_rows(arriving[k], load.count));
  }
}

void swap(const Tensors& host, const Tensors& leaving, const Tensor& evict, const Plan& evict_plan,
          const Tensors& arriving, const Tensor& load, const Plan& load_plan) {
  const Arguments all(kOp, {written("host", host, evict.numel() > 0), read("leaving", leaving),
                            read("evict", evict), read("evict_plan", evict_plan),
                            written("arriving", arriving, load.numel() > 0), read("load", load),
                            read("load_plan", load_plan)});
  check_ids_kind(kOp, "evict", evict);
  check_ids_kind(kOp, "load", load);
  const std::vector<SwapRows> fields =
      check_swap(kOp, host, leaving, arriving, evict.numel(), load.numel());
  const Tensor& on = arriving[0];
  const int64_t rows = fields[0].host.count;
  check_device(kOp, "evict", evict, "arriving[0]", on);
  check_device(kOp, "load", load, "arriving[0]", on);
  if (evict_plan) check_plan(kOp, "evict", *evict_plan, evict.numel(), on);
  if (load_plan) check_plan(kOp, "load", *load_plan, load.numel(), on);
  all.check_memory();
  if (on.is_cpu()) {
    const CpuPlan evict_made = plan_on_cpu("evict", as_ids(evict), evict_plan, rows);
    const CpuPlan load_made = plan_on_cpu("load", as_ids(load), load_plan, rows);
    all.mark_written();
    return swap_on_cpu(fields, evict_made.view, load_made.view);
  }
  const CurrentStream stream(kOp, on);
  const bool mapped = all_mapped(host, fields);
  Ids evict_ids = as_ids(evict), load_ids = as_ids(load);
  if (!mapped) {
    return swap_staged(host, leaving, evict_ids, evict_plan, arriving, load_ids, load_plan, stream,
                       all);
  }
  // Ids on the CPU are checked there, for repetitions too.
  if (evict_ids.on_cpu) plan_on_cpu("evict", evict_ids, std::nullopt, rows);
  if (load_ids.on_cpu) plan_on_cpu("load", load_ids, std::nullopt, rows);
  auto planned = [&](const char* list, Ids& ids, const Plan& plan) {
    if (ids.on_cpu) ids = as_ids(ids_to_device(kOp, ids, on, stream));
    Tensors made = plan ? *plan : make_plan(kOp, ids, rows, ids.keep, stream.get());
    const PlanView view = view_plan(kOp, list, made, ids.count, rows);
    return std::pair{std::move(made), view};
  };
  const auto [evict_made, evict_view] = planned("evict", evict_ids, evict_plan);
  const auto [load_made, load_view] = planned("load", load_ids, load_plan);
  swap_on_gpu(host, fields, evict_view, load_view, on, stream, all);
}

// ------------------------------------------------------------------------------------------------
// With places

// A side's ids and the places of their rows, of which there are `side_rows`.
PlacedList leaves(const Tensor& evict, const Tensor& places, int64_t side_rows) {
  return {.list = IdList::kEvict,
          .ids_name = "evict",
          .places_name = "evict_places",
          .ids = evict,
          .places = places,
          .side_rows = side_rows};
}

PlacedList comes(const Tensor& load, const Tensor& places, int64_t side_rows) {
  return {.list = IdList::kLoad,
          .ids_name = "load",
          .places_name = "load_places",
          .ids = load,
          .places = places,
          .side_rows = side_rows};
}

void check_side_rows(const std::vector<SwapRows>& fields) {
  for (size_t k = 1; k < fields.size(); ++k) {
    auto check_rows = [&](const char* side, const Rows& field, const Rows& first) {
      if (field.count == first.count) return;
      throw_value_error(kOp, std::string(side) + "[" + std::to_string(k) + "] has " +
                                 std::to_string(field.count) + " rows, " + side + "[0] has " +
                                 std::to_string(first.count) + "; places are those of all fields");
    };
    check_rows("leaving", fields[k].leaving, fields[0].leaving);
    check_rows("arriving", fields[k].arriving, fields[0].arriving);
  }
}

// Both of checked places, between rows on the GPU.
Tensor rows_at(const Tensor& side, const Tensor& places, const CurrentStream& stream) {
  std::vector<int64_t> shape = shape_of(side);
  shape[0] = places.numel();
  const Tensor rows = new_tensor(kOp, shape, side.scalar_type(), side);
  if (rows.numel() == 0) return rows;
  if constexpr (kWithCuda) {
    const Rows from = as_rows(kOp, "leaving", side);
    const GatherRows work{.table = from.base,
                          .table_rows = from.count,
                          .table_stride_bytes = from.row_bytes,
                          .out = static_cast<char*>(rows.mutable_data_ptr()),
                          .row_bytes = from.row_bytes,
                          .count = places.numel()};
    const Claims checked = check_ids_on_gpu(kOp, as_ids(places), from.count, side, stream.get());
    check_cuda(launch_gather_direct(work, checked.view, kDeviceBlocks, letter_box(), stream.get()),
               kOp);
  }
  return rows;
}

void put_rows_at(const Tensor& side, const Tensor& places, const Tensor& staged,
                 const CurrentStream& stream) {
  if (staged.numel() == 0) return;
  const Tensor rows = new_tensor(kOp, shape_of(staged), side.scalar_type(), side);
  copy_async(kOp, staged, rows);
  if constexpr (kWithCuda) {
    const Rows to = as_rows(kOp, "arriving", side);
    const ScatterRows work{.table = to.base,
                           .table_rows = to.count,
                           .table_stride_bytes = to.row_bytes,
                           .src = static_cast<const char*>(rows.data_ptr()),
                           .src_stride_bytes = to.row_bytes,
                           .row_bytes = to.row_bytes};
    const Claims claims =
        make_claims(kOp, as_ids(places), Winner::kLast, to.count, side, stream.get());
    check_cuda(launch_scatter_distinct(work, claims.view, gpu_mover(), letter_box(), stream.get()),
               kOp);
  }
}

Tensor ascending(int64_t count, const Tensor& on) {
  const Tensor turn = new_tensor(kOp, {count}, ScalarType::Long, on);
  std::iota(data_of(turn), data_of(turn) + count, int64_t{0});
  return turn;
}

// The rows that the lists name pass through the CPU, and no others.
void swap_placed_staged(const Tensors& host, const Tensors& leaving, const PlacedList& evict,
                        const Tensors& arriving, const PlacedList& load,
                        const CurrentStream& stream, const Arguments& all) {
  stream.refuse_capture(kOp, kPinIt);
  const int64_t evicted = evict.ids.numel(), loaded = load.ids.numel();
  const Tensor evict_ids = copy_to_cpu(kOp, evict.ids), load_ids = copy_to_cpu(kOp, load.ids);
  const Tensor from = copy_to_cpu(kOp, evict.places), to = copy_to_cpu(kOp, load.places);
  placed_ids(kOp, leaves(evict_ids, from, evict.side_rows), comes(load_ids, to, load.side_rows),
             host[0].size(0), evict_ids, nullptr);
  const Staged staged = stage(host, leaving, evicted, arriving, loaded, [&](const Tensor& side) {
    return rows_at(side, evict.places, stream);
  });
  all.mark_written();
  const Tensor evict_turn = ascending(evicted, evict_ids), load_turn = ascending(loaded, load_ids);
  const PlacedViews placed =
      placed_ids(kOp, leaves(evict_ids, evict_turn, evicted), comes(load_ids, load_turn, loaded),
                 host[0].size(0), evict_ids, nullptr);
  swap_on_cpu(staged.fields, placed.evict, placed.load);
  for (size_t k = 0; k < host.size(); ++k) {
    put_rows_at(arriving[k], load.places, staged.arriving[k], stream);
  }
}

void swap_placed(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                 const Tensor& evict_places, const Tensors& arriving, const Tensor& load,
                 const Tensor& load_places) {
  const Arguments all(kOp, {written("host", host, evict.numel() > 0), read("leaving", leaving),
                            read("evict", evict), read("evict_places", evict_places),
                            written("arriving", arriving, load.numel() > 0), read("load", load),
                            read("load_places", load_places)});
  const std::vector<SwapRows> fields = check_swap(kOp, host, leaving, arriving, 0, 0);
  check_side_rows(fields);
  const Tensor& on = arriving[0];
  const PlacedList leaves_now = leaves(evict, evict_places, fields[0].leaving.count);
  const PlacedList comes_now = comes(load, load_places, fields[0].arriving.count);
  check_placed_kinds(kOp, leaves_now, on);
  check_placed_kinds(kOp, comes_now, on);
  all.check_memory();
  const int64_t rows = fields[0].host.count;
  if (on.is_cpu()) {
    const PlacedViews placed = placed_ids(kOp, leaves_now, comes_now, rows, on, nullptr);
    all.mark_written();
    return swap_on_cpu(fields, placed.evict, placed.load);
  }
  const CurrentStream stream(kOp, on);
  if (!all_mapped(host, fields)) {
    return swap_placed_staged(host, leaving, leaves_now, arriving, comes_now, stream, all);
  }
  const PlacedViews placed = placed_ids(kOp, leaves_now, comes_now, rows, on, stream.get());
  swap_on_gpu(host, fields, placed.evict, placed.load, on, stream, all);
}

void optimizer_state_swap(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                          const Tensors& arriving, const Tensor& load) {
  swap(host, leaving, evict, std::nullopt, arriving, load, std::nullopt);
}

// An empty list stands for no plan.
void optimizer_state_swap_planned(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                                  const Tensors& evict_plan, const Tensors& arriving,
                                  const Tensor& load, const Tensors& load_plan) {
  auto plan = [](const Tensors& parts) { return parts.empty() ? Plan{} : Plan{parts}; };
  swap(host, leaving, evict, plan(evict_plan), arriving, load, plan(load_plan));
}

}  // namespace
}  // namespace speedtorch

STABLE_TORCH_LIBRARY_IMPL(speedtorch, CompositeExplicitAutograd, m) {
  m.impl("optimizer_state_swap", TORCH_BOX(&speedtorch::optimizer_state_swap));
  m.impl("optimizer_state_swap.planned", TORCH_BOX(&speedtorch::optimizer_state_swap_planned));
  m.impl("optimizer_state_swap.placed", TORCH_BOX(&speedtorch::swap_placed));
}
