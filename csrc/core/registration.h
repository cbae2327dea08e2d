// Registration of ops: each file of ops lists its schemas and kernels in one static object.
//
// Before torch calls a kernel of its stable ABI, it moves the tensors out of each list argument
// (from_ivalue, torch/csrc/shim_common.cpp). Python makes a list for each call and loses nothing.
// TorchScript's interpreter hands over the caller's own list, which holds no tensor afterwards. A
// kernel cannot undo that: it never sees the list. So each op that takes a list is registered
// twice:
//   speedtorch_lists::<op>  for calls whose lists were made for the call, as Python's are
//   speedtorch::<op>        the same; where Python is, speedtorch/ops/functions.py gives it kernels
//                           that copy the lists and call speedtorch_lists::<op>
//
// A list that is written is declared as Tensor(a! -> *)[]. The star says that its tensors may be
// known elsewhere afterwards. Without it TorchScript's dead code elimination removes a call of
// which the lists were made in the function: it does not see that their tensors change.
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
