// Winners of a batch; see winners.h. The kernels are in winners.cu.

#include "plan/winners.h"

#include <bit>

#include "call/torch_calls.h"
#include "core/cuda_calls.h"

namespace speedtorch {

Winners find_winners(const char* op, const Ids& ids, Winner winner, int64_t rows, const Tensor& on,
                     void* stream) {
  WinnersView view = only_ids(ids);
  // Twice as many slots as ids keep the walks through the hash table short.
  view.slot_count = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(2 * ids.count)));
  const int64_t numbers = view.slot_count + 2 * ids.count;
  const int64_t bytes = static_cast<int64_t>(sizeof(WinnersStatus) + sizeof(int32_t) * numbers);
  const Tensor memory = new_tensor(op, {bytes}, ScalarType::Byte, on);
  view.status = static_cast<WinnersStatus*>(memory.mutable_data_ptr());
  view.slots = reinterpret_cast<int32_t*>(view.status + 1);
  view.winner = view.slots + view.slot_count;
  view.repeated = view.winner + ids.count;
  if constexpr (kWithCuda) check_cuda(launch_winners(view, winner, rows, stream), op);
  return {memory, view};
}

Winners check_ids_on_gpu(const char* op, const Ids& ids, int64_t rows, const Tensor& on,
                         void* stream) {
  const Tensor memory = new_tensor(op, {sizeof(WinnersStatus)}, ScalarType::Byte, on);
  WinnersView view = only_ids(ids);
  view.status = static_cast<WinnersStatus*>(memory.mutable_data_ptr());
  if constexpr (kWithCuda) check_cuda(launch_check_ids(view, rows, stream), op);
  return {memory, view};
}

IdsOnce take_ids_once(const char* op, const char* list, const Ids& ids, bool planned,
                      const Plan& plan, Winner winner, int64_t rows, const Tensor& on,
                      void* stream) {
  IdsOnce once;
  if (planned) {
    once.plan = plan ? *plan : make_plan(op, ids, rows, on, stream);
    once.view.plan = view_plan(op, list, once.plan, ids.count, rows);
  } else {
    once.winners = find_winners(op, ids, winner, rows, on, stream);
    once.view.winners = once.winners.view;
  }
  return once;
}

WinnersView only_ids(const Ids& ids) {
  return {.ids = ids.data, .wide = ids.wide, .count = ids.count};
}

}  // namespace speedtorch
