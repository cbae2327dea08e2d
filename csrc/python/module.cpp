// The Python module: importing it loads the library, which registers the ops. It has one class.

#include "python/turn.h"

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* module = PyModule_Create2(&definition, PYTHON_ABI_VERSION);
  if (module == nullptr) return nullptr;
  PyObject* turn = speedtorch::turn_class();
  if (turn == nullptr || PyModule_AddObjectRef(module, "Turn", turn) < 0) {
    Py_DecRef(module);
    module = nullptr;
  }
  Py_DecRef(turn);
  return module;
}
