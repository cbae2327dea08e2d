// Pages of host memory: mapping, filling in parallel, pinning, and what the machine has left.
#pragma once

#include <cstdint>
#include <string>

namespace speedtorch {

// Maps `bytes` of private anonymous memory, large pages advised, starting at a 2 MiB boundary when
// it is that long. Throws std::bad_alloc with a message.
void* map_pages(int64_t bytes);
void unmap_pages(void* address, int64_t bytes);
// Writes zeros in parallel, so that every page is there afterwards. With `check_memory` it throws
// as refuse_if_short does once the rest does not fit any more: processes that begin at the same
// time all find the machine empty. Threads of one process know of each other.
void fill_with_zeros(void* address, int64_t bytes, bool check_memory);
// Bytes that can still be had: the least of MemAvailable and the room under the cgroup's limits.
int64_t available_bytes();
// Throws (MemoryError in Python) with the numbers and the remedy if `bytes` are not there, beside
// what other threads are filling.
void refuse_if_short(int64_t bytes);

// One registration of 512 GiB or more fails on recent drivers, so memory is registered in pieces of
// at most this. One of CUDA's copies must not cross a seam of two pieces; kernels may.
constexpr int64_t kBytesPerRegistration = int64_t{256} << 30;

// Pins with cudaHostRegister, all or nothing. Returns a cudaError_t; a failure leaves no error
// behind for others to find.
int register_pages(char* base, int64_t bytes, bool read_only);
void unregister_pages(char* base, int64_t bytes) noexcept;
// Whether kernels find pinned memory at the address that the CPU has for it. On WSL2 registered
// memory lies elsewhere for them.
bool is_at_own_address(const char* base);
// Pinned memory of CUDA's, which is at one address for all; its bytes are anything. Returns a
// cudaError_t as above.
int allocate_pinned(char** base, int64_t bytes);
void free_pinned(char* base) noexcept;
// What to tell the user: how many bytes, by which call, why, what to do.
std::string pinning_failure(int64_t bytes, const char* call, int error);

}  // namespace speedtorch
