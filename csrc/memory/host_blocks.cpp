// The books of host memory; see host_blocks.h.

#include "memory/host_blocks.h"

#include <pthread.h>
#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <list>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "core/cuda_calls.h"
#include "core/process_id.h"
#include "core/python_lock.h"
#include "memory/host_pages.h"
#include "memory/registration.h"

namespace speedtorch {
namespace {

std::atomic<bool> process_exits{false};

// Mapped memory of others (a torch-pinned tensor): kept alive until the GPU is done with it.
struct ForeignUse {
  Tensor table;
  const char* base;
  CapturedOn captured;
  StreamUses uses;
};

using Blocks = std::map<const char*, std::unique_ptr<Block>>;  // by base

struct Registry {
  std::mutex mutex;
  Blocks blocks;
  // Pinned in place and left by their storage, while a captured graph may use them.
  std::list<std::unique_ptr<Block>> left;
  std::list<ForeignUse> foreign;
};

Registry& registry();

// True once this process has memory that is not to be touched or not to be written.
std::atomic<bool> has_rules{false};
// Of the captures that may use host memory; numbers them.
std::atomic<int64_t> capture_count{0};

// The driver takes managed memory out of a forked child. What the books still say of it must not
// come to mean memory that the child maps there: a mapping without access keeps the place.
void keep_places_in_child(const Registry& all) {
  for (const auto& [base, block] : all.blocks) {
    if (block->kind != MemoryKind::kManaged) continue;
    has_rules = true;
    mmap(block->base, static_cast<size_t>(block->bytes), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  }
}

// Never destroyed: tensors may go after static destructors ran. A fork waits until no thread is in
// the books, so that the child finds them unlocked.
Registry* make_registry() {
  pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                 [] {
                   keep_places_in_child(registry());
                   registry().mutex.unlock();
                 });
  return new Registry;
}

Registry& registry() {
  static Registry* const instance = make_registry();
  return *instance;
}

void free_memory(Block& block) noexcept {
  const bool exits = process_exits;
  const bool ours_to_free = !exits && block.maker == process_id();
  if (block.kind != MemoryKind::kPlain && ours_to_free) {
    const RelaxedCapture while_capturing;
    block.uses.wait();
    if (block.kind == MemoryKind::kRegistered) unregister_pieces(block.base, block.bytes);
    if (block.kind == MemoryKind::kManaged && cuda_calls().free_managed(block.base) != 0) {
      cuda_calls().last_error();
    }
  }
  if (block.kind != MemoryKind::kManaged && !block.in_place && !exits)
    unmap_pages(block.base, block.bytes);
}

// Whether the storage of a piece pinned in place has other memory by now.
bool was_left(const Block& block) {
  void* now = nullptr;
  return block.pinned &&
         (aoti_torch_get_data_ptr(block.pinned->get(), &now) != 0 || now != block.base);
}

// The books, locked while this lives. Pieces that their storage has left are found to be so when
// somebody asks for them; they go when this does, outside the lock.
class OpenBooks {
 public:
  OpenBooks() : all_(registry()), lock_(all_.mutex) {}
  ~OpenBooks() {
    lock_.unlock();
    for (const std::unique_ptr<Block>& block : going_) free_memory(*block);
  }
  OpenBooks(const OpenBooks&) = delete;
  OpenBooks& operator=(const OpenBooks&) = delete;

  Registry* operator->() { return &all_; }
  Registry& operator*() { return all_; }

  // Some piece that holds one of these bytes, or null.
  Block* find(const void* address, int64_t bytes = 1) {
    const char* begin = static_cast<const char*>(address);
    while (true) {
      auto after = all_.blocks.lower_bound(begin + bytes);
      if (after == all_.blocks.begin()) return nullptr;
      const auto found = std::prev(after);
      if (found->second->end() <= begin) return nullptr;
      if (!was_left(*found->second)) return found->second.get();
      if (found->second->captured.any()) {
        all_.left.push_back(std::move(found->second));
        all_.blocks.erase(found);
      } else {
        take_out(found);
      }
    }
  }
  // The memory goes with this.
  void take_out(Blocks::iterator block) {
    going_.push_back(std::move(block->second));
    all_.blocks.erase(block);
  }

 private:
  std::vector<std::unique_ptr<Block>> going_;
  Registry& all_;
  std::unique_lock<std::mutex> lock_;
};

void refuse_in_fork(const Block* block) {
  if (block == nullptr || block->kind != MemoryKind::kManaged || block->maker == process_id()) {
    return;
  }
  throw std::runtime_error(
      "host memory: managed memory made in process " + std::to_string(block->maker) +
      ", used in its fork " + std::to_string(process_id()) +
      ", which cannot touch it: open the table by name there, start the process with 'spawn', or "
      "make the table with memory='registered'");
}

// Moves the tensors that no GPU work uses any more to `dropped`, for the caller to drop outside the
// lock.
void drop_finished_foreign(Registry& all, std::vector<Tensor>& dropped) {
  if (all.foreign.empty() || process_exits) return;
  const RelaxedCapture while_capturing;  // another thread may capture: a query must not disturb it
  for (auto use = all.foreign.begin(); use != all.foreign.end();) {
    if (!use->captured.any() && use->uses.finished()) {
      use->uses.wait();
      dropped.push_back(use->table);
      use = all.foreign.erase(use);
    } else {
      ++use;
    }
  }
}

}  // namespace

void StreamUses::record(void* stream) {
  int device = 0;
  check_cuda(cuda_calls().get_device(&device), "host memory: cudaGetDevice");
  auto found = std::find_if(uses_.begin(), uses_.end(), [&](const Use& use) {
    return use.stream == stream && use.device == device;
  });
  if (found == uses_.end()) {
    void* event = nullptr;
    check_cuda(cuda_calls().event_create(&event), "host memory: cudaEventCreate");
    found = uses_.insert(uses_.end(), {stream, device, event});
  }
  check_cuda(cuda_calls().event_record(found->event, stream), "host memory: cudaEventRecord");
}

bool StreamUses::finished() const {
  return std::all_of(uses_.begin(), uses_.end(), [](const Use& use) {
    if (cuda_calls().event_query(use.event) == 0) return true;
    cuda_calls().last_error();  // not ready, or not to be known now
    return false;
  });
}

void StreamUses::wait() noexcept {
  for (const Use& use : uses_) {
    if (cuda_calls().event_synchronize(use.event) != 0) cuda_calls().last_error();
    if (cuda_calls().event_destroy(use.event) != 0) cuda_calls().last_error();
  }
  uses_.clear();
}

void CapturedOn::add_current_device() {
  int device = 0;
  check_cuda(cuda_calls().get_device(&device), "host memory: cudaGetDevice");
  devices_.insert(device);
  last_ = ++capture_count;
}

void CapturedOn::forget_before(int64_t capture) {
  if (last_ <= capture) devices_.clear();
}

int64_t captures_so_far() { return capture_count; }

void CapturedOn::wait() const noexcept {
  if (devices_.empty()) return;
  const RelaxedCapture while_capturing;
  int before = 0;
  bool failed = cuda_calls().get_device(&before) != 0;
  // Making a device current, if only again, may open a context on it.
  const bool elsewhere = devices_.size() > 1 || !devices_.contains(before);
  for (const int device : devices_) {
    if (elsewhere) failed |= cuda_calls().set_device(device) != 0;
    failed |= cuda_calls().device_synchronize() != 0;
  }
  if (elsewhere) failed |= cuda_calls().set_device(before) != 0;
  if (failed) cuda_calls().last_error();
}

void remember(std::unique_ptr<Block> block) {
  static const bool exit_hook_set = [] { return std::atexit(stop) == 0; }();
  (void)exit_hook_set;
  block->maker = process_id();
  if (block->read_only) has_rules = true;
  const char* base = block->base;
  OpenBooks books;
  books->blocks[base] = std::move(block);
}

// The deleter of our tensors.
void tensor_gone(char* base) {
  const WithoutPythonLock while_waiting;
  OpenBooks books;
  const auto found = books->blocks.find(base);
  if (found == books->blocks.end()) return;
  found->second->tensor_gone = true;
  if (!found->second->captured.any()) books.take_out(found);
}

void unpin_in_place(int64_t pin, bool tensor_is_gone) {
  OpenBooks books;
  const auto is_it = [&](const std::unique_ptr<Block>& block) { return block->pin == pin; };
  const auto found = std::find_if(books->blocks.begin(), books->blocks.end(),
                                  [&](const auto& entry) { return is_it(entry.second); });
  const bool here = found != books->blocks.end();
  const bool captured = here ? found->second->captured.any()
                             : std::any_of(books->left.begin(), books->left.end(), is_it);
  if (captured && !tensor_is_gone) {
    throw std::runtime_error(
        "unpin_memory_: a captured CUDA graph may still use the tensor; say that none will with "
        "speedtorch.memory.release(tensor) first");
  }
  if (!here) return;
  found->second->tensor_gone = tensor_is_gone;
  if (!captured) books.take_out(found);
}

std::optional<MemoryKind> kind_in_books(const void* address) {
  OpenBooks books;
  const Block* block = books.find(address);
  return block == nullptr ? std::nullopt : std::optional(block->kind);
}

bool overlaps_books(const char* base, int64_t bytes) {
  OpenBooks books;
  return books.find(base, bytes) != nullptr;
}

Tensor memory_stats() {
  std::array<int64_t, 1> sizes{4};
  Tensor stats = torch::stable::empty(sizes, ScalarType::Long);
  int64_t* bytes = static_cast<int64_t*>(stats.mutable_data_ptr());
  std::fill_n(bytes, 4, 0);
  OpenBooks books;
  for (const auto& [base, block] : books->blocks) {
    bytes[block->tensor_gone ? 3 : static_cast<int64_t>(block->kind)] += block->bytes;
  }
  for (const std::unique_ptr<Block>& block : books->left) bytes[3] += block->bytes;
  return stats;
}

void let_captured_go(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.is_cpu()) return;
  const char* begin = static_cast<const char*>(tensor.data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const char* end = begin + (last + 1) * element_bytes(tensor);
  auto for_each_captured = [&](auto use) {
    OpenBooks books;
    if (Block* block = books.find(begin)) use(block->captured);
    for (ForeignUse& each : books->foreign) {
      if (begin <= each.base && each.base < end) use(each.captured);
    }
  };
  // Replays that are queued leave no event to wait for. A capture that another thread makes in the
  // meantime stays.
  const int64_t captures = captures_so_far();
  CapturedOn captured;
  for_each_captured([&](const CapturedOn& one) { captured.add(one); });
  captured.wait();
  for_each_captured([&](CapturedOn& one) { one.forget_before(captures); });
  drop_finished();
}

void let_orphans_go() {
  CapturedOn captured;
  std::vector<std::unique_ptr<Block>> orphans;
  {
    OpenBooks books;
    for (auto block = books->blocks.begin(); block != books->blocks.end();) {
      const auto next = std::next(block);
      if (block->second->tensor_gone) {
        orphans.push_back(std::move(block->second));
        books->blocks.erase(block);
      }
      block = next;
    }
    for (std::unique_ptr<Block>& block : books->left) orphans.push_back(std::move(block));
    books->left.clear();
  }
  for (const std::unique_ptr<Block>& block : orphans) captured.add(block->captured);
  captured.wait();
  for (const std::unique_ptr<Block>& block : orphans) free_memory(*block);
}

void stop() { process_exits = true; }

void check_owner(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.is_cpu()) return;
  OpenBooks books;
  refuse_in_fork(books.find(tensor.data_ptr()));
}

bool books_have_rules() { return has_rules.load(std::memory_order_relaxed); }

void check_access(const char* op, const std::function<std::string()>& name, const void* address,
                  bool is_written) {
  OpenBooks books;
  const Block* block = books.find(address);
  refuse_in_fork(block);
  if (is_written && block != nullptr && block->read_only) {
    throw_value_error(op, name() +
                              " lies in a read-only mapping of a file; copy it into "
                              "speedtorch.memory.empty(...) to write to it");
  }
}

Reach reach_of(const char* op, const Tensor& table, const Rows& rows) {
  if (table.is_cuda()) return Reach::kOnGpu;
  if (rows.base == nullptr) return Reach::kManaged;  // there is nothing to reach
  {
    OpenBooks books;
    if (const Block* block = books.find(rows.base)) {
      if (block->kind == MemoryKind::kPlain || rows.end() > block->end()) return Reach::kNot;
      return block->kind == MemoryKind::kManaged ? Reach::kManaged : Reach::kMapped;
    }
  }
  int kind = 0;
  for (const char* address : {rows.end() - 1, static_cast<const char*>(rows.base)}) {
    check_cuda(cuda_calls().pointer_kind(address, &kind), op);
    if (static_cast<PointerKind>(kind) == PointerKind::kPageable) return Reach::kNot;
  }
  return static_cast<PointerKind>(kind) == PointerKind::kManaged ? Reach::kManaged : Reach::kMapped;
}

void drop_finished() {
  std::vector<Tensor> dropped;  // outlives the lock: dropping a tensor may call tensor_gone
  OpenBooks books;
  drop_finished_foreign(*books, dropped);
}

void note_use(const Tensor& table, const Rows& rows, void* stream) {
  if (table.is_cuda() || rows.base == nullptr) return;
  int capturing = 0;
  check_cuda(cuda_calls().stream_is_capturing(stream, &capturing),
             "host memory: asking whether the stream captures");
  std::vector<Tensor> dropped;  // outlives the lock: dropping a tensor may call tensor_gone
  OpenBooks books;
  if (Block* block = books.find(rows.base)) {
    if (capturing) {
      block->captured.add_current_device();
    } else {
      block->uses.record(stream);
    }
    return;
  }
  auto use = std::find_if(books->foreign.begin(), books->foreign.end(),
                          [&](const ForeignUse& u) { return u.base == rows.base; });
  if (use == books->foreign.end()) {
    books->foreign.push_back({table, rows.base, {}, {}});
    use = std::prev(books->foreign.end());
  }
  if (capturing) {
    use->captured.add_current_device();  // no event can be asked for while a stream captures
    return;
  }
  use->uses.record(stream);
  drop_finished_foreign(*books, dropped);
}

}  // namespace speedtorch
