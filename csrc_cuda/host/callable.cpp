// The type is written against CPython's own interface: pybind11 takes about 0.3 us to look at the arguments of
// a call, and a whole call of this takes less.
#include "callable.h"

#include <structmember.h>

#include <cstddef>

namespace dg::host {
namespace {

struct Callable {
    PyObject_HEAD;
    vectorcallfunc vectorcall;
    Plan* plan;
    PyObject* error;
    PyObject* refuse;
};

// What a failed call of the driver becomes in Python.
PyObject* raise(const Callable& self, const Answer& answer) {
    PyObject* made = PyObject_CallFunction(self.error, "s#i", answer.call.data(),
                                           static_cast<Py_ssize_t>(answer.call.size()), answer.code);
    if (made != nullptr) {
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made)), made);
        Py_DECREF(made);
    }
    return nullptr;
}

// The rules for a call and their words stand in Python; here is only known that one is broken.
PyObject* refused(const Callable& self, PyObject* addresses, PyObject* stream) {
    PyErr_Clear();
    PyObject* result = PyObject_CallFunctionObjArgs(self.refuse, addresses, stream, nullptr);
    if (result != nullptr) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "a call was refused that breaks no rule");
    }
    return nullptr;
}

// An int in [0, 2^64); false with a Python error set otherwise.
bool read(PyObject* value, std::uint64_t& result) {
    result = PyLong_AsUnsignedLongLong(value);
    return result != static_cast<std::uint64_t>(-1) || PyErr_Occurred() == nullptr;
}

// The first `count` items of a sequence. No code of Python runs for a list or a tuple.
bool read_all(PyObject* sequence, std::size_t count, std::uint64_t* results) {
    PyObject* items = PySequence_Fast(sequence, "addresses must be a sequence");
    if (items == nullptr)
        return false;
    bool good = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items)) >= count;
    PyObject** each = PySequence_Fast_ITEMS(items);
    for (std::size_t i = 0; good && i < count; ++i)
        good = read(each[i], results[i]);
    Py_DECREF(items);
    return good;
}

Answer run(Plan& plan, const std::uint64_t* addresses, Handle stream) {
    Answer answer = plan.bind(addresses);
    if (answer.code)
        return answer;
    // The launch waits where the card's queue is full, perhaps for a host function that needs the GIL, so it
    // runs without it and from a copy.
    Frame frame;
    plan.copy_to(frame, stream);
    PyThreadState* state = PyEval_SaveThread();
    answer = plan.launch(frame);
    PyEval_RestoreThread(state);
    return answer;
}

PyObject* call(PyObject* object, PyObject* const* arguments, std::size_t flags, PyObject* names) {
    Callable& self = *reinterpret_cast<Callable*>(object);
    if (PyVectorcall_NARGS(flags) != 2 || names != nullptr) {
        PyErr_SetString(PyExc_TypeError, "a launcher takes two positional arguments: addresses, stream");
        return nullptr;
    }
    Plan& plan = *self.plan;
    std::uint64_t addresses[kMaxSlots], stream;
    if (!read_all(arguments[0], plan.slots(), addresses) || !read(arguments[1], stream) ||
        !plan.accepts(addresses))
        return refused(self, arguments[0], arguments[1]);
    bool pushed;
    Answer answer = plan.enter(pushed);
    if (answer.code)
        return raise(self, answer);
    answer = run(plan, addresses, reinterpret_cast<Handle>(stream));
    const Answer left = plan.leave(pushed);
    if (answer.code)
        return raise(self, answer);
    if (left.code)
        return raise(self, left);
    Py_RETURN_NONE;
}

PyObject* repr(PyObject* object) {
    const std::string words = reinterpret_cast<Callable*>(object)->plan->describe();
    return PyUnicode_FromStringAndSize(words.data(), static_cast<Py_ssize_t>(words.size()));
}

int traverse(PyObject* object, visitproc visit, void* arg) {
    auto* self = reinterpret_cast<Callable*>(object);
    Py_VISIT(self->error);
    Py_VISIT(self->refuse);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

int clear(PyObject* object) {
    auto* self = reinterpret_cast<Callable*>(object);
    Py_CLEAR(self->error);
    Py_CLEAR(self->refuse);
    return 0;
}

void deallocate(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    delete reinterpret_cast<Callable*>(object)->plan;
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

PyTypeObject* callable_type() {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(Callable, vectorcall), READONLY, nullptr},
        {},
    };
    static PyType_Slot slots[] = {
        {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
        {Py_tp_repr, reinterpret_cast<void*>(repr)},
        {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
        {Py_tp_clear, reinterpret_cast<void*>(clear)},
        {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
        {Py_tp_members, members},
        {},
    };
    static PyType_Spec spec = {"dg_core.backends.cuda._C.Plan", sizeof(Callable), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                   Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                               slots};
    static PyObject* type = PyType_FromSpec(&spec);
    return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

PyObject* new_callable(std::unique_ptr<Plan> plan, PyObject* error, PyObject* refuse) {
    PyTypeObject* type = callable_type();
    Callable* self = type == nullptr ? nullptr : PyObject_GC_New(Callable, type);
    if (self == nullptr)
        return nullptr;
    self->vectorcall = call;
    self->plan = plan.release();
    Py_INCREF(error);
    Py_INCREF(refuse);
    self->error = error;
    self->refuse = refuse;
    auto* object = reinterpret_cast<PyObject*>(self);
    PyObject_GC_Track(object);
    return object;
}

}  // namespace dg::host
