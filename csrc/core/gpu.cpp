// Implements streams and the error record; see gpu.h.

#include "core/gpu.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "core/process.h"

namespace speedtorch {
namespace {

using CurrentStreamOf = int32_t (*)(int32_t device, void** stream);

// Looks up torch's CUDA library by name at runtime, so that this library loads without its symbols.
// A program may load torch's library after a first, failing call.
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

#ifdef SPEEDTORCH_CUDA
constexpr int kKnownGpus = 64;  // GPUs with cached answers and an error record

// A property of each GPU, queried once.
struct DeviceProperty {
  const char* name;
  std::array<std::atomic<int>, kKnownGpus> known{};  // 0: not queried; else the answer + 1

  int of(int device, int (*query)(int device, int* answer)) {
    auto* cached = device < kKnownGpus ? &known[static_cast<size_t>(device)] : nullptr;
    if (cached != nullptr && *cached != 0) return *cached - 1;
    const RelaxedCapture while_capturing;  // the query may load a kernel
    int answer = 0;
    check_cuda(query(device, &answer), name);
    if (cached != nullptr) *cached = answer + 1;
    return answer;
  }
};
#endif

void check_stream_not_capturing(void* stream, const char* op, const std::string& why) {
  int capturing = 0;
  check_cuda(cuda_calls().stream_is_capturing(stream, &capturing), op);
  if (!capturing) return;
  throw std::runtime_error(text(op, ": not supported while a CUDA graph is captured: ", why));
}

// The records of all GPUs, allocated at first use.
std::atomic<ErrorRecord*> the_records{nullptr};
std::atomic<pid_t> records_owner{0};  // a forked child must not access the records
std::atomic<int> highest_gpu{-1};     // the highest GPU that has a record

}  // namespace

CurrentStream::CurrentStream(const char* op, const Tensor& tensor) {
  if constexpr (!kWithCuda) {
    throw std::runtime_error(text(op,
                                  ": speedtorch was built without CUDA kernels. Install nvcc and "
                                  "build speedtorch again with SPEEDTORCH_CUDA=1"));
  }
  const CurrentStreamOf stream_of = current_stream_of();
  if (stream_of == nullptr) {
    throw std::runtime_error(text(op,
                                  ": torch's CUDA library is not loaded or lacks "
                                  "aoti_torch_get_current_cuda_stream, which torch >= 2.11 has"));
  }
  device_ = tensor.get_device_index();
  if (stream_of(device_, &stream_) != 0) {
    throw std::runtime_error(text(op, ": torch returned no current stream for cuda:", device_));
  }
  guard_.emplace(device_);
}

void CurrentStream::check_not_capturing(const char* op, const std::string& why) const {
  check_stream_not_capturing(stream_, op, why);
}

void CurrentStream::check_pageable_not_captured(const char* op, const std::string& what,
                                                const char* name) const {
  check_not_capturing(op, what +
                              " is in memory that the GPU cannot access, such as pageable memory. "
                              "Pin all of it with speedtorch.pin_memory_(" +
                              name + ") or use a HostTable");
}

void check_not_capturing(const char* op, const std::string& why) {
  const CurrentStreamOf stream_of = current_stream_of();
  int device = 0;
  // No stream captures without a GPU.
  if (stream_of == nullptr || !succeeded(cuda_calls().get_device(&device))) return;
  void* stream = nullptr;
  if (stream_of(device, &stream) == 0) check_stream_not_capturing(stream, op, why);
}

#ifdef SPEEDTORCH_CUDA

bool CurrentStream::has_bulk_copies() const {
  static DeviceProperty property{"bulk copies"};
  return property.of(device_, cuda_calls().bulk_copies) != 0;
}

int CurrentStream::multiprocessors() const {
  static DeviceProperty property{"number of multiprocessors"};
  return property.of(device_, cuda_calls().multiprocessors);
}

ErrorRecord* error_record(int device) {
  ErrorRecord* records = the_records;
  if (records == nullptr) {
    constexpr size_t kBytes = kKnownGpus * sizeof(ErrorRecord);
    const RelaxedCapture while_capturing;
    void* memory = nullptr;
    check_cuda(cuda_calls().host_alloc(&memory, kBytes),
               "speedtorch: cudaHostAlloc of the error records");
    auto* made = static_cast<ErrorRecord*>(memory);
    std::memset(memory, 0, kBytes);
    records_owner = process_id();
    if (the_records.compare_exchange_strong(records, made)) {
      records = made;
    } else {  // another thread has allocated them
      succeeded(cuda_calls().host_free(memory));
    }
  }
  const int gpu = device % kKnownGpus;
  for (int highest = highest_gpu; highest < gpu;) highest_gpu.compare_exchange_weak(highest, gpu);
  return records + gpu;
}

#endif

void throw_pending() {
  if constexpr (!kWithCuda) return;  // there are no kernels
  ErrorRecord* records = the_records;
  if (records == nullptr || records_owner != process_id()) return;
  for (int gpu = 0; gpu <= highest_gpu; ++gpu) {
    ErrorRecord& record = records[gpu];
    const int32_t word = std::atomic_ref(record.written).load(std::memory_order_acquire);
    std::atomic_ref taken(record.taken);
    int32_t before = taken.load(std::memory_order_relaxed);
    if (word == before) continue;
    const ErrorRecord error = record;
    // Frees the record for another launch. Fails if another thread has read the record first.
    if (!taken.compare_exchange_strong(before, word, std::memory_order_acq_rel)) continue;
    throw_bad_ids({.kind = static_cast<IdError>(error.kind),
                   .op = kOpNames[error.op],
                   .list = name_of(static_cast<IdList>(error.list)),
                   .rows = error.rows,
                   .id = error.id,
                   .position = error.position,
                   .bad_count = error.bad_count,
                   .count = error.count});
  }
}

}  // namespace speedtorch
