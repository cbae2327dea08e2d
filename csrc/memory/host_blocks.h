// Host memory in use: which pieces we made or pinned, which GPU work uses them, and when they may
// go.
//
// Guarantees: memory goes only after the GPU work that used it is done, unregistered strictly
// before it is unmapped; a captured CUDA graph that may use it keeps it until let_captured_go(); no
// CUDA call once the process exits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/rows.h"
#include "memory/reach.h"

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
  // Forgets the captures made before `capture`, a number of captures_so_far(), unless there is one
  // after them.
  void forget_before(int64_t capture);
  // Waits for all that is queued there, replays of the graphs among it. Errors are not reported:
  // memory must go all the same.
  void wait() const noexcept;

 private:
  std::set<int> devices_;
  int64_t last_ = 0;
};

int64_t captures_so_far();

// A piece of host memory that we made or registered.
struct Block {
  char* base = nullptr;
  int64_t bytes = 0;
  MemoryKind kind = MemoryKind::kPlain;
  bool in_place = false;  // registered where the user had it: not ours to unmap
  // Of a piece in place: a tensor over it, which lies elsewhere once its storage was resized.
  std::optional<Tensor> pinned;
  int64_t pin = 0;  // number of a piece in place
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
// Unpins what was pinned in place under this number; nothing if its memory went before. Throws if a
// captured graph may use it, or keeps it for the graph if nobody else has the tensor any more.
void unpin_in_place(int64_t pin, bool tensor_is_gone);
// What kind of piece holds this address; none if it is not ours.
std::optional<MemoryKind> kind_in_books(const void* address);
bool overlaps_books(const char* base, int64_t bytes);

// Bytes in use: {plain, registered, managed, held by captured graphs}.
Tensor memory_stats();
// From here on captured graphs do not keep this tensor's memory any more; waits for replays.
void let_captured_go(const Tensor& tensor);
// The same for all memory whose tensors are gone.
void let_orphans_go();
// Refuses managed memory in a forked child, where touching it would kill the process.
void check_owner(const Tensor& tensor);
// Whether check_access can find anything to refuse.
bool books_have_rules();
// Refuses host memory that this process must not touch (managed memory of the process that forked
// it), and memory that was registered read-only if it is to be written. `name` makes the argument's
// name.
void check_access(const char* op, const std::function<std::string()>& name, const void* address,
                  bool is_written);
// After this no CUDA call is made when memory goes (the process exits).
void stop();

// How a GPU reaches these rows.
Reach reach_of(const char* op, const Tensor& table, const Rows& rows);
// Notes that work just queued on `stream` uses the table: its memory stays until that work is done.
void note_use(const Tensor& table, const Rows& rows, void* stream);
// Calls queue(), which queues such work, and notes it even if a later part of queue() fails.
template <typename Queue>
void queue_and_note(const Tensor& table, const Rows& rows, void* stream, const Queue& queue) {
  try {
    queue();
  } catch (...) {
    try {
      note_use(table, rows, stream);
    } catch (const std::runtime_error&) {  // the first failure is the one to tell of
    }
    throw;
  }
  note_use(table, rows, stream);
}
// Lets go of tensors of others that were kept only until the GPU was done with them.
void drop_finished();

}  // namespace speedtorch
