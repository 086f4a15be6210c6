// parallel_ops._nccl: the binding as Python sees it. Pointers and streams are integers; torch is not needed.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "communicator.h"

namespace py = pybind11;
namespace nccl = parallel_ops::nccl;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

nccl::UniqueId unique_id_from(const py::bytes& bytes) {
  const std::string_view view = bytes;
  nccl::UniqueId id;
  if (view.size() != sizeof(id.bytes)) {
    throw py::value_error("unique_id must have " + std::to_string(sizeof(id.bytes)) + " bytes, got " +
                          std::to_string(view.size()));
  }
  std::memcpy(id.bytes, view.data(), sizeof(id.bytes));
  return id;
}

// Lets Ctrl-C through while a call waits for other ranks.
void raise_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void define_errors(py::module_& m) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> error;
  error.call_once_and_store_result([&] { return py::exception<nccl::NcclError>(m, "NcclError", PyExc_RuntimeError); });
  py::register_exception<nccl::NotSupported>(m, "NotSupported", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const nccl::NcclError& e) {
      const py::object& type = error.get_stored();
      py::object value = type(e.what());
      value.attr("code") = static_cast<int>(e.code);
      PyErr_SetObject(type.ptr(), value.ptr());
    }
  });
}

void define_library(py::module_& m) {
  py::class_<nccl::Library, std::shared_ptr<nccl::Library>>(m, "Library")
      .def_static(
          "open",
          [](const std::string& path) { return std::const_pointer_cast<nccl::Library>(nccl::Library::open(path)); },
          py::arg("path"))
      .def_static("loaded", [] { return std::const_pointer_cast<nccl::Library>(nccl::Library::loaded()); })
      .def_property_readonly("path", &nccl::Library::path)
      .def_property_readonly("version_code", &nccl::Library::version_code)
      .def_property_readonly("version",
                             [](const nccl::Library& self) { return nccl::version_string(self.version_code()); })
      .def("unique_id",
           [](const nccl::Library& self) {
             nccl::UniqueId id;
             {
               py::gil_scoped_release no_gil;
               id = self.unique_id();
             }
             return py::bytes(id.bytes, sizeof(id.bytes));
           })
      .def("describe",
           [](const nccl::Library& self, int code) { return self.describe(static_cast<nccl::Result>(code)); });
}

// Kinds go by name: pybind11's enumerations would take a fifth of the compile time.
void define_calls(py::module_& m) {
  py::class_<nccl::Call>(m, "Call").def(py::init([](const std::string& kind, uintptr_t input, uintptr_t output,
                                                    size_t count, int type, int op, int peer) {
                                          return nccl::Call{nccl::kind_of(kind),
                                                            pointer<const void>(input),
                                                            pointer<void>(output),
                                                            count,
                                                            static_cast<nccl::DataType>(type),
                                                            static_cast<nccl::RedOp>(op),
                                                            peer};
                                        }),
                                        py::arg("kind"), py::kw_only(), py::arg("input") = 0, py::arg("output") = 0,
                                        py::arg("count"), py::arg("type"), py::arg("op") = 0, py::arg("peer") = 0);
}

void define_communicator(py::module_& m) {
  py::class_<nccl::Config>(m, "Config")
      .def(py::init<>())
      .def("set", py::overload_cast<const std::string&, int>(&nccl::Config::set))
      .def("set", py::overload_cast<const std::string&, const std::string&>(&nccl::Config::set))
      .def("check", [](const nccl::Config& self, const nccl::Library& library) { self.raw(library); });

  py::class_<nccl::Communicator>(m, "Communicator", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](std::shared_ptr<nccl::Library> library, const py::bytes& unique_id, int size, int rank,
                       const nccl::Config& config, double timeout) {
             const nccl::Communicator::Membership membership{unique_id_from(unique_id), size, rank};
             py::gil_scoped_release no_gil;
             return nccl::Communicator::create(std::move(library), membership, config, timeout, raise_signals);
           }),
           py::arg("library"), py::arg("unique_id"), py::arg("size"), py::arg("rank"), py::arg("config"),
           py::arg("timeout"))
      .def_property_readonly("rank", &nccl::Communicator::rank)
      .def_property_readonly("size", &nccl::Communicator::size)
      .def("alive", &nccl::Communicator::alive, NoGil())
      .def("device", &nccl::Communicator::device, NoGil())
      .def(
          "launch",
          [](nccl::Communicator& self, const std::string& op, const std::vector<nccl::Call>& calls, uintptr_t stream,
             double timeout) { self.launch(op, calls, pointer<nccl::CudaStream>(stream), timeout); },
          py::arg("op"), py::arg("calls"), py::arg("stream"), py::arg("timeout"), NoGil())
      .def("check", &nccl::Communicator::check, py::arg("op"), NoGil())
      .def("finalize", &nccl::Communicator::finalize, py::arg("timeout"), NoGil())
      .def("abort", &nccl::Communicator::abort, py::arg("reason"), NoGil());
}

}  // namespace

PYBIND11_MODULE(_nccl, m) {
  define_errors(m);
  define_library(m);
  define_calls(m);
  define_communicator(m);
}
