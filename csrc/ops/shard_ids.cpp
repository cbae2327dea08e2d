// shard_ids: plans the ids of a lookup of sharded rows, and lists the rows to request from each
// rank. requested_ids: the rows that all ranks request from this rank. Called by
// speedtorch/parallel. This file has the checks and the CPU loops; the GPU kernels are in
// shard_ids.cu.

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/parallel_for.h"
#include "core/registration.h"
#include "ops/launchers.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kShard = "shard_ids";
constexpr const char* kRequested = "requested_ids";
constexpr const char* kBlocks = "blocks";

void check_shards(const Tensor& ids, const Tensor& distances, int64_t rows, int64_t block,
                  int64_t rows_per_rank, int64_t ranks, int64_t share) {
  check_ids_kind(kShard, "ids", ids);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  check_count(kShard, "rows", rows, kMost);
  check_count(kShard, "block", block, kMost, 1);
  check_count(kShard, "ranks", ranks, kMost, 1);
  check_count(kShard, "rows_per_rank", rows_per_rank, (kMost - 1) / ranks);
  check_count(kShard, "share", share, (std::numeric_limits<int32_t>::max() - ranks) / ranks, -1);
  const int64_t blocks = rows / block + (rows % block != 0);
  check_list(kShard, "distances", distances, "ids", ids, std::max<int64_t>(blocks, 1));
}

// Calls use(i) for i < count on torch's threads.
template <typename Use>
void for_each(int64_t count, const Use& use) {
  parallel_for(0, count, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) use(i);
  });
}

void fill_on_cpu(const ShardIds& work, const PlanView& plan) {
  const int64_t distinct = plan.status->distinct;
  for (int64_t rank = 0; rank <= work.ranks; ++rank) {
    work.begins[rank] =
        std::lower_bound(plan.unique, plan.unique + distinct, rank * work.rows_per_rank) -
        plan.unique;
  }
  work.begins[work.ranks + 1] = distinct;
  ShardFault fault = work.fault_of(work.ranks);
  for (int64_t rank = 0; rank < work.ranks; ++rank) {
    work.counts[rank] = work.count_of(rank);
    fault = std::max(fault, work.fault_of(rank));
  }
  for_each(work.sent_size(), [&](int64_t i) { work.send(plan, i, fault); });
  if (work.share < 0) return;
  for_each(work.count, [&](int64_t i) { work.places[i] = work.place_of(plan, i); });
}

// Returns the numbers of the rows, their plan, the counts and the rows to send. With a share, also
// the places of the ids' rows in the blocks, and the entries of `unique` in the blocks.
Tensors shard_ids(const Tensor& ids, const Tensor& distances, int64_t rows, int64_t block,
                  int64_t rows_per_rank, int64_t ranks, int64_t share) {
  const Arguments all(kShard, {read("ids", ids), read("distances", distances)});
  check_shards(ids, distances, rows, block, rows_per_rank, ranks, share);
  all.check_memory();
  std::optional<CurrentStream> stream;
  if (!ids.is_cpu()) stream.emplace(kShard, ids);
  auto numbers_like = [&](const std::vector<int64_t>& shape) {
    return new_tensor(kShard, shape, ScalarType::Long, ids);
  };
  const Ids view = as_ids(ids);
  const Tensor numbers = numbers_like(shape_of(ids)), counts = numbers_like({ranks});
  const Tensor begins = numbers_like({ranks + 3});
  const bool in_blocks = share >= 0;
  const Tensor sent = in_blocks ? numbers_like({ranks, share + 1}) : numbers_like({view.count});
  Tensors blocks;
  if (in_blocks) blocks = {numbers_like(shape_of(ids)), numbers_like({ranks * share})};
  const ShardIds work{.ids = view.data,
                      .wide = view.wide,
                      .count = view.count,
                      .distances = data_of(distances),
                      .rows = rows,
                      .block = block,
                      .rows_per_rank = rows_per_rank,
                      .ranks = ranks,
                      .share = share,
                      .numbers = data_of(numbers),
                      .begins = data_of(begins),
                      .counts = data_of(counts),
                      .sent = data_of(sent),
                      .places = in_blocks ? data_of(blocks[0]) : nullptr,
                      .entries = in_blocks ? data_of(blocks[1]) : nullptr};
  if (!stream) {
    for_each(work.count, [&](int64_t i) { work.numbers[i] = work.number_of(view.at(i)); });
  } else if constexpr (kWithCuda) {
    check_cuda(launch_number_ids(work, stream->get()), kShard);
  }
  void* queue = stream ? stream->get() : nullptr;
  const Tensors plan = make_plan(kShard, as_ids(numbers), {.rows = work.end() + 1}, queue);
  const PlanView planned = view_plan(kShard, "ids", plan, view.count, work.end() + 1);
  if (!stream) {
    fill_on_cpu(work, planned);
  } else if constexpr (kWithCuda) {
    check_cuda(launch_shard_ids(work, planned, queue), kShard);
  }
  Tensors made{numbers};
  made.insert(made.end(), plan.begin(), plan.end());
  made.insert(made.end(), {counts, sent});
  made.insert(made.end(), blocks.begin(), blocks.end());
  return made;
}

// ---- requested_ids

// Returns the ids and the largest fault of all ranks. `differs`: nonzero if ranks look up different
// tables.
std::tuple<Tensor, Tensor> requested_ids(const Tensor& blocks, int64_t none,
                                         const std::optional<Tensor>& differs) {
  const Arguments all(kRequested, {read(kBlocks, blocks), read("differs", differs)});
  check_list(kRequested, kBlocks, blocks, kBlocks, blocks, std::nullopt, 2);
  check_shape(kRequested, kBlocks, blocks, {blocks.size(0), std::max<int64_t>(blocks.size(1), 1)});
  if (differs) check_list(kRequested, "differs", *differs, kBlocks, blocks, 1);
  all.check_memory();
  const int64_t ranks = blocks.size(0), share = blocks.size(1) - 1;
  const Tensor ids = new_tensor(kRequested, {ranks * share}, ScalarType::Long, blocks);
  const Tensor fault = new_tensor(kRequested, {1}, ScalarType::Long, blocks);
  const RequestedIds work{.blocks = data_of(blocks),
                          .ranks = ranks,
                          .share = share,
                          .none = none,
                          .differs = differs ? data_of(*differs) : nullptr,
                          .ids = data_of(ids),
                          .fault = data_of(fault)};
  if (blocks.is_cpu()) {
    *work.fault = work.own_fault();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      *work.fault = std::max(*work.fault, work.fault_of(rank));
    }
    for (int64_t i = 0; i < ranks * share; ++i) work.ids[i] = work.id_at(i);
    return {ids, fault};
  }
  const CurrentStream stream(kRequested, blocks);
  if constexpr (kWithCuda) check_cuda(launch_requested_ids(work, stream.get()), kRequested);
  return {ids, fault};
}

const Ops kOps{
    {"shard_ids(Tensor ids, Tensor distances, int rows, int block, int rows_per_rank, int ranks, "
     "int share) "
     "-> Tensor[]",
     TORCH_BOX(&shard_ids)},
    {"requested_ids(Tensor blocks, int none, Tensor? differs=None) -> (Tensor, Tensor)",
     TORCH_BOX(&requested_ids)},
};

}  // namespace
}  // namespace speedtorch
