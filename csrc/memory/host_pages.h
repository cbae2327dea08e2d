// Pages of host memory: maps them, fills them in parallel, pins them, and measures the memory that
// the machine has left. Called by host_memory.cpp. Any thread may call these functions.
#pragma once

#include <cstdint>
#include <string>

namespace speedtorch {

// Maps `bytes` of private anonymous memory and advises large pages. A mapping of 2 MiB or more
// starts at a 2 MiB boundary. Throws std::bad_alloc with a message.
void* map_pages(int64_t bytes);
void unmap_pages(void* address, int64_t bytes);
// Writes zeros in parallel, so that every page is allocated afterwards. With `check_memory`, throws
// like check_available once the rest no longer fits: processes that start at the same time all see
// free memory. Threads of one process count each other's fills.
void fill_with_zeros(void* address, int64_t bytes, bool check_memory);
// Available bytes: the minimum of MemAvailable and the free bytes under the cgroup's limits.
int64_t available_bytes();
// Throws (MemoryError in Python) with the numbers and the remedy unless `bytes` are available
// beside the bytes that other threads are filling.
void check_available(int64_t bytes);

// One registration of 512 GiB or more fails on recent drivers, so memory is registered in parts of
// at most this size. One cudaMemcpy must not cross a boundary of two parts; kernels may.
constexpr int64_t kBytesPerRegistration = int64_t{256} << 30;

// Pins with cudaHostRegister, all or nothing. Returns a cudaError_t. Clears CUDA's last error after
// a failure.
int register_pages(char* base, int64_t bytes, bool read_only);
void unregister_pages(char* base, int64_t bytes) noexcept;
// Whether kernels and the CPU use the same address for pinned memory. On WSL2 kernels see
// registered memory at another address.
bool is_at_own_address(const char* base);
// Allocates with cudaHostAlloc: one address for CPU and GPUs, uninitialized bytes. Returns a
// cudaError_t as above.
int allocate_pinned(char** base, int64_t bytes);
void free_pinned(char* base) noexcept;
// The error text of a failed pin: bytes, failed call, reason and remedy.
std::string pinning_failure(int64_t bytes, const char* call, int error);

}  // namespace speedtorch
