// A plan as a Python object that is called as plan(addresses, stream).
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>

#include "plan.h"

namespace dg::host {

// A new reference, or null with a Python error set.
//   error(call, code): returns the exception for a call of the driver that failed
//   refuse(addresses, stream): raises the exception for addresses or a stream that no call may have
PyObject* new_callable(std::unique_ptr<Plan> plan, PyObject* error, PyObject* refuse);

}  // namespace dg::host
