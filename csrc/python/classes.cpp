// Helpers of Python classes; see classes.h.

#include "python/classes.h"

namespace speedtorch {

PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

PyObject* make_class(const char* name, int size, newfunc make, destructor free,
                     PyMethodDef* methods, const char* doc) {
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(free)},
                         {Py_tp_methods, methods},
                         {Py_tp_doc, const_cast<char*>(doc)},
                         {0, nullptr}};
  PyType_Spec spec = {name, size, 0, Py_TPFLAGS_DEFAULT, slots};
  return PyType_FromSpec(&spec);
}

void free_object(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DecRef(reinterpret_cast<PyObject*>(type));
}

bool add(PyObject* module, const char* name, PyObject* made) {
  const bool is_added = made != nullptr && PyModule_AddObjectRef(module, name, made) == 0;
  Py_DecRef(made);
  return is_added;
}

}  // namespace speedtorch
