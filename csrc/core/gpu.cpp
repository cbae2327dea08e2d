// Streams and the error record; see gpu.h.

#include "core/gpu.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "core/process.h"

namespace speedtorch {
namespace {

using CurrentStreamOf = int32_t (*)(int32_t device, void** stream);

// torch's CUDA library is asked for by name, so that this library needs none of its symbols to
// load. A program may load it after a first, failing call.
CurrentStreamOf current_stream_of() {
  static std::atomic<CurrentStreamOf> known{nullptr};
  if (const CurrentStreamOf function = known) return function;
  void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return nullptr;
  known = reinterpret_cast<CurrentStreamOf>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  return known;
}

constexpr const char* kOpNames[] = {"pinned_gather", "pinned_scatter", "optimizer_state_swap",
                                    "sum_rows"};
constexpr const char* kListNames[] = {"index", "evict", "load"};

// Asked for once per GPU.
bool asks_bulk_copies(int device) {
  int supported = 0;
  check_cuda(cuda_calls().bulk_copies(device, &supported), "bulk copies");
  return supported != 0;
}

void refuse_if_capturing(void* stream, const char* op, const std::string& why) {
  int capturing = 0;
  check_cuda(cuda_calls().stream_is_capturing(stream, &capturing), op);
  if (!capturing) return;
  throw std::runtime_error(text(op, ": not possible while a CUDA graph is captured: ", why));
}

std::atomic<ErrorRecord*> the_record{nullptr};
pid_t record_owner = 0;  // a forked child must not touch it

}  // namespace

CurrentStream::CurrentStream(const char* op, const Tensor& tensor) {
  if constexpr (!kWithCuda) {
    throw std::runtime_error(
        text(op,
             ": this speedtorch was built without CUDA kernels; install nvcc and build it again "
             "(SPEEDTORCH_CUDA=1 says why if that fails)"));
  }
  const CurrentStreamOf stream_of = current_stream_of();
  if (stream_of == nullptr) {
    throw std::runtime_error(text(op,
                                  ": torch's CUDA library is not loaded or has no "
                                  "aoti_torch_get_current_cuda_stream (torch >= 2.11 is needed)"));
  }
  device_ = tensor.get_device_index();
  if (stream_of(device_, &stream_) != 0) {
    throw std::runtime_error(text(op, ": torch gave no current stream for cuda:", device_));
  }
  guard_.emplace(device_);
}

bool CurrentStream::has_bulk_copies() const {
  constexpr int kKnown = 64;                              // GPUs whose answer is kept
  static std::array<std::atomic<int>, kKnown> answers{};  // 0: not asked, 1: no, 2: yes
  if (device_ >= kKnown) return asks_bulk_copies(device_);
  std::atomic<int>& answer = answers[static_cast<size_t>(device_)];
  if (answer == 0) answer = asks_bulk_copies(device_) ? 2 : 1;
  return answer == 2;
}

void CurrentStream::refuse_capture(const char* op, const std::string& why) const {
  refuse_if_capturing(stream_, op, why);
}

void CurrentStream::refuse_capture_of_pageable(const char* op, const std::string& what,
                                               const char* name) const {
  refuse_capture(op, what +
                         " is in pageable memory, which takes the host; pin it with "
                         "speedtorch.pin_memory_(" +
                         name + ") or keep it in a HostTable");
}

void refuse_during_capture(const char* op, const std::string& why) {
  const CurrentStreamOf stream_of = current_stream_of();
  int device = 0;
  if (stream_of == nullptr) return;
  if (cuda_calls().get_device(&device) != 0) {  // no GPU, so nothing captures
    cuda_calls().last_error();
    return;
  }
  void* stream = nullptr;
  if (stream_of(device, &stream) == 0) refuse_if_capturing(stream, op, why);
}

ErrorRecord* error_record() {
  if (ErrorRecord* record = the_record.load()) return record;
  static std::mutex making;
  std::lock_guard lock(making);
  if (ErrorRecord* record = the_record.load()) return record;
  const RelaxedCapture while_capturing;
  void* memory = nullptr;
  check_cuda(cuda_calls().host_alloc(&memory, sizeof(ErrorRecord)),
             "speedtorch: cudaHostAlloc of the error record");
  std::memset(memory, 0, sizeof(ErrorRecord));
  record_owner = process_id();
  the_record = static_cast<ErrorRecord*>(memory);
  return the_record;
}

void throw_pending() {
  ErrorRecord* record = the_record.load();
  if (record == nullptr || record_owner != process_id()) return;
  auto* full = reinterpret_cast<std::atomic<int32_t>*>(&record->full);
  if (full->load(std::memory_order_acquire) == 0) return;
  const ErrorRecord error = *record;
  if (full->exchange(0) == 0) return;  // another thread took it
  throw_bad_ids({.kind = static_cast<IdError>(error.kind),
                 .op = kOpNames[error.op],
                 .list = kListNames[error.list],
                 .rows = error.rows,
                 .id = error.id,
                 .position = error.position,
                 .bad_count = error.bad_count,
                 .count = error.count});
}

}  // namespace speedtorch
