// The CUDA calls of all .cpp files except virtual_memory.cpp, behind one table of function
// pointers, so that these files build and run without CUDA. The .cu files call CUDA directly. Tests
// replace entries with failing or simulated ones (exported as `speedtorch_cuda_calls`). Results are
// cudaError_t values; 0 is success.
#pragma once

#include <cstddef>
#include <string>

namespace speedtorch {

// Reports whether `device`, the current device, has bulk copies. Defined in pinned_copy.cu. Returns
// a cudaError_t.
int query_bulk_copies(int device, int* supported);

// Reserves and maps GPU addresses; defined in virtual_memory.cpp. Each returns a cudaError_t. The
// base and the bytes are multiples of kAddressGranularity.
constexpr size_t kAddressGranularity = size_t{2} << 20;
int reserve_addresses(void** base, size_t bytes);
int free_addresses(void* base, size_t bytes);
// A failure maps nothing. `memory` receives the handle.
int map_memory(void* base, size_t bytes, int device, unsigned long long* memory);
int unmap_memory(void* base, size_t bytes, unsigned long long memory);

// The values equal cudaMemoryType.
enum class PointerKind : int { kPageable = 0, kHost = 1, kDevice = 2, kManaged = 3 };

// A call in a build without CUDA: returns cudaErrorNoDevice and writes nothing.
template <typename... Arguments>
int no_device(Arguments...) {
  return 100;
}

struct CudaCalls {
  // Versions such as 12040 for CUDA 12.4. driver_version: the newest version that the driver
  // supports, 0 without a driver. runtime_version: the version of this build.
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
  // `on_gpu`: the address for kernels on the current device; null if they cannot access the memory.
  int (*pointer_kind)(const void* address, int* kind, void** on_gpu) = no_device;
  // Queues the copy. The call may wait for the copy if `to` is not pinned.
  int (*copy_to_host)(void* to, const void* from, size_t bytes, void* stream) = no_device;
  int (*event_create)(void** event) = no_device;
  int (*event_record)(void* event, void* stream) = no_device;
  int (*event_query)(void* event) = no_device;
  int (*event_synchronize)(void* event) = no_device;
  int (*event_destroy)(void* event) = no_device;
  int (*stream_create)(void** stream) = no_device;
  int (*stream_is_capturing)(void* stream, int* capturing) = no_device;
  // A number that no other stream of the device ever gets; new streams reuse handles. Before CUDA
  // 12, streams have no such number, and this is the handle.
  int (*stream_id)(void* stream, unsigned long long* id) = no_device;
  int (*relax_capture)(int* mode) = no_device;
  // Calls gone(data) after the graph that the stream captures, and every graph made from it, is
  // destroyed.
  int (*retain_in_capture)(void* stream, void* data, void (*gone)(void*)) = no_device;
  int (*get_device)(int* device) = no_device;
  int (*set_device)(int device) = no_device;
  int (*device_synchronize)() = no_device;
  int (*last_error)() = [] { return 0; };
  const char* (*error_string)(int error) = [](int) { return "built without CUDA"; };
};

CudaCalls& cuda_calls();

constexpr int kNoMemory = 2;             // cudaErrorMemoryAllocation
constexpr int kInsufficientDriver = 35;  // also returned without any driver

// True for errors that mean no GPU, no usable driver or a build without CUDA.
constexpr bool is_without_gpu(int error) { return error == kInsufficientDriver || error == 100; }
// Returns the end of a message "... needs a GPU": no GPU or a driver too old, and the remedy.
std::string without_gpu(int error);
// Throws std::runtime_error with both versions if the driver is older than this library needs.
void check_driver();

#ifdef SPEEDTORCH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

// Returns whether a call succeeded, for failures that the caller can ignore. Clears a failure, so
// that unrelated code does not see it later.
bool succeeded(int error);
// Throws std::runtime_error("<what> failed: <reason> (CUDA error <n>)") unless `error` is 0. Clears
// the error as above. If the driver is too old, the reason names the required driver.
void check_cuda(int error, const char* what);

// During its lifetime, this thread may allocate, query and free although some stream captures a
// CUDA graph.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() noexcept { succeeded(cuda_calls().relax_capture(&mode_)); }
  int mode_ = 2;  // cudaStreamCaptureModeRelaxed; swapped with the thread's former mode
};

}  // namespace speedtorch
