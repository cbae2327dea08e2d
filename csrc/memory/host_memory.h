// Host memory that tables live in: made (managed, registered or plain), pinned where it is, known
// again, in use by GPU work, and when it may go. The ops on it are in host_memory.cpp.
//
// Guarantees: exact size (pages aside); refused in numbers before the first page when the machine
// has not enough, and later when others take what is left meanwhile; all or nothing. Memory goes
// only after the GPU work that used it is done, unregistered strictly before it is unmapped; a
// captured CUDA graph that may use it keeps it until let_captured_go(); no CUDA call once the
// process exits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "core/gpu.h"
#include "core/tensor_checks.h"

namespace speedtorch {

// Order and values are part of the ops' contract (host_empty, memory_kind): see
// speedtorch/memory/host_memory.py.
enum class MemoryKind : int64_t {
  kPlain = 0,
  kRegistered = 1,
  kManaged = 2,
  kPinned = 3,
  kCuda = 4
};

// How a GPU reaches a table. Values are part of the contract with speedtorch/memory/cost_model.py.
// Memory that is mapped but not managed has small pages.
enum class Access : int64_t { kManaged = 0, kMapped = 1, kOnGpu = 2, kNot = 3 };

// The MemoryKind of a tensor's memory.
int64_t memory_kind(const Tensor& tensor);
// Whether check_access can find anything to refuse.
bool registry_has_rules();
// Refuses host memory that this process must not touch (managed memory of the process that forked
// it), and memory that was registered read-only if it is to be written. `name` makes the argument's
// name.
void check_access(const char* op, const std::function<std::string()>& name, const void* address,
                  bool is_written);

// How the current GPU reaches these rows. Before work on it (`used_by`): its first use of a managed
// table maps the table there.
Access reach(const char* op, const Tensor& table, const Rows& rows, std::optional<int> used_by);
// Notes that work just queued on `stream` uses the table: its memory stays until that work is done.
void note_use(const Tensor& table, const Rows& rows, const Stream& stream);
// Work that is being queued on `stream`: note() says that all of it is. Where a part fails, what
// came before is noted all the same.
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
    } catch (...) {  // the first failure is the one to tell of
    }
  }
};

}  // namespace speedtorch
