// Registration of ops: each file of ops lists its schemas and kernels in one static object.
//
// Before torch calls a kernel of its stable ABI, torch moves the tensors out of each list argument
// (from_ivalue, torch/csrc/shim_common.cpp). Python makes a list for each call and loses nothing.
// TorchScript's interpreter passes the caller's own list, which is empty afterwards. A kernel never
// sees the list and cannot refill it, so each op that takes a list is registered twice:
//   speedtorch_lists::<op>  for calls with lists made for the call, such as Python's
//   speedtorch::<op>        the same; if Python is present, speedtorch/ops/functions.py replaces
//                           the kernel by one that copies the lists and calls
//                           speedtorch_lists::<op>
//
// A list that the op writes to is declared as Tensor(a! -> *)[]. The star declares that its tensors
// may alias any tensor afterwards. Without the star, TorchScript's dead code elimination removes a
// call whose lists were made in the function, because it does not see that their tensors change.
#pragma once

#include <torch/csrc/stable/library.h>

#include <initializer_list>
#include <source_location>

namespace speedtorch {

struct OpKernel {
  const char* schema;
  void (*kernel)(StableIValue* stack, uint64_t arguments, uint64_t outputs);  // of TORCH_BOX
};

// Registers the ops for as long as it lives.
class Ops {
 public:
  Ops(std::initializer_list<OpKernel> ops,
      std::source_location at = std::source_location::current());

 private:
  using Library = torch::stable::detail::StableLibrary;

  Library schemas_, list_schemas_, kernels_, list_kernels_;
};

}  // namespace speedtorch
