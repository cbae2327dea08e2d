// The table of CUDA calls: the real ones where CUDA was compiled in, "no device" everywhere else.

#include "core/cuda_calls.h"

#include <stdexcept>

#include "core/text.h"

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
  if (error == cudaSuccess) *kind = attributes.type;
  return error;
}

// A CUDA call whose arguments differ from the table's by their types alone.
template <auto kCall, typename... From>
int call(From... from) {
  auto convert = [&]<typename... To>(cudaError_t (*)(To...)) {
    return kCall(static_cast<To>(from)...);
  };
  return convert(kCall);
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

int retain_in_capture(void* stream, void* data, void (*gone)(void*)) {
  cudaStreamCaptureStatus status{};
  cudaGraph_t graph = nullptr;
  auto on = static_cast<cudaStream_t>(stream);
#if CUDART_VERSION >= 13000
  cudaError_t error = cudaStreamGetCaptureInfo(on, &status, nullptr, &graph);
#else
  cudaError_t error = cudaStreamGetCaptureInfo_v2(on, &status, nullptr, &graph);
#endif
  if (error != cudaSuccess) return error;
  if (status != cudaStreamCaptureStatusActive) return cudaErrorIllegalState;
  cudaUserObject_t object = nullptr;
  error = cudaUserObjectCreate(&object, data, gone, 1, cudaUserObjectNoDestructorSync);
  if (error != cudaSuccess) return error;
  error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) cudaUserObjectRelease(object, 1);
  return error;
}

CudaCalls real_calls() {
  return {
      .device_count = call<cudaGetDeviceCount>,
      .concurrent_managed_access = [](int device, int* supported) -> int {
        return cudaDeviceGetAttribute(supported, cudaDevAttrConcurrentManagedAccess, device);
      },
      .bulk_copies = ask_bulk_copies,
      .malloc_managed = [](void** address, size_t bytes) -> int {
        return cudaMallocManaged(address, bytes);
      },
      .free_managed = call<cudaFree>,
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
      .host_unregister = call<cudaHostUnregister>,
      .host_alloc = [](void** address, size_t bytes) -> int {
        return cudaHostAlloc(address, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
      },
      .pointer_kind = pointer_kind,
      .event_create = [](void** event) -> int {
        return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event),
                                        cudaEventDisableTiming);
      },
      .event_record = call<cudaEventRecord>,
      .event_query = call<cudaEventQuery>,
      .event_synchronize = call<cudaEventSynchronize>,
      .event_destroy = call<cudaEventDestroy>,
      .stream_create = [](void** stream) -> int {
        return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream),
                                         cudaStreamNonBlocking);
      },
      .stream_is_capturing = stream_is_capturing,
      .relax_capture = relax_capture,
      .retain_in_capture = retain_in_capture,
      .get_device = call<cudaGetDevice>,
      .set_device = call<cudaSetDevice>,
      .device_synchronize = call<cudaDeviceSynchronize>,
      .last_error = call<cudaGetLastError>,
      .error_string = [](int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); },
  };
}

#else

CudaCalls real_calls() { return {}; }

#endif

}  // namespace

CudaCalls& cuda_calls() {
  static CudaCalls calls = real_calls();
  return calls;
}

void check_cuda(int error, const char* what) {
  if (error == 0) return;
  cuda_calls().last_error();
  throw std::runtime_error(
      text(what, " failed: ", cuda_calls().error_string(error), " (CUDA error ", error, ")"));
}

}  // namespace speedtorch

extern "C" __attribute__((visibility("default"))) speedtorch::CudaCalls* speedtorch_cuda_calls() {
  return &speedtorch::cuda_calls();
}
