// Kernels of plan_fault and spoil_plan: one thread each. Called by plan_fault.cpp.

#include <cuda_runtime.h>

#include "ops/launchers.h"

namespace speedtorch {
namespace {

__global__ void plan_fault_kernel(PlanFault work, int64_t* fault) { *fault = work.kind(); }

__global__ void spoil_plan_kernel(PlanFault work, const int64_t* agreed) { work.spoil(*agreed); }

}  // namespace

int launch_plan_fault(const PlanFault& work, int64_t* fault, void* stream) {
  plan_fault_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(work, fault);
  return cudaGetLastError();
}

int launch_spoil_plan(const PlanFault& work, const int64_t* agreed, void* stream) {
  spoil_plan_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(work, agreed);
  return cudaGetLastError();
}

}  // namespace speedtorch
