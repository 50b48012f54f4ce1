// The entry points of engine "wrap" without a frame of Python, for calls that name a device which the thread has named
// before. They do what `_Naming`, `_Move` and `_new_device` of `calls/wrap.py` do, and leave all other calls to these.
//
// All of this runs with Python's lock, and no handler of a signal comes between its steps.

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/profiler/api.h>
#include <torch/csrc/utils/pybind.h>

#include <frameobject.h>
#include <pthread.h>

#include <atomic>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace entry_points {

// What the calls need of this package, kept as long as the process lives.
struct Given {
  PyObject *state, *ask, *is_final, *moved, *mark, *created_by_default, *to, *device_side, *exact, *errors, *sizes;
  PyObject *factories, *moves;
  PyTypeObject *factory, *move, *device;
} given;

// Names of attributes and of arguments.
struct Names {
  PyObject *mode, *context, *native, *original, *method, *device, *pin_memory, *generator, *side, *count;
} names;

// What Python's classes had before.
ternaryfunc factory_in_python, move_in_python;
newfunc device_in_python;
bool are_in_place = false;

py::object owned(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

py::object attribute(PyObject* object, PyObject* name) {
  auto found = owned(PyObject_GetAttr(object, name));
  if (!found) throw python_error();
  return found;
}

void must(bool is_done) {
  if (!is_done) throw python_error();
}

PyObject* item(PyObject* dictionary, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dictionary, key);
  must(found != nullptr || PyErr_Occurred() == nullptr);
  return found;
}

bool is_in(PyObject* set, PyObject* value) {
  const int found = PySet_Contains(set, value);
  must(found >= 0);
  return found != 0;
}

// Return what `body` returns; null with Python's error set where it throws.
template <class Body>
PyObject* guarded(Body&& body) {
  try {
    return body().release().ptr();
  } catch (python_error& error) {
    error.restore();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

py::object called(PyObject* function, PyObject* args, PyObject* kwargs) {
  auto found = owned(PyObject_Call(function, args, kwargs));
  must(bool(found));
  return found;
}

template <class... Args>
py::object called_with(PyObject* function, Args... args) {
  auto found = owned(PyObject_CallFunctionObjArgs(function, args..., nullptr));
  must(bool(found));
  return found;
}

// A line of the program and what it requests there.
using Site = std::tuple<PyObject*, int, PyObject*>;

// How often this process has been forked off: a journal then counts anew.
std::atomic<int> forks = 0;

// What calls need of a thread's mode, from when it begins to serve a context until it serves another one.
struct Known {
  py::object redirects, table, device, journal, entries, for_own;
  bool shares_host_memory, are_several, redirects_only;
  // The entry points that the context's table lets C++ serve, with their originals. It never changes what it has.
  std::unordered_map<PyObject*, std::pair<py::object, py::object>> served;
  // The entries of the journal of lines of the program, with what was requested, which keeps its address taken.
  std::map<Site, std::pair<py::object, py::object>> sites;
  int forked = forks;
};

// The values of `thread_state.state` in this thread of Python. Python's own look-up takes three times as long.
PyObject* values_of_thread() {
  thread_local uint64_t thread = 0;  // Python counts its threads from 1, and gives no number twice
  thread_local PyObject* values = nullptr;
  const auto now = PyThreadState_GetID(PyThreadState_Get());
  if (now != thread) {
    values = attribute(given.state, owned(PyUnicode_InternFromString("__dict__")).ptr()).ptr();
    thread = now;
  }
  return values;
}

// A call in a thread with a mode beside torch's stack.
struct Call {
  PyObject* const values = values_of_thread();
  // Owned, since the call may leave the scope.
  const py::object mode = py::reinterpret_borrow<py::object>(item(values, names.mode));
  py::object holder;
  Known* known = nullptr;

  bool has_mode() const { return mode && !mode.is_none(); }

  // Whether no other mode is to see the call, and C++ may serve the mode's context. A trace has the lines of Python that
  // made its calls, and compares them with those of a second trace.
  bool is_plain() {
    using at::impl::PythonTorchFunctionTLS;
    if (PythonTorchFunctionTLS::stack_len() != 0 || at::impl::torch_function_all_disabled() ||
        torch::jit::tracer::isTracing()) {
      return false;
    }
    holder = attribute(mode.ptr(), names.native);
    if (holder.is_none()) learn();
    if (PyCapsule_CheckExact(holder.ptr())) known = static_cast<Known*>(PyCapsule_GetPointer(holder.ptr(), nullptr));
    return known != nullptr;
  }

  void learn() {
    const auto context = attribute(mode.ptr(), names.context);
    if (context.is_none()) return;  // a mode that serves nothing any more
    holder = py::bool_(false);
    if (py::cast<std::string>(context.attr("options").attr("native")) != "never") {
      const auto runtime = context.attr("runtime");
      must(PyDict_SetItem(values, names.mode, Py_None) == 0);  // a runtime may make its device
      const auto device = owned(guarded([&] { return py::object(runtime.attr("device")(0)); }));
      must(PyDict_SetItem(values, names.mode, mode.ptr()) == 0 && device);
      const auto journal = context.attr("journal"), devices = context.attr("devices");
      auto* found = new Known{
          mode.attr("known"), mode.attr("table"), device, journal, journal.attr("_entries"),
          py::make_tuple(device, "", ""), py::cast<bool>(runtime.attr("shares_host_memory")),
          py::cast<bool>(devices.attr("are_several")), py::cast<bool>(devices.attr("redirects_only"))};
      holder = owned(PyCapsule_New(found, nullptr, [](PyObject* each) {
        delete static_cast<Known*>(PyCapsule_GetPointer(each, nullptr));
      }));
    }
    must(PyObject_SetAttr(mode.ptr(), names.native, holder.ptr()) == 0);
  }

  // The device for an argument, what was requested and what is done, as `Context.redirect` knows them; else nothing.
  py::object found(PyObject* asked) const {
    if (PyUnicode_CheckExact(asked) || (THPDevice_Check(asked) && !known->shares_host_memory)) return kept_for(asked);
    const bool is_own = asked == known->device.ptr() && PyDict_GET_SIZE(known->redirects.ptr()) != 0;
    return is_own ? known->for_own : py::object();
  }

  py::object kept_for(PyObject* key) const {
    PyObject* answer = item(known->redirects.ptr(), key);
    return answer == Py_None ? py::object() : py::reinterpret_borrow<py::object>(answer);
  }

  // torch's function, where the context has one of these rewriters for it; else null.
  PyObject* original_of(PyObject* self, PyObject* rewriters) const {
    if (const auto found = known->served.find(self); found != known->served.end()) return found->second.second.ptr();
    const auto original = attribute(self, names.original);
    PyObject* rewriter = item(known->table.ptr(), original.ptr());
    if (rewriter == nullptr || !is_in(rewriters, rewriter)) return nullptr;
    known->served.emplace(self, std::pair(py::reinterpret_borrow<py::object>(self), original));
    return original.ptr();
  }

  // Count a request at the program's line, as `Journal.record` does.
  void count(const py::object& answer) const {
    PyObject *requested = PyTuple_GET_ITEM(answer.ptr(), 1), *done = PyTuple_GET_ITEM(answer.ptr(), 2);
    PyFrameObject* frame = PyEval_GetFrame();
    if (PyUnicode_GET_LENGTH(requested) == 0 || frame == nullptr) return;
    const auto code = owned(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
#if PY_VERSION_HEX >= 0x030B0000
    const int place = PyFrame_GetLasti(frame);
#else
    const int place = frame->f_lasti * static_cast<int>(sizeof(_Py_CODEUNIT));
#endif
    if (known->sites.size() >= 4096 || known->forked != forks) known->sites.clear();
    known->forked = forks;
    const Site site(code.ptr(), place, answer.ptr());
    if (const auto found = known->sites.find(site); found != known->sites.end()) return add_to(found->second.first.ptr());
    const auto at = owned(PyLong_FromVoidPtr(code.ptr())), in = owned(PyLong_FromLong(place));
    const auto key = owned(PyTuple_Pack(4, at.ptr(), in.ptr(), requested, done));
    must(bool(key));
    if (PyObject* entry = item(known->entries.ptr(), key.ptr())) {
      known->sites.emplace(site, std::pair(py::reinterpret_borrow<py::object>(entry), answer));
      add_to(entry);
    } else {
      known->journal.attr("record")(answer[py::int_(1)], answer[py::int_(2)], py::handle(given.exact));
    }
  }

  static void add_to(PyObject* entry) {
    const auto more = owned(PyLong_FromLongLong(PyLong_AsLongLong(attribute(entry, names.count).ptr()) + 1));
    must(PyObject_SetAttr(entry, names.count, more.ptr()) == 0);
  }

  // Let `make` make the call while the mode is not active, as `_ask` does. If it fails, the mode makes it again.
  template <class Make>
  py::object made(PyObject* original, PyObject* args, PyObject* kwargs, Make&& make) {
    must(PyDict_SetItem(values, names.mode, Py_None) == 0);
    auto result = owned(guarded(make));
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    // The call may have left the scope: the mode lets go of what it has for C++ when it serves another context.
    const bool serves = Py_REFCNT(holder.ptr()) > 1 || !attribute(mode.ptr(), names.context).is_none();
    py::object is_final = py::bool_(true);
    if (type != nullptr && serves && PyErr_GivenExceptionMatches(type, given.errors)) {
      PyErr_NormalizeException(&type, &value, &trace);
      if (trace != nullptr) PyException_SetTraceback(value, trace);
      is_final = owned(guarded([&] { return called_with(given.is_final, mode.attr("context").ptr(), value); }));
    }
    must(PyDict_SetItem(values, names.mode, serves ? mode.ptr() : Py_None) == 0);
    if (type == nullptr) return result;
    if (is_final && is_final.is(py::bool_(true))) {
      PyErr_Restore(type, value, trace);
      throw python_error();
    }
    const auto held = std::make_tuple(owned(type), owned(value), owned(trace));
    must(bool(is_final));
    const auto options = kwargs == nullptr ? owned(PyDict_New()) : py::reinterpret_borrow<py::object>(kwargs);
    return called_with(given.ask, mode.ptr(), original, args, options.ptr());
  }
};

// The storage of a tensor of torch's own classes with memory of its own; else null.
c10::StorageImpl* storage_of(PyObject* tensor) {
  auto* impl = THPVariable_CheckExact(tensor) ? THPVariable_Unpack(tensor).unsafeGetTensorImpl() : nullptr;
  return impl != nullptr && impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

// The object of Python that a storage has, if it has one. Torch 2.11 has given the function another name.
template <class Slot>
PyObject* object_of(Slot* slot) {
  if constexpr (requires { slot->load_pyobj(); }) {
    return slot->load_pyobj();
  } else {
    return slot->check_pyobj().value_or(nullptr);
  }
}

// The side of a storage that `moves.py` has marked; null without a mark.
py::object side_of(c10::StorageImpl* storage) {
  PyObject* object = object_of(storage->pyobj_slot());
  auto side = object == nullptr ? py::object() : owned(PyObject_GetAttr(object, names.side));
  PyErr_Clear();
  return side;
}

// The mark of a storage without an object of Python, on the side of the device. Torch reads this bit of memory of CUDA
// alone, and only where a program shares it with other processes.
void mark(const py::object& result) {
  auto* storage = storage_of(result.ptr());
  if (storage == nullptr || side_of(storage)) {
    called_with(given.mark, result.ptr(), given.device_side);
  } else {
    storage->set_received_cuda(true);
  }
}

bool is_marked(c10::StorageImpl* storage) { return storage->device_type() == c10::kCPU && storage->received_cuda(); }

// `moves.stays`
bool stays(const Known& known, PyObject* tensor) {
  if (known.are_several || torch::profiler::impl::profilerEnabled()) return false;
  auto* storage = storage_of(tensor);
  if (storage == nullptr) return false;
  const auto side = side_of(storage);
  return side ? side.ptr() == given.device_side : is_marked(storage);
}

// `_Naming.__call__`
py::object call_factory(PyObject* self, PyObject* args, PyObject* kwargs) {
  Call call;
  if (!call.has_mode()) return called(attribute(self, names.original).ptr(), args, kwargs);
  const auto asked = py::reinterpret_borrow<py::object>(kwargs == nullptr ? nullptr : item(kwargs, names.device));
  const bool names_device = asked && !asked.is_none();
  // A tensor that a factory with a device is given may be its result.
  const bool makes = !names_device || PyTuple_GET_SIZE(args) == 0 ||
      is_in(given.sizes, (PyObject*)Py_TYPE(PyTuple_GET_ITEM(args, 0)));
  const bool is_usual = kwargs == nullptr || (names_device && PyDict_GET_SIZE(kwargs) == 1) ||
      (item(kwargs, names.pin_memory) == nullptr && item(kwargs, names.generator) == nullptr);
  PyObject* original = nullptr;
  py::object answer;
  if (makes && is_usual && call.is_plain()) {
    if (names_device) answer = call.found(asked.ptr());
    if (names_device ? bool(answer) : call.known->redirects_only) original = call.original_of(self, given.factories);
  }
  if (original == nullptr) return owned(factory_in_python(self, args, kwargs));
  if (!names_device) {
    return call.made(original, args, kwargs, [&] {
      auto result = called(original, args, kwargs);
      if (!call.known->shares_host_memory) return result;
      const auto options = kwargs == nullptr ? owned(PyDict_New()) : py::reinterpret_borrow<py::object>(kwargs);
      return called_with(given.created_by_default, original, args, options.ptr(), result.ptr());
    });
  }
  return call.made(original, args, kwargs, [&] {
    // Python has made the dictionary for this call, unless another holds it too.
    const bool is_own = Py_REFCNT(kwargs) == 1;
    const auto options = is_own ? py::reinterpret_borrow<py::object>(kwargs) : owned(PyDict_Copy(kwargs));
    must(options && PyDict_SetItem(options.ptr(), names.device, PyTuple_GET_ITEM(answer.ptr(), 0)) == 0);
    auto result = owned(PyObject_Call(original, args, options.ptr()));
    // For the mode, where it makes the call again, and for what made the dictionary. Neither changes an error.
    if (is_own) PyDict_SetItem(kwargs, names.device, asked.ptr());
    must(bool(result));
    call.count(answer);
    if (call.known->shares_host_memory) mark(result);
    return result;
  });
}

// `_Move.__call__`
py::object call_move(PyObject* self, PyObject* args, PyObject* kwargs) {
  Call call;
  if (!call.has_mode()) return called(attribute(self, names.original).ptr(), args, kwargs);
  const auto count = PyTuple_GET_SIZE(args);
  py::object answer;
  PyObject *original = nullptr, *tensor = count == 0 ? nullptr : PyTuple_GET_ITEM(args, 0);
  if (kwargs == nullptr && tensor != nullptr && THPVariable_CheckExact(tensor) && call.is_plain()) {
    original = call.original_of(self, given.moves);
  }
  if (original != nullptr && count == (original == given.to ? 2 : 1)) {
    // A method of an accelerator names its current device, for which `_Move` keeps the method as a key.
    answer = count == 2 ? call.found(PyTuple_GET_ITEM(args, 1)) : call.kept_for(original);
  }
  if (!answer) return called(attribute(self, names.method).ptr(), args, kwargs);  // a frame less than `__call__`
  const bool shares = call.known->shares_host_memory;
  if (shares && stays(*call.known, tensor)) {
    call.count(answer);
    return py::reinterpret_borrow<py::object>(tensor);
  }
  return call.made(original, args, kwargs, [&] {
    auto result = called_with(given.to, tensor, PyTuple_GET_ITEM(answer.ptr(), 0));
    call.count(answer);
    if (!shares) return result;
    const auto context = attribute(call.mode.ptr(), names.context);
    return called_with(given.moved, context.ptr(), tensor, result.ptr(), given.device_side);
  });
}

// `_new_device`
py::object call_device(PyTypeObject* cls, PyObject* args, PyObject* kwargs) {
  if (kwargs == nullptr && PyTuple_GET_SIZE(args) == 1 && PyUnicode_CheckExact(PyTuple_GET_ITEM(args, 0))) {
    Call call;
    const auto answer = call.has_mode() && call.is_plain() ? call.kept_for(args) : py::object();
    if (answer) {
      call.count(answer);
      return answer[py::int_(0)];
    }
  }
  return owned(device_in_python(cls, args, kwargs));
}

template <py::object (*call)(PyObject*, PyObject*, PyObject*)>
PyObject* slot(PyObject* self, PyObject* args, PyObject* kwargs) {
  return guarded([&] { return call(self, args, kwargs); });
}

PyObject* new_device(PyTypeObject* cls, PyObject* args, PyObject* kwargs) {
  return guarded([&] { return call_device(cls, args, kwargs); });
}

void prepare(const py::module_& m) {
  const auto module = [](const char* name) { return py::module_::import(name); };
  const auto moves = module("torchdevice.calls.moves"), wrap = module("torchdevice.calls.wrap");
  const auto kept = [](const py::object& object) { return py::object(object).release().ptr(); };
  const auto type = [&](const py::object& object) { return reinterpret_cast<PyTypeObject*>(kept(object)); };
  const auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  names = {name("mode"), name("context"), name("native"), name("original"), name("_method"), name("device"),
           name("pin_memory"), name("generator"), name("_torchdevice_side"), name("count")};
  given = {
      kept(wrap.attr("_state")), kept(wrap.attr("_ask")), kept(wrap.attr("is_final")), kept(moves.attr("moved")),
      kept(moves.attr("mark")), kept(moves.attr("created_by_default")), kept(wrap.attr("_TO")), kept(wrap.attr("_DEVICE")), kept(wrap.attr("_EXACT")),
      kept(wrap.attr("OF_TORCH")), kept(wrap.attr("_SIZES")), kept(wrap.attr("rewriters").attr("NAMING")),
      kept(wrap.attr("_MOVES")), type(wrap.attr("_Naming")), type(wrap.attr("_Move")),
      type(module("torch").attr("device"))};
  moves.attr("marks_in_cpp") = m.attr("is_marked");
}

// Put the functions above into the classes of the entry points and into that of devices, or take them out again.
void place(bool in) {
  if (in == are_in_place) return;
  are_in_place = in;
  if (in) {
    factory_in_python = given.factory->tp_call;
    move_in_python = given.move->tp_call;
    device_in_python = given.device->tp_new;
    // So that Python calls a method of a tensor without making the bound method first.
    given.move->tp_flags |= Py_TPFLAGS_METHOD_DESCRIPTOR;
  } else {
    given.move->tp_flags &= ~Py_TPFLAGS_METHOD_DESCRIPTOR;
  }
  given.factory->tp_call = in ? &slot<call_factory> : factory_in_python;
  given.move->tp_call = in ? &slot<call_move> : move_in_python;
  if (in || given.device->tp_new == &new_device) given.device->tp_new = in ? &new_device : device_in_python;
  for (auto* each : {given.factory, given.move, given.device}) PyType_Modified(each);
}

void define(py::module_& m) {
  m.def("place_calls", [m](bool in) {
    if (given.state == nullptr) prepare(m);
    place(in);
  });
  m.def("is_marked", [](py::handle storage) {
    return is_marked(THPStorage_Unpack(storage.ptr()).unsafeGetStorageImpl());
  });
  // What C++ keeps of a thread ends with the interpreter.
  py::module_::import("atexit").attr("register")(m.attr("place_calls"), false);
  pthread_atfork(nullptr, nullptr, [] { ++forks; });
}

}  // namespace entry_points
