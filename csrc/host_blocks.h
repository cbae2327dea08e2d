// Host memory in use: which pieces we made or pinned, which GPU work uses them, and when they may
// go.
//
// Guarantees: memory goes only after the GPU work that used it is done, unregistered strictly
// before it is unmapped; a captured CUDA graph that may use it keeps it until let_captured_go(); no
// CUDA call once the process exits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "cost_model.h"
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

// The last use of a piece of memory on each stream.
class StreamUses {
 public:
  // `stream` belongs to the current device, as the caller's device guard has set it.
  void record(void* stream);
  bool finished() const;
  // Waits for every use and forgets it. Errors are not reported: memory must go all the same.
  void wait() noexcept;

 private:
  struct Use {
    void* stream;  // the default streams of all devices have the same handle
    int device;
    void* event;
  };
  std::vector<Use> uses_;
};

// The GPUs on which captured graphs may use a piece of memory.
class CapturedOn {
 public:
  bool any() const { return !devices_.empty(); }
  void add_current_device();
  void add(const CapturedOn& other) {
    devices_.insert(other.devices_.begin(), other.devices_.end());
  }
  // Waits for all that is queued there, replays of the graphs among it. Errors are not reported:
  // memory must go all the same.
  void wait() const noexcept;

 private:
  std::set<int> devices_;
};

// A piece of host memory that we made or registered.
struct Block {
  char* base = nullptr;
  int64_t bytes = 0;
  MemoryKind kind = MemoryKind::kPlain;
  bool in_place = false;  // registered where the user had it: not ours to unmap
  bool read_only = false;
  CapturedOn captured;
  bool tensor_gone = false;
  pid_t maker = 0;
  StreamUses uses;

  char* end() const { return base + bytes; }
};

// Takes a piece into the books, as made by this process.
void remember(std::unique_ptr<Block> block);
// The deleter of the tensors over our own pieces.
void tensor_gone(char* base);
// Unpins a piece that was pinned in place. Throws if there is none at `base`, or a captured graph
// may use it.
void unpin_in_place(const void* base);
// What kind of piece holds this address; none if it is not ours.
std::optional<MemoryKind> kind_in_books(const void* address);
bool overlaps_books(const char* base, int64_t bytes);

// Bytes in use: {plain, registered, managed, held by captured graphs}.
Tensor memory_stats();
// From here on captured graphs do not keep this tensor's memory any more; waits for replays.
void let_captured_go(const Tensor& tensor);
// Refuses managed memory in a forked child, where touching it would kill the process.
void check_owner(const Tensor& tensor);
// After this no CUDA call is made when memory goes (the process exits).
void stop();

// How a GPU reaches these rows. Throws in a forked child of a managed table's maker.
Reach reach_of(const char* op, const Tensor& table, const Rows& rows);
// Throws if the rows lie in memory that was registered read-only.
void check_writable(const char* op, const char* name, const Rows& rows);
// Notes that work just queued on `stream` uses the table: its memory stays until that work is done.
void note_use(const Tensor& table, const Rows& rows, void* stream);
// Lets go of tensors of others that were kept only until the GPU was done with them.
void drop_finished();

}  // namespace speedtorch
