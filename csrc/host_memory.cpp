// Kinds of host memory and their lifetime; see host_memory.h.

#include "host_memory.h"

#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host_pages.h"

namespace speedtorch {
namespace {

// One registration of 512 GiB or more fails on recent drivers, so memory is registered in pieces of
// at most this.
constexpr int64_t kBytesPerRegistration = int64_t{64} << 30;

std::atomic<bool> process_exits{false};

// The last use of a piece of memory on each stream.
class StreamUses {
 public:
  // `stream` belongs to the current device, as the caller's device guard has set it.
  void record(void* stream) {
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

  bool finished() const {
    return std::none_of(uses_.begin(), uses_.end(), [](const Use& use) {
      return cuda_calls().event_query(use.event) == kCudaNotReady;
    });
  }

  // Waits for every use and forgets it. Errors are not reported: memory must go all the same.
  void wait() noexcept {
    for (const Use& use : uses_) {
      if (cuda_calls().event_synchronize(use.event) != 0) cuda_calls().last_error();
      if (cuda_calls().event_destroy(use.event) != 0) cuda_calls().last_error();
    }
    uses_.clear();
  }

 private:
  struct Use {
    void* stream;  // the default streams of all devices have the same handle
    int device;
    void* event;
  };
  std::vector<Use> uses_;
};

// A piece of host memory that we made or registered.
struct Block {
  char* base = nullptr;
  int64_t bytes = 0;
  MemoryKind kind = MemoryKind::kPlain;
  bool in_place = false;  // registered where the user had it: not ours to unmap
  bool read_only = false;
  bool captured = false;  // a captured graph may use it
  bool tensor_gone = false;
  pid_t maker = 0;
  StreamUses uses;

  char* end() const { return base + bytes; }
};

// Mapped memory of others (a torch-pinned tensor): kept alive until the GPU is done with it.
struct ForeignUse {
  Tensor table;
  const void* base;
  bool captured;
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

// Never destroyed: tensors may go after static destructors ran.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

void unregister_pieces(char* base, int64_t bytes) noexcept {
  for (int64_t start = 0; start < bytes; start += kBytesPerRegistration) {
    if (cuda_calls().host_unregister(base + start) != 0) cuda_calls().last_error();
  }
}

// All or nothing: a failure undoes the pieces before it.
int register_pieces(char* base, int64_t bytes, bool read_only) {
  for (int64_t start = 0; start < bytes; start += kBytesPerRegistration) {
    const int64_t piece = std::min(kBytesPerRegistration, bytes - start);
    const int error = cuda_calls().host_register(base + start, piece, read_only);
    if (error != 0) {
      cuda_calls().last_error();
      unregister_pieces(base, start);
      return error;
    }
  }
  return 0;
}

std::string registration_failure(int64_t bytes, int error) {
  return "host memory: pinning " + std::to_string(bytes) +
         " bytes with cudaHostRegister failed: " + cuda_calls().error_string(error) +
         " (CUDA error " + std::to_string(error) +
         "). Bytes available on this machine: " + std::to_string(available_bytes()) +
         ". Not possible: writable shared mappings of disk files, and memory that is registered "
         "already. Remedy: load "
         "the data into speedtorch.memory.empty(...), free host memory, or use memory='plain'";
}

void* allocate_managed(int64_t bytes) {
  int devices = 0;
  check_cuda(cuda_calls().device_count(&devices), "host memory: finding a GPU for managed memory");
  for (int device = 0; device < devices; ++device) {
    int supported = 0;
    check_cuda(cuda_calls().concurrent_managed_access(device, &supported),
               "host memory: asking the GPU's attributes");
    if (!supported) {
      throw std::runtime_error(
          "host memory: GPU " + std::to_string(device) +
          " has no concurrentManagedAccess, so managed memory cannot serve; use "
          "memory='registered'");
    }
  }
  void* address = nullptr;
  check_cuda(cuda_calls().malloc_managed(&address, bytes), "host memory: cudaMallocManaged");
  // The advice must stand before the first touch: it decides where the pages are made and how the
  // GPU maps them.
  int error = cuda_calls().advise_preferred_host(address, bytes);
  for (int device = 0; device < devices && error == 0; ++device) {
    error = cuda_calls().advise_accessed_by(address, bytes, device);
  }
  if (error != 0) {
    cuda_calls().free_managed(address);
    check_cuda(error, "host memory: cudaMemAdvise");
  }
  return address;
}

void free_memory(Block& block) noexcept {
  const bool call_cuda = !process_exits && block.maker == getpid();
  const RelaxedCapture while_capturing;
  if (call_cuda) block.uses.wait();
  if (block.kind == MemoryKind::kManaged) {
    if (call_cuda && cuda_calls().free_managed(block.base) != 0) cuda_calls().last_error();
    return;
  }
  if (block.kind == MemoryKind::kRegistered && call_cuda)
    unregister_pieces(block.base, block.bytes);
  if (!block.in_place && !process_exits) unmap_pages(block.base, block.bytes);
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
    if (found->second->captured) return;
    last = std::move(found->second);
    all.blocks.erase(found);
  }
  free_memory(*last);
}

// Moves the tensors that no GPU work uses any more to `dropped`, for the caller to drop outside the
// lock.
void drop_finished_foreign(Registry& all, std::vector<Tensor>& dropped) {
  for (auto use = all.foreign.begin(); use != all.foreign.end();) {
    if (!use->captured && use->uses.finished()) {
      use->uses.wait();
      dropped.push_back(use->table);
      use = all.foreign.erase(use);
    } else {
      ++use;
    }
  }
}

void remember(std::unique_ptr<Block> block) {
  static const bool exit_hook_set = [] { return std::atexit(stop) == 0; }();
  (void)exit_hook_set;
  block->maker = getpid();
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  const char* base = block->base;
  all.blocks[base] = std::move(block);
}

// First and last byte that the tensor's elements span, whatever its strides.
std::pair<char*, int64_t> span_of(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {static_cast<char*>(tensor.data_ptr()), (last + 1) * element_bytes(tensor)};
}

}  // namespace

void stop() { process_exits = true; }

Tensor host_empty(int64_t bytes, int64_t kind, bool check_memory) {
  const auto wanted = static_cast<MemoryKind>(kind);
  if (bytes < 0)
    throw_value_error("host memory", "size must not be negative, got " + std::to_string(bytes));
  if (wanted != MemoryKind::kPlain && wanted != MemoryKind::kRegistered &&
      wanted != MemoryKind::kManaged) {
    throw_value_error("host memory", "kind must be 0 (plain), 1 (registered) or 2 (managed), got " +
                                         std::to_string(kind));
  }
  std::array<int64_t, 1> sizes{bytes}, strides{1};
  if (bytes == 0) return torch::stable::empty(sizes, ScalarType::Byte);
  if (check_memory) refuse_if_short(bytes);

  auto block = std::make_unique<Block>();
  block->kind = wanted;
  block->bytes = bytes;
  block->base = static_cast<char*>(wanted == MemoryKind::kManaged ? allocate_managed(bytes)
                                                                  : map_pages(bytes));
  fill_with_zeros(block->base, bytes);
  if (wanted == MemoryKind::kRegistered) {
    if (const int error = register_pieces(block->base, bytes, false); error != 0) {
      unmap_pages(block->base, bytes);
      throw std::runtime_error(registration_failure(bytes, error));
    }
  }
  char* base = block->base;
  remember(std::move(block));
  return torch::stable::from_blob(base, sizes, strides, Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte,
                                  [](void* data) { tensor_gone(static_cast<char*>(data)); });
}

void host_register(const Tensor& tensor) {
  constexpr const char* kOp = "pin_memory_";
  if (!tensor.is_cpu())
    throw_value_error(kOp, "the tensor must be on the CPU, it is on " + device_text(tensor));
  if (tensor.numel() == 0) return;
  const auto [base, bytes] = span_of(tensor);
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    auto after = all.blocks.lower_bound(base + bytes);
    if (after != all.blocks.begin() && std::prev(after)->second->end() > base) {
      throw_value_error(
          kOp,
          "the tensor's memory overlaps memory that speedtorch has pinned or allocated already; "
          "unpin_memory_ that tensor first");
    }
  }
  int kind = 0;
  if (cuda_calls().pointer_kind(base, &kind) == 0 &&
      static_cast<PointerKind>(kind) != PointerKind::kPageable) {
    throw_value_error(kOp, "the tensor's memory is pinned already, by another library");
  }
  auto block = std::make_unique<Block>();
  block->kind = MemoryKind::kRegistered;
  block->in_place = true;
  block->base = base;
  block->bytes = bytes;
  int error = register_pieces(base, bytes, false);
  if (error != 0 && register_pieces(base, bytes, true) == 0) {  // a read-only mapping of a file
    block->read_only = true;
    error = 0;
  }
  if (error != 0) throw std::runtime_error(registration_failure(bytes, error));
  remember(std::move(block));
}

void host_unregister(const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  std::unique_ptr<Block> block;
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    auto found = all.blocks.find(static_cast<const char*>(tensor.data_ptr()));
    if (found == all.blocks.end() || !found->second->in_place) {
      throw_value_error("unpin_memory_", "the tensor was not pinned with pin_memory_");
    }
    block = std::move(found->second);
    all.blocks.erase(found);
  }
  free_memory(*block);
}

int64_t memory_kind(const Tensor& tensor) {
  if (tensor.is_cuda()) return static_cast<int64_t>(MemoryKind::kCuda);
  if (tensor.numel() == 0) return static_cast<int64_t>(MemoryKind::kPlain);
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    if (const Block* block = all.find(tensor.data_ptr())) return static_cast<int64_t>(block->kind);
  }
  int kind = 0;
  if (cuda_calls().pointer_kind(tensor.data_ptr(), &kind) != 0) {
    cuda_calls().last_error();
    return static_cast<int64_t>(MemoryKind::kPlain);
  }
  const auto found = static_cast<PointerKind>(kind);
  if (found == PointerKind::kManaged) return static_cast<int64_t>(MemoryKind::kManaged);
  return static_cast<int64_t>(found == PointerKind::kHost ? MemoryKind::kPinned
                                                          : MemoryKind::kPlain);
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
  std::vector<Tensor> dropped;  // outlives the lock: dropping a tensor may call tensor_gone
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  if (Block* block = all.find(tensor.data_ptr())) block->captured = false;
  for (ForeignUse& use : all.foreign) {
    if (use.base == tensor.data_ptr()) use.captured = false;
  }
  drop_finished_foreign(all, dropped);
}

void check_owner(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.is_cpu()) return;
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  const Block* block = all.find(tensor.data_ptr());
  if (block == nullptr || block->kind != MemoryKind::kManaged || block->maker == getpid()) return;
  throw std::runtime_error(
      "host memory: managed memory made in process " + std::to_string(block->maker) +
      ", used in its fork " + std::to_string(getpid()) +
      ", which cannot touch it: open the table by name there, start the process with 'spawn', or "
      "make the table with memory='registered'");
}

bool is_mapped(const char* op, const Tensor& table, const Rows& rows) {
  if (table.is_cuda() || rows.base == nullptr) return true;
  check_owner(table);
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    if (const Block* block = all.find(rows.base)) {
      return block->kind != MemoryKind::kPlain && rows.end() <= block->end();
    }
  }
  for (const char* address : {static_cast<const char*>(rows.base), rows.end() - 1}) {
    int kind = 0;
    check_cuda(cuda_calls().pointer_kind(address, &kind), op);
    if (static_cast<PointerKind>(kind) == PointerKind::kPageable) return false;
  }
  return true;
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
      block->captured = true;
    } else {
      block->uses.record(stream);
    }
    return;
  }
  auto use = std::find_if(all.foreign.begin(), all.foreign.end(),
                          [&](const ForeignUse& u) { return u.base == rows.base; });
  if (use == all.foreign.end()) {
    all.foreign.push_back({table, rows.base, false, {}});
    use = std::prev(all.foreign.end());
  }
  if (capturing) {
    use->captured = true;  // no event can be asked for while a stream captures
    return;
  }
  use->uses.record(stream);
  drop_finished_foreign(all, dropped);
}

}  // namespace speedtorch
