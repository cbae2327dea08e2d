// Python's limited API: what of it is used here must be named here.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Without Python (in a C++ program) these symbols are missing, and the module's initialiser is
// not called. Which functions count references depends on the Python that the library is built
// for.
#pragma weak _Py_Dealloc
#pragma weak Py_DecRef
#pragma weak _Py_DecRef
#pragma weak Py_IncRef
#pragma weak _Py_IncRef
#pragma weak _Py_NoneStruct
#pragma weak PyErr_CheckSignals
#pragma weak PyErr_Clear
#pragma weak PyErr_NoMemory
#pragma weak PyErr_SetString
#pragma weak PyEval_RestoreThread
#pragma weak PyEval_SaveThread
#pragma weak PyExc_RuntimeError
#pragma weak PyExc_TypeError
#pragma weak PyModule_AddObjectRef
#pragma weak PyModule_Create2
#pragma weak PyObject_CallNoArgs
#pragma weak PyObject_IsTrue
#pragma weak PySys_GetObject
#pragma weak PyThread_acquire_lock
#pragma weak PyThread_acquire_lock_timed
#pragma weak PyThread_allocate_lock
#pragma weak PyThread_free_lock
#pragma weak PyThread_get_thread_ident
#pragma weak PyThread_release_lock
#pragma weak PyTuple_GetItem
#pragma weak PyTuple_Size
#pragma weak PyType_FromSpec
#pragma weak PyType_GenericNew
#pragma weak PyType_GetSlot
