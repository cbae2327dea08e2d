// Allocates, pins and frees host memory, and keeps the registry of it; see host_memory.h. Most
// ops at the end are called by speedtorch/memory/host_memory.py.

#include "memory/host_memory.h"

#include <pthread.h>
#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/gpu.h"
#include "core/process.h"
#include "core/registration.h"
#include "memory/host_pages.h"

namespace speedtorch {
namespace {

// True once this process has memory that must not be accessed or must not be written.
std::atomic<bool> has_rules{false};
// Counts the captures that may use host memory. The count is the number of the latest capture.
std::atomic<int64_t> capture_count{0};

// Identifies a stream. A handle does not, because a new stream may reuse the handle of a destroyed
// one.
struct StreamName {
  int device;
  unsigned long long id;

  bool operator==(const StreamName&) const = default;
};

StreamName name_of(const Stream& stream) {
  StreamName name{stream.device, 0};
  check_cuda(cuda_calls().stream_id(stream.handle, &name.id), "host memory: cudaStreamGetId");
  return name;
}

// The last use of a memory block on each stream.
class StreamUses {
 public:
  // The event of a stream, or null.
  void* event_of(const StreamName& stream) const {
    const auto found = std::find_if(uses_.begin(), uses_.end(),
                                    [&](const Use& use) { return use.stream == stream; });
    return found == uses_.end() ? nullptr : found->event;
  }
  // A stream may have two events if two threads use it at once.
  void add(const StreamName& stream, void* event) { uses_.push_back({stream, event}); }
  bool any() const { return !uses_.empty(); }
  std::vector<void*> events() const {
    std::vector<void*> all;
    for (const Use& use : uses_) all.push_back(use.event);
    return all;
  }
  bool finished() const {
    return std::all_of(uses_.begin(), uses_.end(), [](const Use& use) {
      return succeeded(cuda_calls().event_query(use.event));
    });
  }
  // Waits for all uses and forgets them. Ignores errors, because the memory is freed in any case.
  void wait() noexcept {
    for (const Use& use : uses_) {
      succeeded(cuda_calls().event_synchronize(use.event));
      succeeded(cuda_calls().event_destroy(use.event));
    }
    uses_.clear();
  }

 private:
  struct Use {
    StreamName stream;
    void* event;
  };
  std::vector<Use> uses_;
};

// The GPUs on which captured graphs may use a memory block.
class CapturedOn {
 public:
  bool any() const { return !devices_.empty(); }
  void add(int device) {
    devices_.insert(device);
    last_ = ++capture_count;
  }
  void add(const CapturedOn& other) {
    devices_.insert(other.devices_.begin(), other.devices_.end());
  }
  // Forgets all GPUs unless a capture with a number above `capture` was added.
  void forget_before(int64_t capture) {
    if (last_ <= capture) devices_.clear();
  }
  // Waits for all work queued on these GPUs, including replays of the graphs. Ignores errors,
  // because the memory is freed in any case.
  void wait() const noexcept {
    if (devices_.empty()) return;
    const RelaxedCapture while_capturing;
    int before = 0;
    succeeded(cuda_calls().get_device(&before));
    // set_device may create a context even if the device is current already.
    const bool elsewhere = devices_.size() > 1 || !devices_.contains(before);
    for (const int device : devices_) {
      if (elsewhere) succeeded(cuda_calls().set_device(device));
      succeeded(cuda_calls().device_synchronize());
    }
    if (elsewhere) succeeded(cuda_calls().set_device(before));
  }

 private:
  std::set<int> devices_;
  int64_t last_ = 0;
};

// The uses of a memory block on GPUs.
struct Uses {
  CapturedOn captured;
  StreamUses queued;
  int recording_threads = 0;  // threads that now record an event here without the registry's lock
};

// A block of host memory that speedtorch allocated or registered.
struct Block {
  char* base = nullptr;
  int64_t bytes = 0;
  MemoryKind kind = MemoryKind::kPlain;
  // For a block that pin_memory_ registered in place: the number of the pin, and a tensor over the
  // block. The user's storage owns the memory. After a resize of the storage, the tensor has
  // another address.
  int64_t pin = 0;
  std::optional<Tensor> pinned{};
  bool read_only = false;
  bool is_from_cuda = false;  // allocated by cudaHostAlloc
  std::set<int> mapped_on{};  // GPUs that map this managed block
  Uses uses{};
  bool tensor_gone = false;
  pid_t maker = process_id();

  char* end() const { return base + bytes; }
};

// Mapped memory of another owner, such as a tensor pinned by torch. The entry keeps the tensor
// alive until the GPU has finished with it.
struct ForeignUse {
  Tensor table;
  const char* base;
  Uses uses;
};

using Blocks = std::map<const char*, std::unique_ptr<Block>>;  // by base

struct Registry {
  std::mutex mutex;
  Blocks blocks;
  // Blocks pinned in place whose storage was resized, while a captured graph may use them.
  std::list<std::unique_ptr<Block>> detached;
  std::list<ForeignUse> foreign;
};

Registry& registry();

// Runs in a forked child, where the driver removes managed memory. A new mapping of the child must
// not take addresses that the registry lists as managed. A mapping without access reserves them.
void reserve_managed_addresses() {
  for (const auto& [base, block] : registry().blocks) {
    if (block->kind != MemoryKind::kManaged) continue;
    has_rules = true;
    mmap(block->base, static_cast<size_t>(block->bytes), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  }
  registry().mutex.unlock();
}

// Never destroyed, because tensors may be freed after static destructors ran. A fork waits until no
// thread holds the registry's lock, so that the child finds it unlocked.
Registry& registry() {
  static Registry* const instance = [] {
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   reserve_managed_addresses);
    return new Registry;
  }();
  return *instance;
}

// Made as the library is loaded: threads lock this registry while they hold locks of resident rows.
// A fork must therefore lock it last, and runs its handlers in reverse order.
[[maybe_unused]] const Registry& made_first = registry();

constexpr auto is_captured = [](const std::unique_ptr<Block>& block) {
  return block->uses.captured.any();
};

// Waits until no thread records an event of a block that was removed from the registry. Rare: an op
// of another thread used memory that this thread unpins.
void wait_until_noted(const Uses& uses) {
  while (true) {
    {
      const std::lock_guard lock(registry().mutex);
      if (uses.recording_threads == 0) return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void free_memory(Block& block) noexcept {
  const bool exits = process_exits();
  // GPUs may use plain memory through the host's page tables.
  const bool is_used_by_gpu = block.kind != MemoryKind::kPlain || block.uses.queued.any();
  if (is_used_by_gpu && !exits && block.maker == process_id()) {
    const RelaxedCapture while_capturing;
    wait_until_noted(block.uses);
    block.uses.queued.wait();
    if (block.is_from_cuda) {
      free_pinned(block.base);
    } else if (block.kind == MemoryKind::kRegistered) {
      unregister_pages(block.base, block.bytes);
    } else if (block.kind == MemoryKind::kManaged) {
      succeeded(cuda_calls().free_managed(block.base));
    }
  }
  if (block.kind != MemoryKind::kManaged && !block.is_from_cuda && !block.pinned && !exits) {
    unmap_pages(block.base, block.bytes);
  }
}

// Whether the storage of a block pinned in place was resized or replaced.
bool is_detached(const Block& block) {
  void* now = nullptr;
  return block.pinned &&
         (aoti_torch_get_data_ptr(block.pinned->get(), &now) != 0 || now != block.base);
}

// Locks the registry during its lifetime. find() removes detached blocks. The
// destructor frees removed blocks after it releases the lock.
class OpenRegistry {
 public:
  OpenRegistry() : all_(registry()), lock_(all_.mutex) {}
  ~OpenRegistry() {
    lock_.unlock();
    for (const std::unique_ptr<Block>& block : removed_) free_memory(*block);
  }
  OpenRegistry(const OpenRegistry&) = delete;
  OpenRegistry& operator=(const OpenRegistry&) = delete;

  Registry* operator->() { return &all_; }

  // A block that overlaps these bytes, or null.
  Block* find(const void* address, int64_t bytes = 1) {
    const char* begin = static_cast<const char*>(address);
    while (true) {
      auto after = all_.blocks.lower_bound(begin + bytes);
      if (after == all_.blocks.begin()) return nullptr;
      const auto found = std::prev(after);
      if (found->second->end() <= begin) return nullptr;
      if (!is_detached(*found->second)) return found->second.get();
      if (is_captured(found->second)) {
        all_.detached.push_back(std::move(found->second));
        all_.blocks.erase(found);
      } else {
        remove(found);
      }
    }
  }
  // Removes a block. The destructor of this object frees its memory.
  void remove(Blocks::iterator block) {
    removed_.push_back(std::move(block->second));
    all_.blocks.erase(block);
  }
  // The uses of a table in memory of another owner.
  Uses& foreign_uses_of(const Tensor& table, const Rows& rows) {
    auto use = std::find_if(all_.foreign.begin(), all_.foreign.end(),
                            [&](const ForeignUse& entry) { return entry.base == rows.base; });
    if (use == all_.foreign.end()) {
      use = all_.foreign.insert(use, ForeignUse{table, rows.base, {}});
    }
    return use->uses;
  }

 private:
  std::vector<std::unique_ptr<Block>> removed_;
  Registry& all_;
  std::unique_lock<std::mutex> lock_;
};

void check_not_forked(const Block* block) {
  if (block == nullptr || block->kind != MemoryKind::kManaged || block->maker == process_id()) {
    return;
  }
  throw std::runtime_error(text("host memory: managed memory of process ", block->maker,
                                " cannot be used in its forked child ", process_id(),
                                ". Create the table with memory='shared' and pass table.share(), or"
                                " with memory='registered', or start the child with 'spawn'"));
}

// Adds a block to the registry.
void add_block(Block made) {
  watch_process_exit();
  if (made.read_only) has_rules = true;
  auto block = std::make_unique<Block>(std::move(made));
  OpenRegistry all;
  all->blocks[block->base] = std::move(block);
}

// The deleter of tensors over blocks that speedtorch allocated.
void tensor_gone(char* base) {
  const WithoutPythonLock while_waiting;
  OpenRegistry all;
  const auto found = all->blocks.find(base);
  if (found == all->blocks.end()) return;
  found->second->tensor_gone = true;
  if (!is_captured(found->second)) all.remove(found);
}

// The kind of a block that overlaps these bytes, or nullopt.
std::optional<MemoryKind> kind_of_block(const void* address, int64_t bytes = 1) {
  OpenRegistry all;
  const Block* block = all.find(address, bytes);
  return block == nullptr ? std::nullopt : std::optional(block->kind);
}

}  // namespace

int64_t memory_kind(const Tensor& tensor) {
  auto kind = MemoryKind::kPlain;
  int found = 0;
  void* on_gpu = nullptr;
  if (tensor.is_cuda()) {
    kind = MemoryKind::kCuda;
  } else if (tensor.numel() == 0) {
  } else if (const auto own_kind = kind_of_block(tensor.data_ptr())) {
    kind = *own_kind;
  } else if (!succeeded(cuda_calls().pointer_kind(tensor.data_ptr(), &found, &on_gpu))) {
  } else if (static_cast<PointerKind>(found) == PointerKind::kManaged) {
    kind = MemoryKind::kManaged;
  } else if (static_cast<PointerKind>(found) == PointerKind::kHost) {
    kind = MemoryKind::kPinned;
  }
  return static_cast<int64_t>(kind);
}

bool registry_has_rules() { return has_rules.load(std::memory_order_relaxed); }

void check_access(const char* op, const std::function<std::string()>& name, const void* address,
                  bool is_written) {
  OpenRegistry all;
  const Block* block = all.find(address);
  check_not_forked(block);
  if (is_written && block != nullptr && block->read_only) {
    throw_value_error(op, name(),
                      " lies in a read-only mapping of a file. Copy it into "
                      "speedtorch.memory.empty(...) before writing to it");
  }
}

namespace {

// How the current GPU accesses memory that is not pinned. On Grace the GPU uses the CPU's page
// tables.
Access access_to_pageable() {
  int device = 0, in_place = 0;
  const bool is_known = succeeded(cuda_calls().get_device(&device)) &&
                        succeeded(cuda_calls().host_page_tables(device, &in_place));
  return is_known && in_place != 0 ? Access::kMapped : Access::kNot;
}

Access access_to_foreign(const char* op, const Rows& rows) {
  int kind = 0;
  for (const char* address : {rows.end() - 1, static_cast<const char*>(rows.base)}) {
    void* on_gpu = nullptr;
    check_cuda(cuda_calls().pointer_kind(address, &kind, &on_gpu), op);
    if (static_cast<PointerKind>(kind) == PointerKind::kPageable) return access_to_pageable();
    if (on_gpu != address) return Access::kNot;  // kernels receive the CPU's address
  }
  return static_cast<PointerKind>(kind) == PointerKind::kManaged ? Access::kManaged
                                                                 : Access::kMapped;
}

// Maps a whole block of managed memory on a GPU until the block is freed.
int map_managed(void* base, int64_t bytes, int device) {
  const RelaxedCapture while_capturing;
  return cuda_calls().advise_accessed_by(base, static_cast<size_t>(bytes), device);
}

// Releases tensors of other owners that the GPU has finished with. The entries are removed from the
// registry during the queries, so that no lock is held during driver calls. A use that another
// thread notes meanwhile gets a new entry.
void drop_finished() {
  std::list<ForeignUse> queried, unfinished;
  {
    OpenRegistry all;
    if (all->foreign.empty() || process_exits()) return;
    for (auto use = all->foreign.begin(); use != all->foreign.end();) {
      const auto next = std::next(use);
      if (!use->uses.captured.any() && use->uses.recording_threads == 0) {
        queried.splice(queried.end(), all->foreign, use);
      }
      use = next;
    }
  }
  if (queried.empty()) return;
  const RelaxedCapture while_capturing;  // a query must not disturb the capture of another thread
  for (auto use = queried.begin(); use != queried.end();) {
    const auto next = std::next(use);
    if (use->uses.queued.finished()) {
      use->uses.queued.wait();
    } else {
      unfinished.splice(unfinished.end(), queried, use);
    }
    use = next;
  }
  OpenRegistry all;
  all->foreign.splice(all->foreign.end(), unfinished);
}

}  // namespace

Access gpu_access(const char* op, const Tensor& table, const Rows& rows,
                  std::optional<int> used_by) {
  if (table.is_cuda()) return Access::kOnGpu;
  if (rows.base == nullptr) return Access::kManaged;  // no rows
  std::optional<MemoryKind> kind;
  char* base = nullptr;
  int64_t bytes = 0;
  {
    OpenRegistry all;
    if (const Block* block = all.find(rows.base)) {
      kind = block->kind;
      base = block->base;
      bytes = block->bytes;
      const bool is_mapped = !used_by || block->mapped_on.contains(*used_by);
      if (kind == MemoryKind::kManaged && is_mapped) used_by.reset();
    }
  }
  if (!kind) return access_to_foreign(op, rows);
  if (kind == MemoryKind::kPlain) return access_to_pageable();
  if (rows.end() > base + bytes) return Access::kNot;
  if (kind != MemoryKind::kManaged) return Access::kMapped;
  if (!used_by) return Access::kManaged;
  check_cuda(map_managed(base, bytes, *used_by), op);
  OpenRegistry all;
  if (Block* block = all.find(rows.base)) block->mapped_on.insert(*used_by);
  return Access::kManaged;
}

void note_use(const Tensor& table, const Rows& rows, const Stream& stream) {
  if (table.is_cuda() || rows.base == nullptr) return;
  int capturing = 0;
  check_cuda(cuda_calls().stream_is_capturing(stream.handle, &capturing),
             "host memory: cudaStreamIsCapturing");
  if (capturing) {  // events of a capture cannot be queried
    OpenRegistry all;
    Block* block = all.find(rows.base);
    Uses& uses = block != nullptr ? block->uses : all.foreign_uses_of(table, rows);
    return uses.captured.add(stream.device);
  }
  // Recording may block until the stream has space, so no lock is held during it.
  const StreamName name = name_of(stream);
  Uses* uses = nullptr;
  void* event = nullptr;
  bool is_foreign = false;
  {
    OpenRegistry all;
    Block* block = all.find(rows.base);
    is_foreign = block == nullptr;
    uses = is_foreign ? &all.foreign_uses_of(table, rows) : &block->uses;
    ++uses->recording_threads;
    event = uses->queued.event_of(name);
  }
  const bool is_new = event == nullptr;
  int error = 0;
  if (is_new) {
    const RelaxedCapture while_capturing;  // another thread may capture
    error = cuda_calls().event_create(&event);
  }
  const char* what = error != 0 ? "host memory: cudaEventCreate" : "host memory: cudaEventRecord";
  if (error == 0) error = cuda_calls().event_record(event, stream.handle);
  {
    const OpenRegistry all;
    if (is_new && event != nullptr) uses->queued.add(name, event);
    --uses->recording_threads;
  }
  check_cuda(error, what);
  if (is_foreign) drop_finished();
}

bool can_wait_for_uses(const Tensor& table) {
  OpenRegistry all;
  const Block* const block = all.find(table.data_ptr());
  return block != nullptr && block->maker == process_id();
}

void wait_for_uses(const char* op, const Tensor& table) {
  std::vector<void*> events;
  {
    OpenRegistry all;
    const Block* const block = all.find(table.data_ptr());
    if (block != nullptr && block->maker == process_id()) events = block->uses.queued.events();
  }
  if (events.empty()) return;
  const RelaxedCapture while_capturing;
  for (void* const event : events) check_cuda(cuda_calls().event_synchronize(event), op);
}

// ---- ops

namespace {

constexpr const char* kBeforeCapture = "create and pin tables before the capture begins";

// Throws with the bytes, the failed call and the remedy.
void check_managed(int error, const char* step, int64_t bytes) {
  if (succeeded(error)) return;
  if (is_without_gpu(error)) {
    throw std::runtime_error("host memory: managed memory needs a GPU" + without_gpu(error));
  }
  throw std::runtime_error(text("host memory: allocating ", bytes,
                                " bytes of managed memory failed in ", step, ": ",
                                cuda_calls().error_string(error), " (CUDA error ", error,
                                "). Free memory, or use memory='registered' or memory='plain'"));
}

// The current GPU, which is likely to use new memory, if there is one.
std::set<int> current_device() {
  int device = 0;
  if (succeeded(cuda_calls().get_device(&device))) return {device};
  return {};
}

void* allocate_managed(int64_t bytes, const std::set<int>& map_on) {
  const RelaxedCapture while_capturing;
  int devices = 0;
  check_managed(cuda_calls().device_count(&devices), "cudaGetDeviceCount", bytes);
  for (int device = 0; device < devices; ++device) {
    int supported = 0;
    check_managed(cuda_calls().concurrent_managed_access(device, &supported),
                  "cudaDeviceGetAttribute", bytes);
    if (!supported) {
      throw std::runtime_error(
          text("host memory: managed memory needs concurrentManagedAccess, which GPU ", device,
               " does not support. Use memory='registered'"));
    }
  }
  void* address = nullptr;
  check_managed(cuda_calls().malloc_managed(&address, bytes), "cudaMallocManaged", bytes);
  // Advise before the first touch: the advice decides where pages are allocated and how the GPU
  // maps them. Other GPUs map the memory at first use (gpu_access), because advice for a GPU
  // creates a context on it.
  int error = cuda_calls().advise_preferred_host(address, bytes);
  for (const int device : map_on) {
    if (error == 0) error = map_managed(address, bytes, device);
  }
  if (error != 0) succeeded(cuda_calls().free_managed(address));
  check_managed(error, "cudaMemAdvise", bytes);
  return address;
}

constexpr const char* kHostRegister = "cudaHostRegister";

// Pins a block that was just allocated and filled. On WSL2 kernels would see registered memory at
// another address, so the block is replaced by memory from cudaHostAlloc.
void pin(Block& made, bool check_memory) {
  if (const int error = register_pages(made.base, made.bytes, false); error != 0) {
    throw std::runtime_error(pinning_failure(made.bytes, kHostRegister, error));
  }
  made.kind = MemoryKind::kRegistered;
  if (is_at_own_address(made.base)) return;
  free_memory(made);
  made.base = nullptr;
  if (const int error = allocate_pinned(&made.base, made.bytes); error != 0) {
    throw std::runtime_error(pinning_failure(made.bytes, "cudaHostAlloc", error));
  }
  made.is_from_cuda = true;
  kind_of_block(made.base, made.bytes);  // removes a stale entry, as in host_empty
  fill_with_zeros(made.base, made.bytes, check_memory);
}

// Returns a uint8 tensor of `bytes` zeros in plain, registered or managed host memory.
Tensor host_empty(int64_t bytes, int64_t kind, bool check_memory) {
  const auto wanted = static_cast<MemoryKind>(kind);
  if (bytes < 0) throw_value_error("host memory", "size must not be negative, got ", bytes);
  if (wanted != MemoryKind::kPlain && wanted != MemoryKind::kRegistered &&
      wanted != MemoryKind::kManaged) {
    throw_value_error("host memory", "kind must be 0 (plain), 1 (registered) or 2 (managed), got ",
                      kind);
  }
  std::array<int64_t, 1> sizes{bytes}, strides{1};
  if (bytes == 0) return torch::stable::empty(sizes, ScalarType::Byte);
  if (wanted != MemoryKind::kPlain) check_not_capturing("host memory", kBeforeCapture);
  if (check_memory) check_available(bytes);

  Block made{.bytes = bytes};
  if (wanted == MemoryKind::kManaged) {
    made.mapped_on = current_device();
    made.base = static_cast<char*>(allocate_managed(bytes, made.mapped_on));
    made.kind = wanted;
  } else {
    made.base = static_cast<char*>(map_pages(bytes));
  }
  try {
    kind_of_block(made.base, bytes);  // removes a detached block
    fill_with_zeros(made.base, bytes, check_memory);
    if (wanted == MemoryKind::kRegistered) pin(made, check_memory);
  } catch (...) {
    if (made.base != nullptr) free_memory(made);
    throw;
  }
  char* base = made.base;
  add_block(std::move(made));
  return torch::stable::from_blob(base, sizes, strides, Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte,
                                  [](void* data) { tensor_gone(static_cast<char*>(data)); });
}

// Pins the memory of a dense CPU tensor in place. Keeps the tensor, so that the memory outlives the
// pin. Returns a number for host_unregister, or 0 for a tensor without elements.
int64_t host_register(const Tensor& tensor) {
  constexpr const char* kOp = "pin_memory_";
  if (tensor.numel() == 0) return 0;
  check_not_capturing(kOp, kBeforeCapture);
  const auto [base, bytes] = span_of(tensor);
  if (kind_of_block(base, bytes)) {
    throw_value_error(kOp,
                      "the tensor's memory overlaps memory that speedtorch has already pinned or "
                      "allocated. Call unpin_memory_ on the overlapping tensor first, or create "
                      "the table with memory='registered'");
  }
  if (static_cast<MemoryKind>(memory_kind(tensor)) != MemoryKind::kPlain) {
    throw_value_error(kOp,
                      "the tensor's memory is already pinned by another library. Use the tensor "
                      "as it is, or unpin it with that library first");
  }
  const int error = register_pages(base, bytes, false);
  // A read-only mapping of a file needs a read-only registration.
  const bool read_only = error != 0 && register_pages(base, bytes, true) == 0;
  if (error != 0 && !read_only) {
    throw std::runtime_error(pinning_failure(bytes, kHostRegister, error));
  }
  if (!is_at_own_address(base)) {
    unregister_pages(base, bytes);
    throw std::runtime_error(
        "pin_memory_: this driver maps pinned memory to a different address on the GPU, as on "
        "WSL2, so kernels cannot access it. Copy the tensor into speedtorch.memory.empty(shape, "
        "memory='registered'), or do not pin it. Ops then move its rows through the CPU");
  }
  static std::atomic<int64_t> pins{0};
  const int64_t pin = ++pins;
  add_block({.base = base,
             .bytes = bytes,
             .kind = MemoryKind::kRegistered,
             .pin = pin,
             .pinned = tensor,
             .read_only = read_only});
  return pin;
}

// Unpins the block with this number, or does nothing if its memory is already freed. If a captured
// graph may use the block: throws, or keeps it for the graph if `tensor_is_gone`.
void host_unregister(int64_t pin, bool tensor_is_gone) {
  if (pin == 0) return;  // a block allocated by speedtorch, or an empty tensor
  OpenRegistry all;
  const auto has_pin = [&](const std::unique_ptr<Block>& block) { return block->pin == pin; };
  const auto found = std::find_if(all->blocks.begin(), all->blocks.end(),
                                  [&](const auto& entry) { return has_pin(entry.second); });
  const bool is_listed = found != all->blocks.end();
  const bool captured = is_listed
                            ? is_captured(found->second)
                            : std::any_of(all->detached.begin(), all->detached.end(), has_pin);
  if (captured && !tensor_is_gone) {
    // After a resize the tensor has other memory, and only release() reaches the detached block.
    throw std::runtime_error(
        text("unpin_memory_: a captured CUDA graph may still use the tensor. If no such graph will "
             "be replayed, call speedtorch.memory.",
             is_listed ? "release(tensor)" : "release()", " first"));
  }
  if (!is_listed) return;
  found->second->tensor_gone = tensor_is_gone;
  if (!captured) all.remove(found);
}

// Byte offsets in the tensor at which another registration begins. A cudaMemcpy across such an
// offset fails.
std::vector<int64_t> registration_seams(const Tensor& tensor) {
  std::vector<int64_t> boundaries;
  if (tensor.numel() == 0 || !tensor.is_cpu()) return boundaries;
  const auto [begin, bytes] = span_of(tensor);
  OpenRegistry all;
  const Block* block = all.find(begin);
  if (block == nullptr || block->kind != MemoryKind::kRegistered || block->is_from_cuda)
    return boundaries;
  for (int64_t boundary = kBytesPerRegistration; boundary < block->bytes;
       boundary += kBytesPerRegistration) {
    const int64_t offset = block->base + boundary - begin;
    if (offset > 0 && offset < bytes) boundaries.push_back(offset);
  }
  return boundaries;
}

// Bytes in use: {plain, registered, managed, kept for captured graphs}.
std::vector<int64_t> memory_stats() {
  std::vector<int64_t> bytes(4);
  OpenRegistry all;
  for (const auto& [base, block] : all->blocks) {
    bytes[block->tensor_gone ? 3 : static_cast<size_t>(block->kind)] += block->bytes;
  }
  for (const std::unique_ptr<Block>& block : all->detached) bytes[3] += block->bytes;
  return bytes;
}

// Ends the use of this tensor's memory by captured graphs. Waits for their replays.
void let_captured_go(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.is_cpu()) return;
  const auto [begin, bytes] = span_of(tensor);
  auto with_captured = [begin = begin, end = begin + bytes](auto use) {
    OpenRegistry all;
    if (Block* block = all.find(begin)) use(block->uses.captured);
    for (ForeignUse& entry : all->foreign) {
      if (begin <= entry.base && entry.base < end) use(entry.uses.captured);
    }
  };
  // Queued replays have no event, so this waits for whole GPUs. A capture that another thread makes
  // meanwhile keeps the memory.
  const int64_t captures = capture_count;
  CapturedOn captured;
  with_captured([&](const CapturedOn& devices) { captured.add(devices); });
  captured.wait();
  with_captured([&](CapturedOn& devices) { devices.forget_before(captures); });
  drop_finished();
}

// Waits for replays of captured graphs, then frees all memory whose tensors are freed.
void let_orphans_go() {
  CapturedOn captured;
  std::list<std::unique_ptr<Block>> orphans;
  {
    OpenRegistry all;
    orphans.swap(all->detached);
    for (auto block = all->blocks.begin(); block != all->blocks.end();) {
      const auto next = std::next(block);
      if (block->second->tensor_gone) {
        orphans.push_back(std::move(block->second));
        all->blocks.erase(block);
      }
      block = next;
    }
  }
  for (const std::unique_ptr<Block>& block : orphans) captured.add(block->uses.captured);
  captured.wait();
  for (const std::unique_ptr<Block>& block : orphans) free_memory(*block);
}

// For tests without a GPU: calls gpu_access and note_use as an op does around its kernels. Returns
// the Access.
int64_t use_on(const Tensor& table, int64_t device, int64_t stream) {
  constexpr const char* kOp = "use_on";
  const Rows rows = as_rows(kOp, "table", table);
  const Stream queue{reinterpret_cast<void*>(stream), static_cast<int>(device)};
  const Access access = gpu_access(kOp, table, rows, queue.device);
  if (access != Access::kNot) note_use(table, rows, queue);
  return static_cast<int64_t>(access);
}

// Throws for managed memory in a forked child, where an access would kill the process.
void check_owner(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.is_cpu()) return;
  OpenRegistry all;
  check_not_forked(all.find(tensor.data_ptr()));
}

// True if every GPU can use managed memory that remains on the host. False without a GPU.
bool managed_supported() {
  int devices = 0;
  if (!succeeded(cuda_calls().device_count(&devices))) return false;
  for (int device = 0; device < devices; ++device) {
    int supported = 0;
    succeeded(cuda_calls().concurrent_managed_access(device, &supported));
    if (!supported) return false;
  }
  return devices > 0;
}

bool built_with_cuda() { return kWithCuda; }

void throw_pending_and_drop_finished() {
  drop_finished();
  throw_pending();
}

const Ops kOps{
    // Kinds are numbers: see MemoryKind.
    {"host_empty(int bytes, int kind, bool check_memory) -> Tensor", TORCH_BOX(&host_empty)},
    {"host_register(Tensor tensor) -> int", TORCH_BOX(&host_register)},
    {"host_unregister(int pin, bool tensor_is_gone) -> ()", TORCH_BOX(&host_unregister)},
    {"available_bytes() -> int", TORCH_BOX(&available_bytes)},
    {"memory_kind(Tensor tensor) -> int", TORCH_BOX(&memory_kind)},
    {"registration_seams(Tensor tensor) -> int[]", TORCH_BOX(&registration_seams)},
    {"memory_stats() -> int[]", TORCH_BOX(&memory_stats)},
    {"let_captured_go(Tensor tensor) -> ()", TORCH_BOX(&let_captured_go)},
    {"let_orphans_go() -> ()", TORCH_BOX(&let_orphans_go)},
    {"check_owner(Tensor tensor) -> ()", TORCH_BOX(&check_owner)},
    {"managed_supported() -> bool", TORCH_BOX(&managed_supported)},
    {"built_with_cuda() -> bool", TORCH_BOX(&built_with_cuda)},
    {"check_driver() -> ()", TORCH_BOX(&check_driver)},
    {"use_on(Tensor table, int device, int stream) -> int", TORCH_BOX(&use_on)},
    {"throw_pending() -> ()", TORCH_BOX(&throw_pending_and_drop_finished)},
    {"stop() -> ()", TORCH_BOX(&note_process_exit)},
};

}  // namespace
}  // namespace speedtorch
