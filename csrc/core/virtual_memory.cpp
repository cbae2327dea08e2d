// CUDA's virtual memory: reserves GPU addresses, and maps and unmaps memory there. Called through
// the table of cuda_calls.h. Only the driver has these calls; it is not linked (see setup.py).

#ifdef SPEEDTORCH_CUDA

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "core/cuda_calls.h"

namespace speedtorch {
namespace {

// Looks up a function of the driver, which the runtime has loaded; null if there is no such
// function.
template <typename Call>
Call driver_call(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
  return driver == nullptr ? nullptr : reinterpret_cast<Call>(dlsym(driver, name));
}

// Driver errors have the same numbers as runtime errors.
#define SPEEDTORCH_DRIVER_CALL(name, ...)                                         \
  [&]() -> int {                                                                  \
    static const auto call = driver_call<decltype(&::name)>(#name);               \
    return call == nullptr ? int{cudaErrorNotSupported} : int{call(__VA_ARGS__)}; \
  }()

// Whether this process uses a GPU.
bool is_in_use(int device) {
  unsigned flags = 0;
  int is_active = 0;
  return SPEEDTORCH_DRIVER_CALL(cuDevicePrimaryCtxGetState, device, &flags, &is_active) == 0 &&
         is_active != 0;
}

// Grants the GPU access to mapped memory, and other GPUs in use if they can access it. Each grant
// takes about 6 ms for a GB.
int grant_access(CUdeviceptr at, size_t bytes, int device) {
  CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (const int error = SPEEDTORCH_DRIVER_CALL(cuMemSetAccess, at, bytes, &access, 1)) return error;
  int count = 0, can = 0;
  if (!succeeded(cudaGetDeviceCount(&count))) return 0;
  for (int peer = 0; peer < count; ++peer) {
    if (peer == device || !is_in_use(peer)) continue;
    if (!succeeded(cudaDeviceCanAccessPeer(&can, peer, device)) || can == 0) continue;
    access.location.id = peer;
    // Without peer access, torch's copies to and from that GPU fail with CUDA's error.
    SPEEDTORCH_DRIVER_CALL(cuMemSetAccess, at, bytes, &access, 1);
  }
  return 0;
}

CUdeviceptr address_of(void* base) { return reinterpret_cast<CUdeviceptr>(base); }

}  // namespace

int reserve_addresses(void** base, size_t bytes) {
  CUdeviceptr made = 0;
  const int error =
      SPEEDTORCH_DRIVER_CALL(cuMemAddressReserve, &made, bytes, kAddressGranularity, 0, 0);
  if (error == 0) *base = reinterpret_cast<void*>(made);
  return error;
}

int free_addresses(void* base, size_t bytes) {
  return SPEEDTORCH_DRIVER_CALL(cuMemAddressFree, address_of(base), bytes);
}

int map_memory(void* base, size_t bytes, int device, unsigned long long* memory) {
  CUmemAllocationProp kind{};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  CUmemGenericAllocationHandle made = 0;
  if (const int error = SPEEDTORCH_DRIVER_CALL(cuMemCreate, &made, bytes, &kind, 0)) return error;
  const CUdeviceptr at = address_of(base);
  int error = SPEEDTORCH_DRIVER_CALL(cuMemMap, at, bytes, 0, made, 0);
  if (error == 0) {
    error = grant_access(at, bytes, device);
    if (error != 0) SPEEDTORCH_DRIVER_CALL(cuMemUnmap, at, bytes);
  }
  if (error != 0) SPEEDTORCH_DRIVER_CALL(cuMemRelease, made);
  *memory = made;
  return error;
}

int unmap_memory(void* base, size_t bytes, unsigned long long memory) {
  const int error = SPEEDTORCH_DRIVER_CALL(cuMemUnmap, address_of(base), bytes);
  return error != 0 ? error : SPEEDTORCH_DRIVER_CALL(cuMemRelease, memory);
}

}  // namespace speedtorch

#endif
