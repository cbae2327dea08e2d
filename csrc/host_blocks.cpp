// The books of host memory; see host_blocks.h.

#include "host_blocks.h"

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

#include "cuda_calls.h"
#include "host_pages.h"
#include "process_id.h"
#include "python_lock.h"
#include "registration.h"

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

struct Registry {
  std::mutex mutex;
  std::map<const char*, std::unique_ptr<Block>> blocks;  // by base
  std::list<ForeignUse> foreign;

  // The block that holds `address`, or null.
  Block* find(const void* address) {
    const char* wanted = static_cast<const char*>(address);
    auto after = blocks.upper_bound(wanted);
    if (after == blocks.begin()) return nullptr;
    Block* block = std::prev(after)->second.get();
    return wanted < block->end() ? block : nullptr;
  }
};

Registry& registry();

// The driver takes managed memory out of a forked child. What the books still say of it must not
// come to mean memory that the child maps there: a mapping without access keeps the place.
void keep_places_in_child(const Registry& all) {
  for (const auto& [base, block] : all.blocks) {
    if (block->kind != MemoryKind::kManaged) continue;
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
}

void CapturedOn::wait() const noexcept {
  if (devices_.empty()) return;
  const RelaxedCapture while_capturing;
  int before = 0;
  bool failed = cuda_calls().get_device(&before) != 0;
  for (const int device : devices_) {
    failed |= cuda_calls().set_device(device) != 0;
    failed |= cuda_calls().device_synchronize() != 0;
  }
  failed |= cuda_calls().set_device(before) != 0;
  if (failed) cuda_calls().last_error();
}

void remember(std::unique_ptr<Block> block) {
  static const bool exit_hook_set = [] { return std::atexit(stop) == 0; }();
  (void)exit_hook_set;
  block->maker = process_id();
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  const char* base = block->base;
  all.blocks[base] = std::move(block);
}

// The deleter of our tensors.
void tensor_gone(char* base) {
  std::unique_ptr<Block> last;
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    auto found = all.blocks.find(base);
    if (found == all.blocks.end()) return;
    found->second->tensor_gone = true;
    if (found->second->captured.any()) return;
    last = std::move(found->second);
    all.blocks.erase(found);
  }
  const WithoutPythonLock while_waiting;
  free_memory(*last);
}

void unpin_in_place(const void* base) {
  std::unique_ptr<Block> block;
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    auto found = all.blocks.find(static_cast<const char*>(base));
    if (found == all.blocks.end() || !found->second->in_place) {
      throw_value_error("unpin_memory_", "the tensor was not pinned with pin_memory_");
    }
    if (found->second->captured.any()) {
      throw std::runtime_error(
          "unpin_memory_: a captured CUDA graph may still use the tensor; say that none will with "
          "speedtorch.memory.release(tensor) first");
    }
    block = std::move(found->second);
    all.blocks.erase(found);
  }
  free_memory(*block);
}

std::optional<MemoryKind> kind_in_books(const void* address) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  const Block* block = all.find(address);
  return block == nullptr ? std::nullopt : std::optional(block->kind);
}

bool overlaps_books(const char* base, int64_t bytes) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  auto after = all.blocks.lower_bound(base + bytes);
  return after != all.blocks.begin() && std::prev(after)->second->end() > base;
}

Tensor memory_stats() {
  std::array<int64_t, 1> sizes{4};
  Tensor stats = torch::stable::empty(sizes, ScalarType::Long);
  int64_t* bytes = static_cast<int64_t*>(stats.mutable_data_ptr());
  std::fill_n(bytes, 4, 0);
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  for (const auto& [base, block] : all.blocks) {
    bytes[block->tensor_gone ? 3 : static_cast<int64_t>(block->kind)] += block->bytes;
  }
  return stats;
}

void let_captured_go(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.is_cpu()) return;
  const char* begin = static_cast<const char*>(tensor.data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const char* end = begin + (last + 1) * element_bytes(tensor);
  Registry& all = registry();
  auto for_each_captured = [&](auto use) {
    std::lock_guard lock(all.mutex);
    if (Block* block = all.find(begin)) use(block->captured);
    for (ForeignUse& each : all.foreign) {
      if (begin <= each.base && each.base < end) use(each.captured);
    }
  };
  // Replays that are queued leave no event to wait for.
  CapturedOn captured;
  for_each_captured([&](const CapturedOn& one) { captured.add(one); });
  captured.wait();
  for_each_captured([](CapturedOn& one) { one = {}; });
  drop_finished();
}

void stop() { process_exits = true; }

void check_owner(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.is_cpu()) return;
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  refuse_in_fork(all.find(tensor.data_ptr()));
}

Reach reach_of(const char* op, const Tensor& table, const Rows& rows) {
  if (table.is_cuda()) return Reach::kOnGpu;
  if (rows.base == nullptr) return Reach::kManaged;  // there is nothing to reach
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    if (const Block* block = all.find(rows.base)) {
      refuse_in_fork(block);
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

void check_writable(const char* op, const char* name, const Rows& rows) {
  if (rows.base == nullptr) return;
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  const Block* block = all.find(rows.base);
  if (block != nullptr && block->read_only) {
    throw_value_error(op, std::string(name) +
                              " lies in a read-only mapping of a file; copy it into "
                              "speedtorch.memory.empty(...) to write to it");
  }
}

void drop_finished() {
  std::vector<Tensor> dropped;  // outlives the lock: dropping a tensor may call tensor_gone
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  drop_finished_foreign(all, dropped);
}

void note_use(const Tensor& table, const Rows& rows, void* stream) {
  if (table.is_cuda() || rows.base == nullptr) return;
  int capturing = 0;
  check_cuda(cuda_calls().stream_is_capturing(stream, &capturing),
             "host memory: asking whether the stream captures");
  std::vector<Tensor> dropped;  // outlives the lock: dropping a tensor may call tensor_gone
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  if (Block* block = all.find(rows.base)) {
    if (capturing) {
      block->captured.add_current_device();
    } else {
      block->uses.record(stream);
    }
    return;
  }
  auto use = std::find_if(all.foreign.begin(), all.foreign.end(),
                          [&](const ForeignUse& u) { return u.base == rows.base; });
  if (use == all.foreign.end()) {
    all.foreign.push_back({table, rows.base, {}, {}});
    use = std::prev(all.foreign.end());
  }
  if (capturing) {
    use->captured.add_current_device();  // no event can be asked for while a stream captures
    return;
  }
  use->uses.record(stream);
  drop_finished_foreign(all, dropped);
}

}  // namespace speedtorch
