// Claims of a batch; see claims.h. The kernels are in claims.cu.

#include "plan/claims.h"

#include "call/torch_calls.h"
#include "core/cuda_calls.h"
#include "plan/claims_launch.h"

namespace speedtorch {

Claims make_claims(const char* op, const Ids& ids, Winner winner, int64_t rows, const Tensor& on,
                   void* stream) {
  Claims claims;
  claims.memory = new_tensor(op, {claims_bytes(ids.count)}, ScalarType::Byte, on);
  if constexpr (kWithCuda) {
    claims.view = carve_claims(claims.memory->mutable_data_ptr(), ids.data, ids.wide, ids.count);
    check_cuda(launch_claims(claims.view, winner, rows, stream), op);
  }
  return claims;
}

Claims check_ids_on_gpu(const char* op, const Ids& ids, int64_t rows, const Tensor& on,
                        void* stream) {
  Claims claims;
  claims.memory = new_tensor(op, {static_cast<int64_t>(sizeof(ClaimStatus))}, ScalarType::Byte, on);
  claims.view = unclaimed(ids);
  claims.view.status = static_cast<ClaimStatus*>(claims.memory->mutable_data_ptr());
  if constexpr (kWithCuda) check_cuda(launch_check_ids(claims.view, rows, stream), op);
  return claims;
}

ClaimsView unclaimed(const Ids& ids) {
  return {.ids = ids.data, .wide = ids.wide, .count = ids.count};
}

}  // namespace speedtorch
