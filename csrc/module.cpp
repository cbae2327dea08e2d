// An empty Python module: importing it loads the library, which registers the ops.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Without Python (in a C++ program) this symbol is missing, and nobody calls the module's
// initialiser.
#pragma weak PyModule_Create2

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create2(&module, PYTHON_ABI_VERSION);
}
