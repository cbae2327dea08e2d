// The schema of every op in one table, and an empty Python module.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/stable/library.h>

// Without Python (in a C++ program) this symbol is missing, and nobody calls the module's
// initialiser.
#pragma weak PyModule_Create2

STABLE_TORCH_LIBRARY(speedtorch, m) {
  m.def("plan_rows(Tensor index, int rows) -> Tensor[]");

  m.def("pinned_gather(Tensor table, Tensor index) -> Tensor");
  // The same without the autograd kernel, which costs as much again as a small gather.
  m.def("pinned_gather_detached(Tensor table, Tensor index) -> Tensor");
  m.def("pinned_gather.out(Tensor table, Tensor index, Tensor(a!) out) -> ()");
  m.def("pinned_gather.planned(Tensor table, Tensor index, Tensor[] plan) -> Tensor");
  m.def(
      "pinned_gather.planned_out(Tensor table, Tensor index, Tensor[] plan, Tensor(a!) out) -> "
      "()");

  m.def("pinned_scatter(Tensor(a!) table, Tensor index, Tensor src, bool accumulate=False) -> ()");
  m.def(
      "pinned_scatter.planned(Tensor(a!) table, Tensor index, Tensor src, Tensor[] plan, bool "
      "accumulate=False) -> ()");

  m.def(
      "optimizer_state_swap(Tensor(a!)[] host, Tensor[] leaving, Tensor evict, Tensor(b!)[] "
      "arriving, Tensor load) -> ()");
  m.def(
      "optimizer_state_swap.planned(Tensor(a!)[] host, Tensor[] leaving, Tensor evict, Tensor[]"
      " evict_plan, Tensor(b!)[] arriving, Tensor load, Tensor[] load_plan) -> ()");
  m.def(
      "optimizer_state_swap.placed(Tensor(a!)[] host, Tensor[] leaving, Tensor evict, Tensor "
      "evict_places, Tensor(b!)[] arriving, Tensor load, Tensor load_places) -> ()");

  m.def("pinned_copy(Tensor(a!) dst, Tensor src) -> ()");

  m.def("sum_rows(Tensor rows, Tensor[] plan, int table_rows, int begin, int distinct) -> Tensor");
  // For speedtorch/ops/planned_batch.py.
  m.def(
      "compare_rows(Tensor named, Tensor named_status, Tensor held, Tensor held_status, int "
      "padding) -> Tensor[]");

  // The choice of path, for speedtorch/memory/cost_model.py.
  m.def("explain_move(Tensor table, int ids, int direction, bool accumulate) -> Tensor");
  m.def(
      "link_launch(int direction, int row_bytes, int host_bits, int other_bits, int rows, bool "
      "bulk, int sms) -> int[]");
  m.def("costs() -> Tensor");
  m.def("set_costs(Tensor costs) -> ()");
  m.def("force_path(int path) -> ()");
  m.def("num_sms() -> int");
  m.def("set_num_sms(int count) -> ()");

  // Ops on memory, for speedtorch/memory/host_memory.py. Kinds are numbers: see MemoryKind.
  m.def("host_empty(int bytes, int kind, bool check_memory) -> Tensor");
  m.def("host_register(Tensor tensor) -> int");
  m.def("host_unregister(int pin, bool tensor_is_gone) -> ()");
  m.def("available_bytes() -> int");
  m.def("memory_kind(Tensor tensor) -> int");
  m.def("memory_stats() -> Tensor");
  m.def("let_captured_go(Tensor tensor) -> ()");
  m.def("let_orphans_go() -> ()");
  m.def("check_owner(Tensor tensor) -> ()");
  m.def("managed_supported() -> bool");
  m.def("built_with_cuda() -> bool");
  m.def("throw_pending() -> ()");
  m.def("stop() -> ()");
}

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create2(&module, PYTHON_ABI_VERSION);
}
