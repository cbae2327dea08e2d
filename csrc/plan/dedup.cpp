// Dedup of a batch; see dedup.h. The kernels are in dedup.cu.

#include "plan/dedup.h"

#include <bit>

#include "call/torch_calls.h"
#include "core/cuda_calls.h"

namespace speedtorch {

Dedup dedup_ids(const char* op, const Ids& ids, Keep keep, int64_t rows, const Tensor& on,
                void* stream) {
  DedupView view = only_ids(ids);
  // Twice as many slots as ids keep the walks through the hash table short.
  view.slot_count = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(2 * ids.count)));
  const int64_t numbers = view.slot_count + 2 * ids.count;
  const int64_t bytes = static_cast<int64_t>(sizeof(DedupStatus) + sizeof(int32_t) * numbers);
  const Tensor memory = new_tensor(op, {bytes}, ScalarType::Byte, on);
  view.status = static_cast<DedupStatus*>(memory.mutable_data_ptr());
  view.slots = reinterpret_cast<int32_t*>(view.status + 1);
  view.kept_at = view.slots + view.slot_count;
  view.repeated = view.kept_at + ids.count;
  if constexpr (kWithCuda) check_cuda(launch_dedup(view, keep, rows, stream), op);
  return {memory, view};
}

Dedup check_ids_on_gpu(const char* op, const Ids& ids, int64_t rows, const Tensor& on,
                       void* stream) {
  const Tensor memory = new_tensor(op, {sizeof(DedupStatus)}, ScalarType::Byte, on);
  DedupView view = only_ids(ids);
  view.status = static_cast<DedupStatus*>(memory.mutable_data_ptr());
  if constexpr (kWithCuda) check_cuda(launch_check_ids(view, rows, stream), op);
  return {memory, view};
}

IdsOnce take_ids_once(const char* op, const char* list, const Ids& ids, bool planned,
                      const Plan& plan, Keep keep, int64_t rows, const Tensor& on, void* stream) {
  IdsOnce once;
  if (planned) {
    once.plan = plan ? *plan : make_plan(op, ids, rows, on, stream);
    once.view.plan = view_plan(op, list, once.plan, ids.count, rows);
  } else {
    once.dedup = dedup_ids(op, ids, keep, rows, on, stream);
    once.view.dedup = once.dedup.view;
  }
  return once;
}

DedupView only_ids(const Ids& ids) {
  return {.ids = ids.data, .wide = ids.wide, .count = ids.count};
}

}  // namespace speedtorch
