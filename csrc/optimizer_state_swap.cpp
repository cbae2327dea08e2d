// optimizer_state_swap: rows of `evict` leave for host fields while rows of `load` arrive; rows in
// both lists pass from leaving to arriving and do not touch the host. Checks, the CPU kernel and
// the choice of path; GPU kernels: .cu.

#include "optimizer_state_swap_launch.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "cost_model.h"
#include "gpu.h"
#include "host_blocks.h"
#include "placed_ids.h"
#include "plan.h"
#include "rows.h"
#include "swap_rows.h"
#include "torch_calls.h"

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

void swap_on_gpu(const Tensors& host, const std::vector<SwapRows>& fields, const PlanView& evict,
                 const PlanView& load, const Tensor& on, const CurrentStream& stream) {
  if constexpr (kWithCuda) {
    const int64_t load_bytes = load.count * static_cast<int64_t>(sizeof(int64_t));
    const Tensor matched = new_tensor(kOp, {load_bytes + evict.count}, ScalarType::Byte, on);
    auto* memory = static_cast<char*>(matched.data_ptr());
    const SwapScratch scratch{.arrives_from = reinterpret_cast<int64_t*>(memory),
                              .stays = reinterpret_cast<uint8_t*>(memory + load_bytes)};
    check_cuda(launch_swap_match(evict, load, scratch, stream.get()), kOp);
    for (size_t first = 0; first < fields.size(); first += kFieldsPerLaunch) {
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
      check_cuda(launch_swap(some.data(), static_cast<int>(some.size()), fields[0].host.count,
                             evict, load, scratch, crosses_link ? swap_sms() : kDeviceBlocks,
                             first == 0 ? letter_box() : nullptr, stream.get()),
                 kOp);
      for (size_t k = first; k < last; ++k) {
        // Fields of one record are one piece of memory.
        const bool noted = k > first && lies_among(fields[k].host, fields[first].host);
        if (!noted) note_use(host[k], fields[k].host, stream.get());
      }
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

void swap_staged(const Tensors& host, const Tensors& leaving, const Ids& evict,
                 const Plan& evict_plan, const Tensors& arriving, const Ids& load,
                 const Plan& load_plan, const CurrentStream& stream) {
  stream.refuse_capture(kOp, kPinIt);
  // Fields that the GPU reaches may have been written by work that is still queued.
  copy_to_cpu(kOp, new_tensor(kOp, {1}, ScalarType::Byte, arriving[0]));
  Tensors staged_leaving, staged_arriving;
  for (size_t k = 0; k < host.size(); ++k) {
    staged_leaving.push_back(copy_to_cpu(
        kOp, torch::stable::narrow(const_cast<Tensor&>(leaving[k]), 0, 0, evict.count)));
    std::vector<int64_t> shape = shape_of(arriving[k]);
    shape[0] = load.count;
    staged_arriving.push_back(new_pinned(kOp, shape, arriving[k]));
  }
  const Ids evict_ids = as_ids(kOp, "evict", copy_to_cpu(kOp, evict.keep));
  const Ids load_ids = as_ids(kOp, "load", copy_to_cpu(kOp, load.keep));
  const int64_t rows = host[0].size(0);
  check_ids_on_cpu(kOp, "evict", evict_ids, rows);
  check_ids_on_cpu(kOp, "load", load_ids, rows);
  if (evict_plan) {
    check_plan_on_cpu(kOp, "evict", *evict_plan, evict.count, rows, arriving[0]);
  }
  if (load_plan) check_plan_on_cpu(kOp, "load", *load_plan, load.count, rows, arriving[0]);
  const Tensors evict_made = make_plan(kOp, evict_ids, rows, evict_ids.keep, nullptr);
  const Tensors load_made = make_plan(kOp, load_ids, rows, load_ids.keep, nullptr);
  const PlanView evict_view =
      view_plan(kOp, "evict", evict_made, evict.count, rows, evict_ids.keep);
  const PlanView load_view = view_plan(kOp, "load", load_made, load.count, rows, load_ids.keep);
  check_distinct("evict", evict_view, rows);
  check_distinct("load", load_view, rows);
  swap_on_cpu(check_swap(kOp, host, staged_leaving, staged_arriving, evict.count, load.count),
              evict_view, load_view);
  for (size_t k = 0; k < host.size(); ++k) {
    copy_async(kOp, staged_arriving[k],
               torch::stable::narrow(const_cast<Tensor&>(arriving[k]), 0, 0, load.count));
  }
}

void swap_fields(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                 const Plan& evict_plan, const Tensors& arriving, const Tensor& load,
                 const Plan& load_plan) {
  throw_pending();
  Ids evict_ids = as_ids(kOp, "evict", evict);
  Ids load_ids = as_ids(kOp, "load", load);
  const std::vector<SwapRows> fields =
      check_swap(kOp, host, leaving, arriving, evict_ids.count, load_ids.count);
  const Tensor& on = arriving[0];
  const int64_t rows = fields[0].host.count;
  check_device(kOp, "evict", evict, "arriving[0]", on);
  check_device(kOp, "load", load, "arriving[0]", on);
  if (evict_ids.on_cpu) check_ids_on_cpu(kOp, "evict", evict_ids, rows);
  if (load_ids.on_cpu) check_ids_on_cpu(kOp, "load", load_ids, rows);
  auto planned = [&](const char* list, const Ids& ids, const Plan& plan, void* stream) {
    Tensors made = plan ? *plan : make_plan(kOp, ids, rows, ids.keep, stream);
    const PlanView view = view_plan(kOp, list, made, ids.count, rows, ids.keep);
    if (ids.on_cpu) check_distinct(list, view, rows);
    return std::pair{std::move(made), view};
  };
  if (on.is_cpu()) {
    for (const Tensor& field : host) check_owner(field);
    const auto [evict_made, evict_view] = planned("evict", evict_ids, evict_plan, nullptr);
    const auto [load_made, load_view] = planned("load", load_ids, load_plan, nullptr);
    swap_on_cpu(fields, evict_view, load_view);
    return;
  }
  const CurrentStream stream(kOp, on);
  if (!all_mapped(host, fields)) {
    swap_staged(host, leaving, evict_ids, evict_plan, arriving, load_ids, load_plan, stream);
    return;
  }
  auto to_device = [&](const char* list, Ids& ids) {
    if (!ids.on_cpu) return;
    planned(list, ids, std::nullopt, nullptr);  // checks them on the CPU, for repetitions too
    ids = as_ids(kOp, list, ids_to_device(kOp, ids, on, stream));
  };
  to_device("evict", evict_ids);
  to_device("load", load_ids);
  const auto [evict_made, evict_view] = planned("evict", evict_ids, evict_plan, stream.get());
  const auto [load_made, load_view] = planned("load", load_ids, load_plan, stream.get());
  swap_on_gpu(host, fields, evict_view, load_view, on, stream);
}

// A side's ids and the places of their rows, of a swap of checked fields.
PlacedList leaves(const Tensor& evict, const Tensor& places, const std::vector<SwapRows>& fields) {
  return {.list = IdList::kEvict,
          .ids_name = "evict",
          .places_name = "evict_places",
          .ids = evict,
          .places = places,
          .side_rows = fields[0].leaving.count};
}

PlacedList comes(const Tensor& load, const Tensor& places, const std::vector<SwapRows>& fields) {
  return {.list = IdList::kLoad,
          .ids_name = "load",
          .places_name = "load_places",
          .ids = load,
          .places = places,
          .side_rows = fields[0].arriving.count};
}

void swap_placed_on_cpu(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                        const Tensor& evict_places, const Tensors& arriving, const Tensor& load,
                        const Tensor& load_places) {
  const std::vector<SwapRows> fields = check_swap(kOp, host, leaving, arriving, 0, 0);
  const PlacedViews placed =
      placed_ids(kOp, leaves(evict, evict_places, fields), comes(load, load_places, fields),
                 fields[0].host.count, arriving[0], nullptr);
  for (const Tensor& field : host) check_owner(field);
  swap_on_cpu(fields, placed.evict, placed.load);
}

void swap_placed_fields(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                        const Tensor& evict_places, const Tensors& arriving, const Tensor& load,
                        const Tensor& load_places) {
  throw_pending();
  const std::vector<SwapRows> fields = check_swap(kOp, host, leaving, arriving, 0, 0);
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
  const Tensor& on = arriving[0];
  if (on.is_cpu()) {
    swap_placed_on_cpu(host, leaving, evict, evict_places, arriving, load, load_places);
    return;
  }
  const CurrentStream stream(kOp, on);
  const PlacedViews placed =
      placed_ids(kOp, leaves(evict, evict_places, fields), comes(load, load_places, fields),
                 fields[0].host.count, on, stream.get());
  if (all_mapped(host, fields)) {
    swap_on_gpu(host, fields, placed.evict, placed.load, on, stream);
    return;
  }
  stream.refuse_capture(kOp, kPinIt);
  auto on_cpu = [](const Tensors& side) {
    Tensors staged;
    for (const Tensor& each : side) staged.push_back(copy_to_cpu(kOp, each));
    return staged;
  };
  const Tensors staged = on_cpu(arriving);
  swap_placed_on_cpu(host, on_cpu(leaving), copy_to_cpu(kOp, evict), copy_to_cpu(kOp, evict_places),
                     staged, copy_to_cpu(kOp, load), copy_to_cpu(kOp, load_places));
  for (size_t k = 0; k < host.size(); ++k) copy_and_wait(kOp, staged[k], arriving[k]);
}

// A side that gets no row keeps its contents.
void mark_sides(const Tensors& host, const Tensor& evict, const Tensors& arriving,
                const Tensor& load) {
  if (evict.numel() > 0) {
    for (const Tensor& field : host) mark_written(kOp, field);
  }
  if (load.numel() > 0) {
    for (const Tensor& field : arriving) mark_written(kOp, field);
  }
}

void swap(const Tensors& host, const Tensors& leaving, const Tensor& evict, const Plan& evict_plan,
          const Tensors& arriving, const Tensor& load, const Plan& load_plan) {
  mark_sides(host, evict, arriving, load);
  swap_fields(host, leaving, evict, evict_plan, arriving, load, load_plan);
}

void optimizer_state_swap(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                          const Tensors& arriving, const Tensor& load) {
  swap(host, leaving, evict, std::nullopt, arriving, load, std::nullopt);
}

void optimizer_state_swap_planned(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                                  const Tensors& evict_plan, const Tensors& arriving,
                                  const Tensor& load, const Tensors& load_plan) {
  swap(host, leaving, evict, evict_plan, arriving, load, load_plan);
}

void optimizer_state_swap_placed(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                                 const Tensor& evict_places, const Tensors& arriving,
                                 const Tensor& load, const Tensor& load_places) {
  mark_sides(host, evict, arriving, load);
  swap_placed_fields(host, leaving, evict, evict_places, arriving, load, load_places);
}

}  // namespace
}  // namespace speedtorch

STABLE_TORCH_LIBRARY_IMPL(speedtorch, CompositeExplicitAutograd, m) {
  m.impl("optimizer_state_swap", TORCH_BOX(&speedtorch::optimizer_state_swap));
  m.impl("optimizer_state_swap.planned", TORCH_BOX(&speedtorch::optimizer_state_swap_planned));
  m.impl("optimizer_state_swap.placed", TORCH_BOX(&speedtorch::optimizer_state_swap_placed));
}
