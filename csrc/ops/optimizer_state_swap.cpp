// optimizer_state_swap: evicts the rows of `evict` to host fields and loads the rows of `load`. A
// row in both lists is copied from `leaving` to `arriving` and not read from the host. A field of
// 16 bits on the host may be float32 in `leaving` and `arriving`. This file has the checks, the CPU
// loop and the choice of path; the GPU kernels are in optimizer_state_swap.cu.

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/parallel_for.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "memory/host_memory.h"
#include "move/cost_model.h"
#include "ops/begin_step.h"
#include "ops/launchers.h"
#include "plan/dedup.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "optimizer_state_swap";

// One table. Ids number the rows of all tables consecutively.
struct SwapTable {
  int64_t first;  // the id of its row 0
  std::vector<SwapField> fields;
  HotRow* hot = nullptr;              // [rows], or null without a cache
  const SwapTable* cached = nullptr;  // its cache

  int64_t end() const { return first + fields[0].host.count; }
  // The address of a row on the CPU, in the table or in its cache.
  char* row(size_t field, int64_t id) const {
    const int64_t slot = hot == nullptr ? -1 : hot[id - first].slot;
    const bool is_cached = slot >= 0 && slot < cached->end();
    return is_cached ? cached->fields[field].host.row(slot) : fields[field].host.row(id - first);
  }
};

// How `host` stores a field whose sides have the dtype `side`; nullopt if unsupported.
std::optional<Stored> stored_of(ScalarType host, ScalarType side) {
  if (host == side) return Stored::kSame;
  if (side != ScalarType::Float) return std::nullopt;
  if (host == ScalarType::BFloat16) return Stored::kBFloat16;
  if (host == ScalarType::Half) return Stored::kFloat16;
  return std::nullopt;
}

// The fields of the table that begins at host[first]. Throws ValueError unless shapes, dtypes and
// devices match and the sides are long enough for both lists.
std::vector<SwapField> check_fields_of(const char* host_list, size_t first, const Tensors& host,
                                       const Tensors& leaving, const Tensors& arriving,
                                       int64_t evicted, int64_t loaded) {
  std::vector<SwapField> fields;
  for (size_t k = 0; k < arriving.size(); ++k) {
    const Tensor& host_field = host[first + k];
    const std::string host_name = item(host_list, first + k);
    SwapField field;
    field.host = as_writable_rows(kOp, host_name.c_str(), host_field);
    if (host_field.size(0) != host[first].size(0)) {
      throw_value_error(kOp, host_name, " has ", host_field.size(0), " rows, ",
                        item(host_list, first), " has ", host[first].size(0),
                        ". All fields of a table must have the same number of rows");
    }
    check_device(kOp, host_name.c_str(), host_field, "arriving[0]", arriving[0]);
    const std::optional<Stored> stored =
        stored_of(host_field.scalar_type(), arriving[k].scalar_type());
    field.stored = stored.value_or(Stored::kSame);
    // Kernels that convert access whole numbers.
    if (field.stored != Stored::kSame) check_aligned(kOp, host_name.c_str(), host_field);
    // The tensor whose dtype the side must have.
    const Tensor& like = field.stored == Stored::kSame ? host_field : arriving[k];
    auto check_side = [&](const char* list, const Tensor& side, int64_t needed) {
      const std::string name = item(list, k);
      const Rows rows = as_rows_like(kOp, name.c_str(), side, host_name.c_str(), like,
                                     "arriving[0]", arriving[0]);
      std::vector<int64_t> shape = shape_of(host_field);
      shape[0] = side.size(0);
      check_shape(kOp, name.c_str(), side, shape);
      if (field.stored != Stored::kSame) check_aligned(kOp, name.c_str(), side);
      if (side.size(0) < needed) {
        throw_value_error(kOp, name, " has ", side.size(0), " rows, at least ", needed,
                          " are needed");
      }
      return rows;
    };
    field.leaving = check_side("leaving", leaving[k], evicted);
    field.arriving = check_side("arriving", arriving[k], loaded);
    fields.push_back(field);
  }
  return fields;
}

// The tables whose fields `host` lists, table after table.
std::vector<SwapTable> check_tables(const Tensors& host, int64_t count, const Tensors& leaving,
                                    const Tensors& arriving, int64_t evicted = 0,
                                    int64_t loaded = 0, const char* host_list = "host") {
  const size_t fields = count < 1 ? 0 : host.size() / static_cast<size_t>(count);
  check_fields(kOp, host_list, fields);
  if (leaving.size() != fields || arriving.size() != fields) {
    throw_value_error(kOp, host_list, ", leaving and arriving must have the same length, got ",
                      fields, ", ", leaving.size(), " and ", arriving.size());
  }
  if (host.size() != fields * static_cast<size_t>(count)) {
    throw_value_error(kOp, "host has ", host.size(),
                      " fields, expected the same number for each of ", count, " tables");
  }
  std::vector<SwapTable> tables;
  for (size_t first = 0; first < host.size(); first += fields) {
    const int64_t row = tables.empty() ? 0 : tables.back().end();
    tables.push_back(
        {row, check_fields_of(host_list, first, host, leaving, arriving, evicted, loaded)});
    for (size_t k = 0; k < fields; ++k) {
      if (tables.back().fields[k].stored == tables[0].fields[k].stored) continue;
      throw_value_error(kOp, item(host_list, first + k), " has dtype ", dtype_text(host[first + k]),
                        ", expected ", dtype_text(host[k]), ", the dtype of ", item(host_list, k));
    }
  }
  return tables;
}

// A list's ids in [begin, end).
PlanView part_of(const PlanView& list, int64_t begin, int64_t end) {
  int64_t* last = list.unique + list.count;
  const int64_t first = std::lower_bound(list.unique, last, begin) - list.unique;
  PlanView part = list;
  part.unique += first;
  if (part.order != nullptr) part.order += first;
  part.first_place += first;
  part.count = std::lower_bound(part.unique, last, end) - part.unique;
  return part;
}

// Finds ascending ids among ascending entries in one pass over both.
class AscendingSearch {
 public:
  AscendingSearch(const PlanView& list, int64_t first_id)
      : end_(list.unique + list.count),
        entry_(std::lower_bound<const int64_t*>(list.unique, end_, first_id)) {}

  // The entry of an id, or null. Ids of successive calls must ascend.
  const int64_t* find(int64_t id) {
    while (entry_ != end_ && *entry_ < id) ++entry_;
    return entry_ != end_ && *entry_ == id ? entry_ : nullptr;
  }

 private:
  const int64_t* end_;
  const int64_t* entry_;
};

// Moves a row of a field on the CPU, between the host and a side or from side to side.
class RowMover {
 public:
  explicit RowMover(const SwapField& field)
      : stored_(field.stored), host_bytes_(field.host.row_bytes) {}

  void load(char* side, const char* host) const {
    if (stored_ == Stored::kSame) return copy(side, host);
    for_each_number(
        [&](int64_t i) { put<uint32_t>(side, i, float_of(at<uint16_t>(host, i), stored_)); });
  }
  void evict(char* host, const char* side) const {
    if (stored_ == Stored::kSame) return copy(host, side);
    for_each_number(
        [&](int64_t i) { put<uint16_t>(host, i, stored_of(at<uint32_t>(side, i), stored_)); });
  }
  // Copies with the rounding of an eviction and a load.
  void carry(char* to, const char* from) const {
    if (stored_ == Stored::kSame) return copy(to, from);
    for_each_number([&](int64_t i) {
      put<uint32_t>(to, i, rounded_to_nearest(at<uint32_t>(from, i), stored_));
    });
  }

 private:
  template <typename Number>
  static Number at(const char* row, int64_t i) {
    Number number;
    std::memcpy(&number, row + i * static_cast<int64_t>(sizeof(Number)), sizeof(Number));
    return number;
  }
  template <typename Number>
  static void put(char* row, int64_t i, Number number) {
    std::memcpy(row + i * static_cast<int64_t>(sizeof(Number)), &number, sizeof(Number));
  }
  template <typename Use>
  void for_each_number(const Use& use) const {
    for (int64_t i = 0; i < host_bytes_ / 2; ++i) use(i);
  }
  void copy(char* to, const char* from) const {
    if (host_bytes_ > 0) std::memcpy(to, from, static_cast<size_t>(host_bytes_));
  }

  Stored stored_;
  int64_t host_bytes_;
};

// The rows of `evict` to write to the host: all except rows in both lists, all rows, or no rows.
// With kNone the list is only the source of rows in both lists.
enum class Evicts { kNotLoaded, kAll, kNone };

// The host row of each entry of two lists; null: the entry's id, or no entry.
struct HostRows {
  const int64_t* evict = nullptr;
  const int64_t* load = nullptr;
};

void swap_table_on_cpu(const SwapTable& table, const PlanView& evict, const PlanView& load,
                       Evicts evicts, const HostRows& host_rows = {}) {
  int64_t record_bytes = 1;
  for (const SwapField& field : table.fields) record_bytes += field.host.row_bytes;
  const int64_t entries_per_task = kBytesPerTask / record_bytes + 1;
  parallel_for(0, load.count, entries_per_task, [&](int64_t begin, int64_t end) {
    AscendingSearch evicted(evict, load.unique[begin]);
    for (int64_t m = begin; m < end; ++m) {
      const int64_t id = load.unique[m];
      const int64_t* found = evicted.find(id);
      if (table.hot != nullptr && found == nullptr) table.hot[id - table.first].uses += 1;
      for (size_t k = 0; k < table.fields.size(); ++k) {
        const SwapField& field = table.fields[k];
        const RowMover mover(field);
        char* to = field.arriving.row(load.place(m));
        if (found != nullptr) {
          mover.carry(to, field.leaving.row(evict.place(found - evict.unique)));
        } else {
          mover.load(to, table.row(k, host_rows.load == nullptr ? id : host_rows.load[m]));
        }
      }
    }
  });
  if (evicts == Evicts::kNone) return;
  parallel_for(0, evict.count, entries_per_task, [&](int64_t begin, int64_t end) {
    AscendingSearch loaded(load, evict.unique[begin]);
    for (int64_t m = begin; m < end; ++m) {
      const int64_t id = evict.unique[m];
      if (evicts == Evicts::kNotLoaded && loaded.find(id) != nullptr) continue;
      for (size_t k = 0; k < table.fields.size(); ++k) {
        const SwapField& field = table.fields[k];
        char* to = table.row(k, host_rows.evict == nullptr ? id : host_rows.evict[m]);
        RowMover(field).evict(to, field.leaving.row(evict.place(m)));
      }
    }
  });
}

void swap_on_cpu(const std::vector<SwapTable>& tables, const PlanView& evict, const PlanView& load,
                 Evicts evicts = Evicts::kNotLoaded, const HostRows& host_rows = {}) {
  if (tables.size() == 1) return swap_table_on_cpu(tables[0], evict, load, evicts, host_rows);
  for (const SwapTable& table : tables) {
    swap_table_on_cpu(table, part_of(evict, table.first, table.end()),
                      part_of(load, table.first, table.end()), evicts);
  }
}

// Whether a row of `field` begins within the first row stride of `other`, as in records of several
// fields.
bool lies_among(const Rows& field, const Rows& other) {
  const char* end = other.base + other.stride_bytes;
  return field.stride_bytes == other.stride_bytes && field.base > other.base && field.base < end &&
         other.count > 1;
}

// Notes that work on `stream` uses the fields of a table.
void note_use_of(const Tensor* host, const SwapField* fields, size_t count,
                 const CurrentStream& stream) {
  for (size_t k = 0; k < count; ++k) {
    // Fields of one record share one block of memory.
    const bool noted = k > 0 && lies_among(fields[k].host, fields[0].host);
    if (!noted) note_use(host[k], fields[k].host, stream.queue());
  }
}

// Fields [begin, end) of the tables from `table` on, as many tables as fit one launch.
SwapTables places_of(const std::vector<SwapTable>& tables, size_t table, size_t begin, size_t end) {
  SwapTables launched{};
  const size_t max_tables = std::min<size_t>(kTablesPerLaunch, kPlacesPerLaunch / (end - begin));
  for (; table < tables.size() && static_cast<size_t>(launched.count) < max_tables; ++table) {
    const SwapTable& source = tables[table];
    launched.firsts[launched.count] = source.first;
    for (size_t k = begin; k < end; ++k) {
      const Rows& rows = source.fields[k].host;
      launched.places[static_cast<size_t>(launched.count) * (end - begin) + k - begin] = {
          .base = rows.base - source.first * rows.stride_bytes, .stride_bytes = rows.stride_bytes};
    }
    launched.firsts[++launched.count] = source.end();
  }
  return launched;
}

// Moves the rows of matched lists; `host` has the fields of all tables.
void launch_swaps(const Tensors& host, const std::vector<SwapTable>& tables, const SwapLists& lists,
                  const CurrentStream& stream) {
  if constexpr (kWithCuda) {
    const std::vector<SwapField>& fields = tables[0].fields;
    const bool crosses_link =
        std::any_of(host.begin(), host.end(), [](const Tensor& field) { return !field.is_cuda(); });
    for (size_t first = 0; first < fields.size(); first += kFieldsPerLaunch) {
      const size_t last = std::min(fields.size(), first + kFieldsPerLaunch);
      for (size_t table = 0; table < tables.size();) {
        const SwapTables launched = places_of(tables, table, first, last);
        check_cuda(
            launch_swap(&fields[first], static_cast<int>(last - first),
                        tables.size() > 1 ? &launched : nullptr, tables.back().end(), lists.evict,
                        lists.load, lists.scratch, crosses_link ? swap_sms(stream) : kDeviceBlocks,
                        first + table == 0 ? error_record(stream.device()) : nullptr, stream.get()),
            kOp);
        for (const size_t end = table + static_cast<size_t>(launched.count); table < end; ++table) {
          note_use_of(&host[table * fields.size() + first], &tables[table].fields[first],
                      last - first, stream);
        }
      }
    }
  }
}

// Lists with places (`placed` is not null) have no status yet. For these, kAll takes effect through
// the counts of `placed`.
void swap_on_gpu(const Tensors& host, const std::vector<SwapTable>& tables, PlanView evict,
                 PlanView load, const PlacedLists* placed, Evicts evicts, const Tensor& on,
                 const CurrentStream& stream, const Arguments& all) {
  if constexpr (kWithCuda) {
    const int64_t rows = tables.back().end();
    const int64_t load_bytes = load.count * static_cast<int64_t>(sizeof(int64_t));
    const Tensor memory =
        new_tensor(kOp, {static_cast<int64_t>(sizeof(CheckedLists)) + load_bytes + evict.count},
                   ScalarType::Byte, on);
    auto* checked = static_cast<CheckedLists*>(memory.data_ptr());
    auto* load_from = reinterpret_cast<int64_t*>(checked + 1);
    const SwapScratch scratch{.checked = checked,
                              .load_from = load_from,
                              .is_kept = reinterpret_cast<uint8_t*>(load_from + load.count)};
    if (placed != nullptr) {
      evict.status = &checked->evict;
      load.status = &checked->load;
    }
    const SwapTable* cached = tables[0].cached;
    std::optional<Tensor> parts;
    if (cached != nullptr) {
      parts = new_tensor(kOp, {part_lists_bytes(evict.count, load.count)}, ScalarType::Byte, on);
    }
    check_cuda(launch_swap_match(evict, load, placed, rows, scratch, error_record(stream.device()),
                                 stream.get()),
               kOp);
    all.mark_written();
    // The match is by id. The copies below use only host rows.
    if (placed != nullptr) {
      if (placed->evict_rows != nullptr) evict.unique = const_cast<int64_t*>(placed->evict_rows);
      if (placed->load_rows != nullptr) load.unique = const_cast<int64_t*>(placed->load_rows);
    }
    if (evicts == Evicts::kNone) evict.count = 0;
    if (cached == nullptr) return launch_swaps(host, tables, {evict, load, scratch}, stream);
    SwapPart of_host{.fields = nullptr, .rows = rows, .lists = {}};
    SwapPart of_cache{.fields = nullptr, .rows = cached->end(), .lists = {}};
    const HotRows hot{.rows = tables[0].hot, .slots = cached->end()};
    check_cuda(launch_part_lists(evict, load, scratch, rows, hot, &of_host.lists, &of_cache.lists,
                                 parts->data_ptr(), stream.get()),
               kOp);
    const std::vector<SwapField>& fields = tables[0].fields;
    for (size_t first = 0; first < fields.size(); first += kFieldsPerLaunch) {
      const size_t last = std::min(fields.size(), first + kFieldsPerLaunch);
      of_host.fields = &fields[first];
      of_cache.fields = &cached->fields[first];
      check_cuda(
          launch_swap_parts(of_host, of_cache, static_cast<int>(last - first), swap_sms(stream),
                            first == 0 ? error_record(stream.device()) : nullptr, stream.get()),
          kOp);
      note_use_of(&host[first], &fields[first], last - first, stream);
    }
  }
}

// Whether the GPU can access every field in place.
bool all_mapped(const Tensors& host, const std::vector<SwapTable>& tables,
                const CurrentStream& stream) {
  bool mapped = true, on_gpu = false;
  for (size_t k = 0; k < host.size(); ++k) {
    const std::vector<SwapField>& fields = tables[k / tables[0].fields.size()].fields;
    const Rows& rows = fields[k % fields.size()].host;
    const Access access = gpu_access(kOp, host[k], rows, stream.device());
    mapped &= access != Access::kNot;
    on_gpu |= access == Access::kOnGpu;
  }
  if (!mapped && on_gpu) {
    throw_value_error(
        kOp,
        "some host fields are on the GPU and others in pageable memory, which only the CPU can "
        "access. Pin the pageable fields with speedtorch.pin_memory_(field)");
  }
  return mapped;
}

// A plan of ids on the CPU, made by the caller or by plan_on_cpu. Entries are sorted by id, which
// is the order of row addresses.
struct CpuPlan {
  Tensors made;
  PlanView view;
};

// Throws for repeated ids.
CpuPlan plan_on_cpu(const char* list, const Ids& ids, const Plan& plan, int64_t rows) {
  check_ids_on_cpu(kOp, list, ids, rows);
  CpuPlan result{.made = plan ? *plan : make_plan(kOp, ids, {rows}, nullptr), .view = {}};
  result.view = view_plan(kOp, list, result.made, ids.count, rows);
  if (plan) check_plan_of(kOp, list, result.view, ids);
  const PlanStatus& status = *result.view.status;
  if (status.distinct == status.count) return result;
  throw_bad_ids({.kind = IdError::kRepeated,
                 .op = kOp,
                 .list = list,
                 .rows = rows,
                 .id = status.repeat_id,
                 .position = status.repeat_position,
                 .bad_count = status.count - status.distinct,
                 .count = status.count});
}

// Swaps through the CPU. take(side) returns the evicted rows of a leaving side in list order.
// put(side, rows) writes the loaded rows, in list order, to an arriving side.
template <typename Take, typename Put>
void swap_staged(const Tensors& host, const Tensors& leaving, const PlanView& evict,
                 const Tensors& arriving, const PlanView& load, const Take& take, const Put& put,
                 Evicts evicts, const Arguments& all, const HostRows& host_rows = {}) {
  Tensors evicted_rows, loaded_rows;
  for (size_t k = 0; k < host.size(); ++k) {
    evicted_rows.push_back(copy_to_cpu(kOp, take(leaving[k])));
    std::vector<int64_t> shape = shape_of(arriving[k]);
    shape[0] = load.count;
    loaded_rows.push_back(new_pinned(kOp, shape, arriving[k]));
  }
  const std::vector<SwapTable> tables =
      check_tables(host, 1, evicted_rows, loaded_rows, evict.count, load.count);
  all.mark_written();
  swap_on_cpu(tables, evict, load, evicts, host_rows);
  for (size_t k = 0; k < host.size(); ++k) put(arriving[k], loaded_rows[k]);
}

Tensor first_rows(const Tensor& side, int64_t rows) {
  return torch::stable::narrow(const_cast<Tensor&>(side), 0, 0, rows);
}

void swap(const Tensors& host, const Tensors& leaving, const Tensor& evict, const Plan& evict_plan,
          const Tensors& arriving, const Tensor& load, const Plan& load_plan) {
  const Arguments all(kOp, {written("host", host, evict.numel() > 0), read("leaving", leaving),
                            read("evict", evict), read("evict_plan", evict_plan),
                            written("arriving", arriving, load.numel() > 0), read("load", load),
                            read("load_plan", load_plan)});
  check_ids_kind(kOp, "evict", evict);
  check_ids_kind(kOp, "load", load);
  const std::vector<SwapTable> tables =
      check_tables(host, 1, leaving, arriving, evict.numel(), load.numel());
  const Tensor& on = arriving[0];
  const int64_t rows = tables.back().end();
  check_device(kOp, "evict", evict, "arriving[0]", on);
  check_device(kOp, "load", load, "arriving[0]", on);
  if (evict_plan) check_plan(kOp, "evict", *evict_plan, evict.numel(), on);
  if (load_plan) check_plan(kOp, "load", *load_plan, load.numel(), on);
  all.check_memory();
  if (on.is_cpu()) {
    const CpuPlan evict_made = plan_on_cpu("evict", as_ids(evict), evict_plan, rows);
    const CpuPlan load_made = plan_on_cpu("load", as_ids(load), load_plan, rows);
    all.mark_written();
    return swap_on_cpu(tables, evict_made.view, load_made.view);
  }
  const CurrentStream stream(kOp, on);
  const bool mapped = all_mapped(host, tables, stream);
  Ids evict_ids = as_ids(evict), load_ids = as_ids(load);
  if (!mapped) {
    stream.check_pageable_not_captured(kOp, "a host field", "field");
    // Waits for the GPU, because queued work may still write to fields that the GPU can access.
    copy_to_cpu(kOp, new_tensor(kOp, {1}, ScalarType::Byte, on));
    const Ids evict_on_cpu = check_ids_and_plan_on_cpu(kOp, "evict", evict_ids, evict_plan, rows);
    const Ids load_on_cpu = check_ids_and_plan_on_cpu(kOp, "load", load_ids, load_plan, rows);
    const CpuPlan evict_made = plan_on_cpu("evict", evict_on_cpu, std::nullopt, rows);
    const CpuPlan load_made = plan_on_cpu("load", load_on_cpu, std::nullopt, rows);
    return swap_staged(
        host, leaving, evict_made.view, arriving, load_made.view,
        [&](const Tensor& side) { return first_rows(side, evict_on_cpu.count); },
        [&](const Tensor& side, const Tensor& staged) {
          copy(kOp, staged, first_rows(side, load_on_cpu.count), false);
        },
        Evicts::kNotLoaded, all);
  }
  // Ids on the CPU are checked on the CPU, also for repetitions.
  if (evict_ids.on_cpu) plan_on_cpu("evict", evict_ids, std::nullopt, rows);
  if (load_ids.on_cpu) plan_on_cpu("load", load_ids, std::nullopt, rows);
  auto plan_on_gpu = [&](const char* list, Ids& ids, const Plan& plan) {
    if (ids.on_cpu) ids = as_ids(ids_to_device(kOp, ids, on, stream));
    return find_row_ids(kOp, list, ids, Path::kOrdered, plan, Keep::kAll, rows, stream.get());
  };
  const RowIds evict_list = plan_on_gpu("evict", evict_ids, evict_plan);
  const RowIds load_list = plan_on_gpu("load", load_ids, load_plan);
  swap_on_gpu(host, tables, evict_list.view.plan, load_list.view.plan, nullptr, Evicts::kNotLoaded,
              on, stream, all);
}

// ---- With places

// A list of distinct ascending ids, each with the place of its row on the other side. Replaces a
// plan without sorting. Messages name its tensors after the list.
struct PlacedList {
  std::string name;
  Tensor ids;
  std::optional<Tensor> places;  // nullopt: entry i is row i
  std::optional<Tensor> count;   // number of valid entries; nullopt: all
  std::optional<Tensor> rows;    // the host row of each entry; nullopt: its id
  int64_t side_rows;             // limit of the places

  PlanView view() const {
    return {
        .unique = data_of(ids), .order = places ? data_of(*places) : nullptr, .count = ids.numel()};
  }
};

void check_placed(const PlacedList& list, const Tensor& on) {
  check_list(kOp, list.name.c_str(), list.ids, "arriving[0]", on);
  if (list.places) {
    check_list(kOp, (list.name + "_places").c_str(), *list.places, "arriving[0]", on,
               list.ids.numel());
  }
  if (list.count)
    check_list(kOp, (list.name + "_count").c_str(), *list.count, "arriving[0]", on, 1);
  if (list.rows) {
    check_list(kOp, (list.name + "_rows").c_str(), *list.rows, "arriving[0]", on, list.ids.numel());
  }
}

// The valid entries of a list on the CPU. Throws for an id or a place out of range and, with
// `must_ascend`, for ids that do not ascend.
PlanView view_placed_on_cpu(const PlacedList& list, int64_t table_rows, bool must_ascend) {
  PlanView view = list.view();
  if (list.count) {
    view.count =
        check_count(kOp, (list.name + "_count").c_str(), *data_of(*list.count), view.count);
  }
  Ids host_rows = as_ids(list.rows ? *list.rows : list.ids);
  host_rows.count = view.count;
  check_ids_on_cpu(kOp, list.name.c_str(), host_rows, table_rows);
  for (int64_t i = 0; i < view.count; ++i) {
    const int64_t id = view.unique[i], place = view.place(i);
    const bool unordered = must_ascend && i > 0 && id <= view.unique[i - 1];
    if (!unordered && place >= 0 && place < list.side_rows) continue;
    throw_bad_ids({.kind = unordered ? IdError::kUnordered : IdError::kBadPlace,
                   .op = kOp,
                   .list = list.name.c_str(),
                   .rows = list.side_rows,
                   .id = unordered ? id : place,
                   .position = i,
                   .count = view.count});
  }
  return view;
}

void check_side_rows(const char* name, const Tensors& side) {
  for (size_t k = 1; k < side.size(); ++k) {
    if (side[k].size(0) == side[0].size(0)) continue;
    throw_value_error(
        kOp, item(name, k), " has ", side[k].size(0), " rows, ", item(name, 0), " has ",
        side[0].size(0),
        ". Places number the rows of all fields, so the numbers of rows must be equal");
  }
}

// Throws unless the slots store rows like the table's and `hot` has an entry for every row.
void check_hot(const Tensors& cache, const SwapTable& slots, const Tensor& hot,
               const SwapTable& table, const Tensor& on) {
  for (size_t k = 0; k < cache.size(); ++k) {
    const std::string name = item("cache", k);
    const SwapField &slot = slots.fields[k], &row = table.fields[k];
    check_same_device(kOp, name.c_str(), cache[k], "arriving[0]", on);
    if (slot.host.row_bytes != row.host.row_bytes || slot.stored != row.stored) {
      throw_value_error(kOp, name, " must store rows with the dtype and shape of ",
                        item("host", k));
    }
  }
  if (slots.end() < 1) throw_value_error(kOp, "cache must have at least one slot");
  if (hot.scalar_type() != ScalarType::Int || !hot.is_contiguous()) {
    throw_value_error(kOp, "hot must be a contiguous int32 tensor [rows, 2]");
  }
  check_shape(kOp, "hot", hot, {table.end(), 2});
  check_aligned(kOp, "hot", hot);
  check_same_device(kOp, "hot", hot, "arriving[0]", on);
}

// The two functions below read and write the rows of a list on the GPU. The places of the list are
// already checked.
Tensor rows_at(const Tensor& side, const PlacedList& list, const CurrentStream& stream) {
  if (!list.places) return first_rows(side, list.ids.numel());
  const Tensor& places = *list.places;
  std::vector<int64_t> shape = shape_of(side);
  shape[0] = places.numel();
  const Tensor rows = new_tensor(kOp, shape, side.scalar_type(), side);
  if (rows.numel() == 0) return rows;
  if constexpr (kWithCuda) {
    const Rows from = as_rows(kOp, "leaving", side), to = as_rows(kOp, "leaving", rows);
    const Report about{error_record(stream.device()), Op::kGather, IdList::kIndex, from.count};
    const RowIds found = find_row_ids(kOp, "evict_places", as_ids(places), Path::kDirect, {},
                                      Keep::kAll, from.count, stream.get());
    check_cuda(launch_gather(from, to, found.view, gpu_copy_kernel(), about, stream.get()), kOp);
  }
  return rows;
}

void put_rows_at(const Tensor& side, const PlacedList& list, const Tensor& staged,
                 const CurrentStream& stream) {
  if (staged.numel() == 0) return;
  if (!list.places) return copy(kOp, staged, first_rows(side, list.ids.numel()), false);
  const Tensor& places = *list.places;
  const Tensor rows = new_tensor(kOp, shape_of(staged), side.scalar_type(), side);
  copy(kOp, staged, rows, false);
  if constexpr (kWithCuda) {
    const Rows from = as_rows(kOp, "arriving", rows), to = as_rows(kOp, "arriving", side);
    const Report about{error_record(stream.device()), Op::kScatter, IdList::kIndex, to.count};
    const RowIds found = find_row_ids(kOp, "load_places", as_ids(places), Path::kDistinct, {},
                                      Keep::kLast, to.count, stream.get());
    check_cuda(launch_scatter(to, from, found.view, gpu_copy_kernel(), about, stream.get()), kOp);
  }
}

// With counts, rows in both lists are also written to the host, so that the caller may discard the
// loaded rows. On a GPU with `all_or_none`, a bad entry stops all moves; otherwise only this entry
// is skipped. `cache`: the fields of the slots, for one table. `hot`: slot and uses of each row. If
// `evicts` is false, no row is written to the host. If `is_new`, the version counters of `arriving`
// do not change. `evict_rows` and `load_rows`: the host row of each entry, for one table without
// counts and cache.
void swap_at_places(const Tensors& host, int64_t count, const Tensors& leaving, const Tensor& evict,
                    const std::optional<Tensor>& evict_places,
                    const std::optional<Tensor>& evict_count, const Tensors& arriving,
                    const Tensor& load, const std::optional<Tensor>& load_places,
                    const std::optional<Tensor>& load_count, bool all_or_none,
                    const Tensors& cache = {}, const std::optional<Tensor>& hot = std::nullopt,
                    bool evicts = true, bool is_new = false,
                    const std::optional<Tensor>& evict_rows = std::nullopt,
                    const std::optional<Tensor>& load_rows = std::nullopt) {
  const Arguments all(
      kOp,
      {written("host", host, evicts && evict.numel() > 0),
       written("cache", cache, evict.numel() > 0), written("hot", hot, load.numel() > 0),
       read("leaving", leaving), read("evict", evict), read("evict_places", evict_places),
       read("evict_count", evict_count), written("arriving", arriving, !is_new && load.numel() > 0),
       read("load", load), read("load_places", load_places), read("load_count", load_count),
       read("evict_rows", evict_rows), read("load_rows", load_rows)});
  std::vector<SwapTable> tables = check_tables(host, count, leaving, arriving), slots;
  if (hot) {
    slots = check_tables(cache, 1, leaving, arriving, 0, 0, "cache");
    check_hot(cache, slots[0], *hot, tables[0], arriving[0]);
    tables[0].hot = static_cast<HotRow*>(hot->data_ptr());
    tables[0].cached = slots.data();
  }
  const std::vector<SwapField>& fields = tables[0].fields;
  check_side_rows("leaving", leaving);
  check_side_rows("arriving", arriving);
  const Tensor& on = arriving[0];
  const PlacedList evict_list{"evict",     evict,      evict_places,
                              evict_count, evict_rows, fields[0].leaving.count};
  const PlacedList load_list{"load",     load,      load_places,
                             load_count, load_rows, fields[0].arriving.count};
  check_placed(evict_list, on);
  check_placed(load_list, on);
  const bool counted = evict_count.has_value();
  if (counted != load_count.has_value()) {
    throw_value_error(kOp, "evict_count and load_count must be passed together");
  }
  if (evict_rows.has_value() != load_rows.has_value() ||
      (evict_rows && (counted || tables.size() > 1))) {
    throw_value_error(kOp,
                      "evict_rows and load_rows must be passed together, for one table and without "
                      "counts");
  }
  const auto host_rows_of = [](const PlacedList& evicted, const PlacedList& loaded) {
    return evicted.rows ? HostRows{data_of(*evicted.rows), data_of(*loaded.rows)} : HostRows{};
  };
  all.check_memory();
  const Evicts which = !evicts ? Evicts::kNone : counted ? Evicts::kAll : Evicts::kNotLoaded;
  const int64_t rows = tables.back().end();
  if (on.is_cpu()) {
    const bool must_ascend = all_or_none || tables.size() > 1;  // part_of searches the lists
    const PlanView evicted = view_placed_on_cpu(evict_list, rows, must_ascend);
    const PlanView loaded = view_placed_on_cpu(load_list, rows, must_ascend);
    all.mark_written();
    return swap_on_cpu(tables, evicted, loaded, which, host_rows_of(evict_list, load_list));
  }
  const CurrentStream stream(kOp, on);
  const HostRows host_rows = host_rows_of(evict_list, load_list);
  if (all_mapped(host, tables, stream)) {
    const PlacedLists placed{.leaving_rows = evict_list.side_rows,
                             .arriving_rows = load_list.side_rows,
                             .evict_count = counted ? data_of(*evict_count) : nullptr,
                             .load_count = counted ? data_of(*load_count) : nullptr,
                             .evict_rows = host_rows.evict,
                             .load_rows = host_rows.load,
                             .all_or_none = all_or_none};
    return swap_on_gpu(host, tables, evict_list.view(), load_list.view(), &placed, which, on,
                       stream, all);
  }
  if (counted || hot || tables.size() > 1) {
    throw_value_error(
        kOp, "a host field is in pageable memory, which only the CPU can access. A swap with ",
        counted ? "counts on the GPU"
        : hot   ? "a cache"
                : "several tables",
        " needs fields that the GPU can access. Pin it with speedtorch.pin_memory_(field) or use a "
        "HostTable");
  }
  stream.check_pageable_not_captured(kOp, "a host field", "field");
  auto copied = [](PlacedList list) {
    list.ids = copy_to_cpu(kOp, list.ids);
    if (list.places) list.places = copy_to_cpu(kOp, *list.places);
    if (list.rows) list.rows = copy_to_cpu(kOp, *list.rows);
    return list;
  };
  const PlacedList evict_on_cpu = copied(evict_list), load_on_cpu = copied(load_list);
  PlanView evicted = view_placed_on_cpu(evict_on_cpu, rows, all_or_none);
  PlanView loaded = view_placed_on_cpu(load_on_cpu, rows, all_or_none);
  evicted.order = loaded.order = nullptr;
  swap_staged(
      host, leaving, evicted, arriving, loaded,
      [&](const Tensor& side) { return rows_at(side, evict_list, stream); },
      [&](const Tensor& side, const Tensor& staged) {
        put_rows_at(side, load_list, staged, stream);
      },
      which, all, host_rows_of(evict_on_cpu, load_on_cpu));
}

void swap_placed(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                 const Tensor& evict_places, const Tensors& arriving, const Tensor& load,
                 const Tensor& load_places) {
  swap_at_places(host, 1, leaving, evict, evict_places, std::nullopt, arriving, load, load_places,
                 std::nullopt, true);
}

void exchange_rows(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                   const std::optional<Tensor>& evict_places, const Tensors& arriving,
                   const Tensor& load, const std::optional<Tensor>& load_places, int64_t tables,
                   const std::optional<Tensor>& evict_count,
                   const std::optional<Tensor>& load_count, const std::optional<Tensor>& evict_rows,
                   const std::optional<Tensor>& load_rows) {
  swap_at_places(host, tables, leaving, evict, evict_places, evict_count, arriving, load,
                 load_places, load_count, false, {}, std::nullopt, true, false, evict_rows,
                 load_rows);
}

void exchange_cached(const Tensors& host, const Tensors& cache, const Tensor& hot,
                     const Tensors& leaving, const Tensor& evict,
                     const std::optional<Tensor>& evict_places, const Tensors& arriving,
                     const Tensor& load, const std::optional<Tensor>& load_places,
                     const std::optional<Tensor>& evict_count,
                     const std::optional<Tensor>& load_count) {
  swap_at_places(host, 1, leaving, evict, evict_places, evict_count, arriving, load, load_places,
                 load_count, false, cache, hot);
}

void optimizer_state_swap(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                          const Tensors& arriving, const Tensor& load) {
  swap(host, leaving, evict, std::nullopt, arriving, load, std::nullopt);
}

// An empty list means no plan.
void optimizer_state_swap_planned(const Tensors& host, const Tensors& leaving, const Tensor& evict,
                                  const Tensors& evict_plan, const Tensors& arriving,
                                  const Tensor& load, const Tensors& load_plan) {
  auto plan = [](const Tensors& parts) { return parts.empty() ? Plan{} : Plan{parts}; };
  swap(host, leaving, evict, plan(evict_plan), arriving, load, plan(load_plan));
}

}  // namespace

void exchange(const Tensors& host, const Tensors& leaving, const Tensor& evict,
              const std::optional<Tensor>& evict_places, const Tensors& arriving,
              const Tensor& load, const std::optional<Tensor>& load_places, bool evicts) {
  swap_at_places(host, 1, leaving, evict, evict_places, std::nullopt, arriving, load, load_places,
                 std::nullopt, false, {}, std::nullopt, evicts, /*is_new=*/true);
}

namespace {

const Ops kOps{
    {"optimizer_state_swap(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor evict, Tensor(b! -> "
     "*)[] arriving, Tensor load) -> ()",
     TORCH_BOX(&optimizer_state_swap)},
    {"optimizer_state_swap.planned(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor evict, "
     "Tensor[] evict_plan, Tensor(b! -> *)[] arriving, Tensor load, Tensor[] load_plan) -> ()",
     TORCH_BOX(&optimizer_state_swap_planned)},
    {"optimizer_state_swap.placed(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor evict, Tensor "
     "evict_places, Tensor(b! -> *)[] arriving, Tensor load, Tensor load_places) -> ()",
     TORCH_BOX(&swap_placed)},
    // For speedtorch/step, with lists made by the library. Rows of several tables are numbered
    // consecutively; `host` lists the tables' fields in this order. Counts are on the device.
    // `evict_rows` and `load_rows`: the host row of each entry, if ids number something else.
    {"exchange_rows(Tensor(a! -> *)[] host, Tensor[] leaving, Tensor evict, Tensor? evict_places, "
     "Tensor(b! -> *)[] arriving, Tensor load, Tensor? load_places, int tables=1, Tensor? "
     "evict_count=None, Tensor? load_count=None, Tensor? evict_rows=None, Tensor? load_rows=None) "
     "-> ()",
     TORCH_BOX(&exchange_rows)},
    // The same for one table with a cache on the device. `hot` [rows, 2], int32: the slot of each
    // row, or -1, and its number of loads.
    {"exchange_cached(Tensor(a! -> *)[] host, Tensor(b! -> *)[] cache, Tensor(c!) hot, Tensor[] "
     "leaving, Tensor evict, Tensor? evict_places, Tensor(d! -> *)[] arriving, Tensor load, "
     "Tensor? "
     "load_places, Tensor? evict_count=None, Tensor? load_count=None) -> ()",
     TORCH_BOX(&exchange_cached)},
};

}  // namespace
}  // namespace speedtorch
