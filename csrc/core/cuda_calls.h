// Every CUDA runtime call that the host side makes, behind one table of function pointers.
// The rest of csrc/*.cpp calls through it, so that it builds and runs without CUDA, and so that
// tests can put a failing or a pretended driver there (the table is exported as
// `speedtorch_cuda_calls`). Results are cudaError_t values; 0 is success.
#pragma once

#include <cstddef>

namespace speedtorch {

// Whether the current device, `device`, has bulk copies; pinned_copy.cu knows. A cudaError_t.
int ask_bulk_copies(int device, int* supported);

// The values are cudaMemoryType's.
enum class PointerKind : int { kPageable = 0, kHost = 1, kDevice = 2, kManaged = 3 };

// What each call does in a build without CUDA: cudaErrorNoDevice; nothing is written.
template <typename... Arguments>
int no_device(Arguments...) {
  return 100;
}

struct CudaCalls {
  int (*device_count)(int* count) = no_device;
  int (*concurrent_managed_access)(int device, int* supported) = no_device;
  int (*bulk_copies)(int device, int* supported) = no_device;
  int (*malloc_managed)(void** address, size_t bytes) = no_device;
  int (*free_managed)(void* address) = no_device;
  int (*advise_preferred_host)(void* address, size_t bytes) = no_device;
  int (*advise_accessed_by)(void* address, size_t bytes, int device) = no_device;
  int (*host_register)(void* address, size_t bytes, int read_only) = no_device;
  int (*host_unregister)(void* address) = no_device;
  int (*host_alloc)(void** address, size_t bytes) = no_device;
  int (*pointer_kind)(const void* address, int* kind) = no_device;
  int (*event_create)(void** event) = no_device;
  int (*event_record)(void* event, void* stream) = no_device;
  int (*event_query)(void* event) = no_device;
  int (*event_synchronize)(void* event) = no_device;
  int (*event_destroy)(void* event) = no_device;
  int (*stream_create)(void** stream) = no_device;
  int (*stream_is_capturing)(void* stream, int* capturing) = no_device;
  int (*relax_capture)(int* mode) = no_device;
  // Calls gone(data) when the graph that the stream captures, and all that was made of it, is gone.
  int (*retain_in_capture)(void* stream, void* data, void (*gone)(void*)) = no_device;
  int (*get_device)(int* device) = no_device;
  int (*set_device)(int device) = no_device;
  int (*device_synchronize)() = no_device;
  int (*last_error)() = [] { return 0; };
  const char* (*error_string)(int error) = [](int) { return "built without CUDA"; };
};

CudaCalls& cuda_calls();

// True for the errors that say there is no GPU or no driver for it (or no CUDA in this build).
constexpr bool is_without_gpu(int error) { return error == 35 || error == 100; }
constexpr const char* kWithoutGpu =
    ", and there is none or no driver for it; use memory='plain' or memory='auto'";

#ifdef SPEEDTORCH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

// Throws std::runtime_error("<what> failed: <reason> (CUDA error <n>)") unless `error` is 0. Clears
// CUDA's last error first, so that it does not surface later in innocent code.
void check_cuda(int error, const char* what);

// While one lives, this thread may allocate, query and free although some stream captures a CUDA
// graph.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() noexcept {
    if (cuda_calls().relax_capture(&mode_) != 0) cuda_calls().last_error();
  }
  int mode_ = 2;  // cudaStreamCaptureModeRelaxed; holds the thread's former mode in between
};

}  // namespace speedtorch
