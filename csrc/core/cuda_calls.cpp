// The table of CUDA calls: the real ones where CUDA was compiled in, "no device" everywhere else.

#include "core/cuda_calls.h"

#include <stdexcept>
#include <string>

#ifdef SPEEDTORCH_CUDA
#include <cuda_runtime_api.h>

#endif

namespace speedtorch {
namespace {

#ifdef SPEEDTORCH_CUDA

#if CUDART_VERSION >= 13000
using Location = cudaMemLocation;
Location host_location() { return {cudaMemLocationTypeHost, 0}; }
Location device_location(int device) { return {cudaMemLocationTypeDevice, device}; }
#else
using Location = int;
Location host_location() { return cudaCpuDeviceId; }
Location device_location(int device) { return device; }
#endif

int pointer_kind(const void* address, int* kind) {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, address);
  if (error != cudaSuccess) return error;
  switch (attributes.type) {
    case cudaMemoryTypeHost:
      *kind = static_cast<int>(PointerKind::kHost);
      break;
    case cudaMemoryTypeDevice:
      *kind = static_cast<int>(PointerKind::kDevice);
      break;
    case cudaMemoryTypeManaged:
      *kind = static_cast<int>(PointerKind::kManaged);
      break;
    default:
      *kind = static_cast<int>(PointerKind::kPageable);
  }
  return cudaSuccess;
}

int stream_is_capturing(void* stream, int* capturing) {
  cudaStreamCaptureStatus status{};
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  *capturing = status != cudaStreamCaptureStatusNone;
  return error;
}

int relax_capture(int* mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(*mode);
  const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&exchanged);
  *mode = exchanged;
  return error;
}

CudaCalls real_calls() {
  return {
      .device_count = [](int* count) -> int { return cudaGetDeviceCount(count); },
      .concurrent_managed_access = [](int device, int* supported) -> int {
        return cudaDeviceGetAttribute(supported, cudaDevAttrConcurrentManagedAccess, device);
      },
      .bulk_copies = ask_bulk_copies,
      .malloc_managed = [](void** address, size_t bytes) -> int {
        return cudaMallocManaged(address, bytes);
      },
      .free_managed = [](void* address) -> int { return cudaFree(address); },
      .advise_preferred_host = [](void* address, size_t bytes) -> int {
        return cudaMemAdvise(address, bytes, cudaMemAdviseSetPreferredLocation, host_location());
      },
      .advise_accessed_by = [](void* address, size_t bytes, int device) -> int {
        return cudaMemAdvise(address, bytes, cudaMemAdviseSetAccessedBy, device_location(device));
      },
      .host_register = [](void* address, size_t bytes, int read_only) -> int {
        const unsigned flags = cudaHostRegisterMapped | cudaHostRegisterPortable |
                               (read_only ? cudaHostRegisterReadOnly : 0u);
        return cudaHostRegister(address, bytes, flags);
      },
      .host_unregister = [](void* address) -> int { return cudaHostUnregister(address); },
      .host_alloc = [](void** address, size_t bytes) -> int {
        return cudaHostAlloc(address, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
      },
      .pointer_kind = pointer_kind,
      .event_create = [](void** event) -> int {
        return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event),
                                        cudaEventDisableTiming);
      },
      .event_record = [](void* event, void* stream) -> int {
        return cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream));
      },
      .event_query = [](void* event) -> int {
        return cudaEventQuery(static_cast<cudaEvent_t>(event));
      },
      .event_synchronize = [](void* event) -> int {
        return cudaEventSynchronize(static_cast<cudaEvent_t>(event));
      },
      .event_destroy = [](void* event) -> int {
        return cudaEventDestroy(static_cast<cudaEvent_t>(event));
      },
      .stream_is_capturing = stream_is_capturing,
      .relax_capture = relax_capture,
      .get_device = [](int* device) -> int { return cudaGetDevice(device); },
      .set_device = [](int device) -> int { return cudaSetDevice(device); },
      .device_synchronize = []() -> int { return cudaDeviceSynchronize(); },
      .last_error = []() -> int { return cudaGetLastError(); },
      .error_string = [](int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); },
  };
}

#else

constexpr int kNoDevice = 100;  // cudaErrorNoDevice

CudaCalls real_calls() {
  return {
      .device_count = [](int* count) { return *count = 0, kNoDevice; },
      .concurrent_managed_access = [](int, int* supported) { return *supported = 0, kNoDevice; },
      .bulk_copies = [](int, int* supported) { return *supported = 0, kNoDevice; },
      .malloc_managed = [](void**, size_t) { return kNoDevice; },
      .free_managed = [](void*) { return kNoDevice; },
      .advise_preferred_host = [](void*, size_t) { return kNoDevice; },
      .advise_accessed_by = [](void*, size_t, int) { return kNoDevice; },
      .host_register = [](void*, size_t, int) { return kNoDevice; },
      .host_unregister = [](void*) { return kNoDevice; },
      .host_alloc = [](void**, size_t) { return kNoDevice; },
      .pointer_kind = [](const void*, int*) { return kNoDevice; },
      .event_create = [](void**) { return kNoDevice; },
      .event_record = [](void*, void*) { return kNoDevice; },
      .event_query = [](void*) { return kNoDevice; },
      .event_synchronize = [](void*) { return kNoDevice; },
      .event_destroy = [](void*) { return kNoDevice; },
      .stream_is_capturing = [](void*, int*) { return kNoDevice; },
      .relax_capture = [](int*) { return kNoDevice; },
      .get_device = [](int*) { return kNoDevice; },
      .set_device = [](int) { return kNoDevice; },
      .device_synchronize = []() { return kNoDevice; },
      .last_error = []() { return 0; },
      .error_string = [](int) { return "built without CUDA"; },
  };
}

#endif

}  // namespace

CudaCalls& cuda_calls() {
  static CudaCalls calls = real_calls();
  return calls;
}

void check_cuda(int error, const char* what) {
  if (error == 0) return;
  cuda_calls().last_error();
  throw std::runtime_error(std::string(what) + " failed: " + cuda_calls().error_string(error) +
                           " (CUDA error " + std::to_string(error) + ")");
}

}  // namespace speedtorch

extern "C" __attribute__((visibility("default"))) speedtorch::CudaCalls* speedtorch_cuda_calls() {
  return &speedtorch::cuda_calls();
}
