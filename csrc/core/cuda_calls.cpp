// Fills the table of CUDA calls: the real calls in a build with CUDA, "no device" otherwise.

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

int pointer_kind(const void* address, int* kind, void** on_gpu) {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, address);
  if (error != cudaSuccess) return error;
  *kind = attributes.type;
  *on_gpu = attributes.devicePointer;
  return error;
}

template <cudaDeviceAttr kAttribute>
int device_attribute(int device, int* value) {
  return cudaDeviceGetAttribute(value, kAttribute, device);
}

// Wraps a CUDA call that differs from the table's entry only in argument types.
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

int stream_id(void* stream, unsigned long long* id) {
#if CUDART_VERSION >= 12000
  return cudaStreamGetId(static_cast<cudaStream_t>(stream), id);
#else  // streams have no ids in this version
  *id = reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
#endif
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
      .driver_version = call<cudaDriverGetVersion>,
      .runtime_version = call<cudaRuntimeGetVersion>,
      .device_count = call<cudaGetDeviceCount>,
      .multiprocessors = device_attribute<cudaDevAttrMultiProcessorCount>,
      .concurrent_managed_access = device_attribute<cudaDevAttrConcurrentManagedAccess>,
      .host_page_tables = device_attribute<cudaDevAttrPageableMemoryAccessUsesHostPageTables>,
      .bulk_copies = query_bulk_copies,
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
      .host_free = call<cudaFreeHost>,
      .reserve_addresses = reserve_addresses,
      .free_addresses = free_addresses,
      .map_memory = map_memory,
      .unmap_memory = unmap_memory,
      .pointer_kind = pointer_kind,
      .copy_to_host = [](void* to, const void* from, size_t bytes, void* stream) -> int {
        return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost,
                               static_cast<cudaStream_t>(stream));
      },
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
      .stream_id = stream_id,
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

// The oldest NVIDIA driver for a CUDA major version; 0: unknown.
constexpr int driver_release(int major) { return major == 13 ? 580 : major == 12 ? 525 : 0; }

std::string version_text(int version) { return text(version / 1000, ".", version % 1000 / 10); }

// The error text for a driver that is too old, else empty, also without a driver. Every driver of a
// major version runs builds with any of its minor versions.
std::string why_driver_is_too_old() {
  int has = 0, built_with = 0;
  if (!succeeded(cuda_calls().driver_version(&has)) ||
      !succeeded(cuda_calls().runtime_version(&built_with))) {
    return {};
  }
  const int major = built_with / 1000, release = driver_release(major);
  if (has == 0 || has / 1000 >= major) return {};
  const std::string named = release == 0 ? "" : text(" (NVIDIA's driver ", release, " or newer)");
  return text("NVIDIA's driver is too old: it supports CUDA ", version_text(has),
              " at most. This speedtorch was built with CUDA ", version_text(built_with),
              " and needs a driver for CUDA ", major, ".0 or newer", named,
              ". Update the driver, or build speedtorch with an nvcc of CUDA ", has / 1000);
}

}  // namespace

CudaCalls& cuda_calls() {
  static CudaCalls calls = real_calls();
  return calls;
}

std::string without_gpu(int error) {
  std::string why = error == kInsufficientDriver ? why_driver_is_too_old() : "";
  if (why.empty()) {
    why = kWithCuda ? "No GPU or no driver was found" : "speedtorch was built without CUDA";
  }
  return text(". ", why, ". Use memory='plain' or memory='auto', or leave the tensor unpinned");
}

void check_driver() {
  const std::string why = why_driver_is_too_old();
  if (!why.empty()) throw std::runtime_error(why);
}

bool succeeded(int error) {
  if (error != 0) cuda_calls().last_error();
  return error == 0;
}

void check_cuda(int error, const char* what) {
  if (succeeded(error)) return;
  std::string why = error == kInsufficientDriver ? why_driver_is_too_old() : "";
  if (why.empty()) why = cuda_calls().error_string(error);
  throw std::runtime_error(text(what, " failed: ", why, " (CUDA error ", error, ")"));
}

}  // namespace speedtorch

extern "C" __attribute__((visibility("default"))) speedtorch::CudaCalls* speedtorch_cuda_calls() {
  return &speedtorch::cuda_calls();
}
