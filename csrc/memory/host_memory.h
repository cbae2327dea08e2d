// Makes host memory that tables live in: managed, registered or plain; and pins memory where it is.
//
// Guarantees: exact size (pages aside); refused in numbers before the first page when the machine
// has not enough; all or nothing. host_blocks.h says when it goes.
#pragma once

#include <cstdint>

#include "core/rows.h"

namespace speedtorch {

// uint8 tensor of `bytes` zeros in host memory of that MemoryKind (plain, registered or managed).
Tensor host_empty(int64_t bytes, int64_t kind, bool check_memory);
// Pins the memory of a CPU tensor in place; keeps the tensor, so that its memory goes after it is
// unpinned. Returns a number for host_unregister, 0 for a tensor without elements.
int64_t host_register(const Tensor& tensor);
void host_unregister(int64_t pin, bool tensor_is_gone);
// The MemoryKind of a tensor's memory.
int64_t memory_kind(const Tensor& tensor);

}  // namespace speedtorch
