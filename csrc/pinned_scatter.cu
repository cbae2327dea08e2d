// Kernels of pinned_scatter: rows on the GPU to a mapped host table (or a table on the GPU), in
// address order. Called by pinned_scatter.cpp with checked shapes; bad ids leave the table as it
// was and word in the letter box.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "letter.cuh"
#include "pinned_scatter_launch.h"
#include "row_mover.cuh"

namespace speedtorch {
namespace {

// The last occurrence of distinct id m.
struct LastOccurrences {
  PlanView plan;
  Complaint complaint;

  __device__ bool blocked() const { return is_blocked(*plan.status, complaint.rows); }
  __device__ void complain() const { complain_if_blocked(complaint, *plan.status); }
  __device__ int64_t count() const { return plan.status->distinct; }
  __device__ int64_t from(int64_t m) const { return plan.order[plan.offsets[m + 1] - 1]; }
  __device__ int64_t to(int64_t m) const { return plan.unique[m]; }
};

template <typename T>
__device__ T add(T a, T b) {
  return static_cast<T>(a + b);
}
__device__ BoolByte add(BoolByte a, BoolByte b) {
  return {static_cast<uint8_t>(a.value | b.value)};
}
__device__ __half add(__half a, __half b) {
  return __float2half_rn(__half2float(a) + __half2float(b));
}
__device__ __nv_bfloat16 add(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __float2bfloat16_rn(__bfloat162float(a) + __bfloat162float(b));
}

// A warp owns a distinct id, a lane every 32nd number of its row. A row crosses the link twice:
// once each way.
template <typename T>
__global__ void __launch_bounds__(kMoverThreads)
    add_rows_kernel(ScatterRows rows, PlanView plan, Complaint complaint) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (is_blocked(*plan.status, complaint.rows)) {
    if (thread == 0) complain_if_blocked(complaint, *plan.status);
    return;
  }
  const int64_t warps = int64_t{gridDim.x} * blockDim.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t numbers = rows.row_bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t m = thread / 32; m < plan.status->distinct; m += warps) {
    T* row = reinterpret_cast<T*>(rows.table + plan.unique[m] * rows.table_stride_bytes);
    const int64_t begin = plan.offsets[m], end = plan.offsets[m + 1];
    for (int64_t column = lane; column < numbers; column += 32) {
      T sum = row[column];
      for (int64_t i = begin; i < end; ++i) {
        sum = add(sum, reinterpret_cast<const T*>(rows.src +
                                                  plan.order[i] * rows.src_stride_bytes)[column]);
      }
      row[column] = sum;
    }
  }
}

}  // namespace

int launch_scatter(const ScatterRows& rows, const PlanView& plan, Letter* box, void* stream) {
  const LastOccurrences moves{plan, {box, Op::kScatter, IdList::kIndex, rows.table_rows}};
  launch_move_rows(moves, RowRange{const_cast<char*>(rows.src), rows.src_stride_bytes},
                   RowRange{rows.table, rows.table_stride_bytes}, rows.row_bytes, plan.count, 0,
                   rows.crosses_link, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int launch_scatter_add(const ScatterRows& rows, const PlanView& plan, AddendKind kind, Letter* box,
                       void* stream) {
  const Complaint complaint{box, Op::kScatter, IdList::kIndex, rows.table_rows};
  // Numbers are added one by one, so accesses are as narrow as the dtype: as many blocks as for
  // 4-byte moves.
  const int64_t most = rows.crosses_link ? kLinkBlocks * 4 : kDeviceBlocks;
  const int64_t warps_per_block = kMoverThreads / 32;
  const int64_t blocks =
      std::clamp<int64_t>((plan.count + warps_per_block - 1) / warps_per_block, 1, most);
  with_addend_type<__half, __nv_bfloat16>(kind, [&](auto number) {
    add_rows_kernel<decltype(number)>
        <<<static_cast<int>(blocks), kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            rows, plan, complaint);
  });
  return cudaGetLastError();
}

}  // namespace speedtorch
