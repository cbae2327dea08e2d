// Every CUDA runtime call that the host side makes, behind one table of function pointers.
// The rest of csrc/*.cpp calls through it, so that it builds and runs without CUDA, and so that
// tests can put a failing or a pretended driver there (the table is exported as
// `speedtorch_cuda_calls`). Results are cudaError_t values; 0 is success.
#pragma once

#include <cstddef>
#include <string>

namespace speedtorch {

// Whether the current device, `device`, has bulk copies; pinned_copy.cu knows. A cudaError_t.
int ask_bulk_copies(int device, int* supported);

// A GPU's addresses without memory behind them, and memory there; virtual_memory.cpp has them. A
// cudaError_t each. The base and the bytes are multiples of kAddressUnit.
constexpr size_t kAddressUnit = size_t{2} << 20;
int reserve_addresses(void** base, size_t bytes);
int free_addresses(void* base, size_t bytes);
// All or nothing; `memory` is its handle.
int map_memory(void* base, size_t bytes, int device, unsigned long long* memory);
int unmap_memory(void* base, size_t bytes, unsigned long long memory);

// The values are cudaMemoryType's.
enum class PointerKind : int { kPageable = 0, kHost = 1, kDevice = 2, kManaged = 3 };

// What each call does in a build without CUDA: cudaErrorNoDevice; nothing is written.
template <typename... Arguments>
int no_device(Arguments...) {
  return 100;
}

struct CudaCalls {
  // As 12040 for CUDA 12.4: the newest that the driver runs (0: there is no driver), and the one
  // that this library was built with.
  int (*driver_version)(int* version) = no_device;
  int (*runtime_version)(int* version) = no_device;
  int (*device_count)(int* count) = no_device;
  int (*multiprocessors)(int device, int* count) = no_device;
  int (*concurrent_managed_access)(int device, int* supported) = no_device;
  // Whether kernels reach pageable memory through the host's page tables, as on Grace.
  int (*host_page_tables)(int device, int* used) = no_device;
  int (*bulk_copies)(int device, int* supported) = no_device;
  int (*malloc_managed)(void** address, size_t bytes) = no_device;
  int (*free_managed)(void* address) = no_device;
  int (*advise_preferred_host)(void* address, size_t bytes) = no_device;
  int (*advise_accessed_by)(void* address, size_t bytes, int device) = no_device;
  int (*host_register)(void* address, size_t bytes, int read_only) = no_device;
  int (*host_unregister)(void* address) = no_device;
  int (*host_alloc)(void** address, size_t bytes) = no_device;
  int (*host_free)(void* address) = no_device;
  int (*reserve_addresses)(void** base, size_t bytes) = no_device;
  int (*free_addresses)(void* base, size_t bytes) = no_device;
  int (*map_memory)(void* base, size_t bytes, int device, unsigned long long* memory) = no_device;
  int (*unmap_memory)(void* base, size_t bytes, unsigned long long memory) = no_device;
  // `on_gpu`: where kernels on the current device find the memory; null if they do not reach it.
  int (*pointer_kind)(const void* address, int* kind, void** on_gpu) = no_device;
  // Queues the copy; `to` is pinned, or the call may wait for it.
  int (*copy_to_host)(void* to, const void* from, size_t bytes, void* stream) = no_device;
  int (*event_create)(void** event) = no_device;
  int (*event_record)(void* event, void* stream) = no_device;
  int (*event_query)(void* event) = no_device;
  int (*event_synchronize)(void* event) = no_device;
  int (*event_destroy)(void* event) = no_device;
  int (*stream_create)(void** stream) = no_device;
  int (*stream_is_capturing)(void* stream, int* capturing) = no_device;
  // A number that no other stream of the device ever has; handles return to new streams.
  int (*stream_id)(void* stream, unsigned long long* id) = no_device;
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

constexpr int kNoMemory = 2;             // cudaErrorMemoryAllocation
constexpr int kInsufficientDriver = 35;  // also the answer where there is no driver at all

// True for the errors that say there is no GPU or no driver for it (or no CUDA in this build).
constexpr bool is_without_gpu(int error) { return error == kInsufficientDriver || error == 100; }
// What follows "... needs a GPU" for one of these errors: there is none, or the driver is too old;
// and the remedy.
std::string without_gpu(int error);
// Throws std::runtime_error, which names both, if the driver is older than this library needs.
void check_driver();

#ifdef SPEEDTORCH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

// Whether a call succeeded whose failure the caller can live with. A failure is cleared, so that it
// does not surface later in innocent code.
bool succeeded(int error);
// Throws std::runtime_error("<what> failed: <reason> (CUDA error <n>)") unless `error` is 0. Clears
// it as above. Where the driver is too old for this library, the reason says which one is needed.
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
  void exchange() noexcept { succeeded(cuda_calls().relax_capture(&mode_)); }
  int mode_ = 2;  // cudaStreamCaptureModeRelaxed; holds the thread's former mode in between
};

}  // namespace speedtorch
