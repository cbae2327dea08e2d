// The extension module speedtorch._C. Importing it loads the library, which registers the ops, and
// adds the classes NumbersHandle, RankWords, RowLock and RowLocks.

#include "python/numbers_handle.h"
#include "python/rank_words.h"
#include "python/row_lock.h"

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* module = PyModule_Create2(&definition, PYTHON_ABI_VERSION);
  if (module == nullptr) return nullptr;
  if (speedtorch::add_row_locks(module) && speedtorch::add_numbers_handle(module) &&
      speedtorch::add_rank_words(module)) {
    return module;
  }
  Py_DecRef(module);
  return nullptr;
}
