// The checks that the ops on rows and ids make before the first byte moves. An op names all its
// tensors once, with their use, and follows these steps in this order:
//   1. kinds: the constructor (dense, on the CPU or a GPU, a supported dtype, storage with
//      memory); shapes, dtypes and devices that must fit each other: tensor_checks.h
//   2. aliases: nothing that is written shares a byte with anything else   check_memory()
//   3. access: no managed memory of the process that forked this one, and
//      no write to memory that is pinned read-only                         check_memory()
//   4. how a GPU accesses host memory                                      gpu_access()
//   5. ids on the CPU, and plans there (those on a GPU are checked by the kernels)
//   6. marking as written, last, so that a throw leaves autograd unchanged  mark_written()
//   7. the first byte
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor_checks.h"

namespace speedtorch {

using Tensors = std::vector<Tensor>;

// A tensor argument of an op, or a list of tensors if `of_list`.
struct Argument {
  const char* name;
  const Tensor* first;
  size_t count;
  bool of_list;
  bool is_written;
  bool is_marked;  // this call changes its contents
};

inline Argument read(const char* name, const Tensor& tensor) {
  return {name, &tensor, 1, false, false, false};
}
inline Argument read(const char* name, const std::optional<Tensor>& tensor) {
  return tensor ? read(name, *tensor) : Argument{name, nullptr, 0, false, false, false};
}
inline Argument read(const char* name, const Tensors& list) {
  return {name, list.data(), list.size(), true, false, false};
}
inline Argument read(const char* name, const std::optional<Tensors>& list) {
  return list ? read(name, *list) : Argument{name, nullptr, 0, true, false, false};
}
inline Argument written(const char* name, const Tensor& tensor) {
  return {name, &tensor, 1, false, true, true};
}
inline Argument written(const char* name, const std::optional<Tensor>& tensor, bool changes) {
  return {name, tensor ? &*tensor : nullptr, tensor ? size_t{1} : size_t{0}, false, true, changes};
}
// Deleted: a Tensor would convert to a temporary optional, destroyed before the tensor is marked.
Argument written(const char* name, const Tensor& tensor, bool changes) = delete;
// `changes`: whether this call writes to any of them.
inline Argument written(const char* name, const Tensors& list, bool changes) {
  return {name, list.data(), list.size(), true, true, changes};
}

// The tensor arguments of one op. The tensors must outlive this object.
class Arguments {
 public:
  // Throws a pending error of an earlier op on the GPU if `throws_pending`, then checks the kinds.
  Arguments(const char* op, std::initializer_list<Argument> all, bool throws_pending = true);

  void check_memory() const;
  void mark_written() const;

 private:
  // The bytes that a tensor covers: runs of `run_bytes` that start at `begin` plus multiples of
  // `step_bytes` (0: one run).
  struct Extent {
    const Argument* argument;
    size_t at;
    const char* begin;
    const char* end;
    int64_t run_bytes;
    int64_t step_bytes;

    const Tensor& tensor() const { return argument->first[at]; }
    std::string name() const;
  };
  Extent extent_of(const Argument& argument, size_t at) const;
  static bool share_a_byte(const Extent& a, const Extent& b);

  const char* op_;
  std::vector<Argument> all_;
  std::vector<Extent> extents_;  // of the tensors with elements
};

}  // namespace speedtorch
