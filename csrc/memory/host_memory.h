// Registry of the host memory of tables: allocation (managed, registered or plain), pinning in
// place, lookup by address, and use by GPU work. The ops call these functions; the ops on the
// memory itself are in host_memory.cpp.
//
// Guarantees: a block has the requested size (rounded to pages). If the machine lacks memory, the
// error names the numbers, before the first page or as soon as other processes take the rest (if
// `check_memory` is set). A failed call leaves nothing allocated. Memory is freed after the GPU
// work that used it, and unregistered before it is unmapped. A captured CUDA graph that may use
// memory keeps it until let_captured_go() or, if its tensor is freed, let_orphans_go(). No CUDA
// call is made during process exit.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "core/gpu.h"
#include "core/tensor_checks.h"

namespace speedtorch {

// The values are part of the contract of the ops host_empty and memory_kind: see
// speedtorch/memory/host_memory.py.
enum class MemoryKind : int64_t {
  kPlain = 0,
  kRegistered = 1,
  kManaged = 2,
  kPinned = 3,
  kCuda = 4
};

// How a GPU accesses a table. The values are part of the contract with
// speedtorch/memory/cost_model.py. Mapped memory that is not managed has small pages.
enum class Access : int64_t { kManaged = 0, kMapped = 1, kOnGpu = 2, kNot = 3 };

// Returns the MemoryKind of a tensor's memory.
int64_t memory_kind(const Tensor& tensor);
// Whether check_access can throw at all.
bool registry_has_rules();
// Throws for managed memory of the process that forked this one, and for a write to memory that was
// registered read-only. `name` makes the argument's name.
void check_access(const char* op, const std::function<std::string()>& name, const void* address,
                  bool is_written);

// Returns how the current GPU accesses these rows. Call with the device in `used_by` before work on
// them: the first use of a managed table maps the table on this GPU.
Access gpu_access(const char* op, const Tensor& table, const Rows& rows,
                  std::optional<int> used_by);
// Notes that work just queued on `stream` uses the table. The memory is kept until that work is
// done, or, if the stream captures, until let_captured_go() or let_orphans_go().
void note_use(const Tensor& table, const Rows& rows, const Stream& stream);
// Whether this process allocated or registered the table's memory through speedtorch. For other
// memory wait_for_uses() does nothing, as in a forked child, whose parent queued the work.
bool can_wait_for_uses(const Tensor& table);
// Waits for all GPU work that is noted for the table's memory, except replays of captured graphs.
void wait_for_uses(const char* op, const Tensor& table);
// A use of a table by work that is being queued on `stream`. Call note() after the last launch. If
// a launch fails, the destructor notes the work queued so far.
struct TableUse {
  const Tensor& table;
  const Rows& rows;
  Stream stream;
  bool noted = false;

  void note() {
    noted = true;
    note_use(table, rows, stream);
  }
  ~TableUse() {
    try {
      if (!noted) note();
    } catch (...) {  // the caller must see the first failure
    }
  }
};

}  // namespace speedtorch
