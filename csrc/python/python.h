// Includes Python's limited API and declares every symbol in use as weak. A new use of the API must
// be added to this list.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// A C++ program without Python can load the library: these symbols are then missing and PyInit__C
// is not called. The code counts references with the functions Py_IncRef and Py_DecRef. The macros
// Py_INCREF and Py_DECREF would call _Py_IncRef, _Py_DecRef or _Py_Dealloc, as the version decides.
#pragma weak _Py_Dealloc
#pragma weak Py_DecRef
#pragma weak _Py_DecRef
#pragma weak Py_IncRef
#pragma weak _Py_IncRef
#pragma weak _Py_NoneStruct
#pragma weak PyBool_FromLong
#pragma weak PyErr_CheckSignals
#pragma weak PyErr_Clear
#pragma weak PyErr_NoMemory
#pragma weak PyErr_Occurred
#pragma weak PyErr_SetFromErrno
#pragma weak PyErr_SetString
#pragma weak PyEval_RestoreThread
#pragma weak PyEval_SaveThread
#pragma weak PyExc_OSError
#pragma weak PyExc_RuntimeError
#pragma weak PyExc_TypeError
#pragma weak PyExc_ValueError
#pragma weak PyFloat_AsDouble
#pragma weak PyList_New
#pragma weak PyList_SetItem
#pragma weak PyLong_AsLongLong
#pragma weak PyLong_FromLongLong
#pragma weak PyModule_AddObjectRef
#pragma weak PyModule_Create2
#pragma weak PyObject_CallNoArgs
#pragma weak PyObject_IsTrue
#pragma weak PySequence_GetItem
#pragma weak PySequence_Size
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
