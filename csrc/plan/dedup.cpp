// Prepares ids on a GPU; see dedup.h. Launches the kernels of dedup.cu or makes a plan.

#ifdef SPEEDTORCH_CUDA

#include "plan/dedup.h"

#include <bit>

#include "call/torch_calls.h"
#include "core/cuda_calls.h"

namespace speedtorch {

RowIds find_row_ids(const char* op, const char* list, const Ids& ids, Path path, const Plan& plan,
                    Keep keep, int64_t rows, void* stream) {
  RowIds found;
  if (path == Path::kOrdered) {
    found.keep = plan ? *plan : make_plan(op, ids, {rows}, stream);
    found.view.plan = view_plan(op, list, found.keep, ids.count, rows);
    return found;
  }
  DedupView& view = found.view.dedup;
  view = {.ids = ids.data, .wide = ids.wide, .count = ids.count};
  if (path == Path::kDirect) {
    static_assert(kIdsDedupedInBlock <= kIdsCheckedInBlock);
    if (ids.count <= kIdsCheckedInBlock) return found;
    keep = Keep::kAll;
  }
  const int64_t kept = keep == Keep::kAll ? 0 : ids.count;
  // At least two slots per id keep the probe sequences of the hash table short.
  if (kept > 0) view.slot_count = std::bit_ceil(static_cast<uint64_t>(2 * kept));
  const int64_t numbers = view.slot_count + 2 * kept;
  const int64_t bytes = static_cast<int64_t>(sizeof(DedupStatus) + sizeof(int32_t) * numbers);
  found.keep.push_back(new_tensor(op, {bytes}, ScalarType::Byte, ids.keep));
  view.status = static_cast<DedupStatus*>(found.keep[0].mutable_data_ptr());
  if (kept > 0) {
    view.slots = reinterpret_cast<int32_t*>(view.status + 1);
    view.kept_at = view.slots + view.slot_count;
    view.repeated = view.kept_at + kept;
  }
  check_cuda(launch_dedup(view, keep, rows, stream), op);
  return found;
}

}  // namespace speedtorch

#endif
