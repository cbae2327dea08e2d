// Host memory that tables live in: managed, registered or plain; who uses it on the GPU, and when
// it may go.
//
// Guarantees: exact size (pages aside); refused in numbers before the first page when the machine
// has not enough; released only after the GPU work that used it is done: unregistered strictly
// before it is unmapped; held while a captured CUDA graph may still use it, until
// let_captured_go(); no CUDA call once the process exits.
#pragma once

#include <cstdint>

#include "cuda_calls.h"
#include "rows.h"

namespace speedtorch {

// Order and values are part of the ops' contract (host_empty, memory_kind): see
// speedtorch/memory.py.
enum class MemoryKind : int64_t {
  kPlain = 0,
  kRegistered = 1,
  kManaged = 2,
  kPinned = 3,
  kCuda = 4
};

// uint8 tensor of `bytes` zeros in host memory of that kind (plain, registered or managed).
Tensor host_empty(int64_t bytes, int64_t kind, bool check_memory);
// Pins the memory of a CPU tensor in place, and undoes it.
void host_register(const Tensor& tensor);
void host_unregister(const Tensor& tensor);
int64_t memory_kind(const Tensor& tensor);
// Bytes in use: {plain, registered, managed, held by captured graphs}.
Tensor memory_stats();
// From here on captured graphs do not keep this tensor's memory any more.
void let_captured_go(const Tensor& tensor);
// Refuses managed memory in a forked child, where touching it would kill the process.
void check_owner(const Tensor& tensor);
// After this no CUDA call is made when memory goes (the process exits).
void stop();

// True if the GPU can reach these rows at their address. Throws in a forked child of a managed
// table's maker.
bool is_mapped(const char* op, const Tensor& table, const Rows& rows);
// Throws if the rows lie in memory that was registered read-only.
void check_writable(const char* op, const char* name, const Rows& rows);
// Notes that work just queued on `stream` uses the table: its memory stays until that work is done.
void note_use(const Tensor& table, const Rows& rows, void* stream);
// Lets go of tensors of others that were kept only until the GPU was done with them.
void drop_finished();

}  // namespace speedtorch
