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
      .def_property_readonly("version", &nccl::Library::version)
      .def("unique_id", [](const nccl::Library& self) {
        nccl::UniqueId id;
        {
          py::gil_scoped_release no_gil;
          id = self.unique_id();
        }
        return py::bytes(id.bytes, sizeof(id.bytes));
      });
}

// One call after the other, six numbers each: many small objects would take longer to make than to enqueue.
std::vector<nccl::Call> calls_from(const std::vector<uint64_t>& numbers) {
  std::vector<nccl::Call> calls;
  calls.reserve(numbers.size() / 6);
  for (size_t i = 0; i + 6 <= numbers.size(); i += 6) {
    const uint64_t* n = &numbers[i];
    calls.push_back({static_cast<nccl::Kind>(n[0]), pointer<const void>(n[1]), pointer<void>(n[2]), n[3],
                     static_cast<nccl::DataType>(n[4]), static_cast<int>(n[5])});
  }
  return calls;
}

void define_communicator(py::module_& m) {
  py::class_<nccl::Event, std::shared_ptr<nccl::Event>>(m, "Event").def("done", &nccl::Event::done, NoGil());

  // A forked child leaves what is its parent's alone.
  struct Leave {
    void operator()(nccl::Communicator* communicator) const {
      if (communicator->is_own()) delete communicator;
    }
  };
  py::class_<nccl::Communicator, std::unique_ptr<nccl::Communicator, Leave>>(m, "Communicator",
                                                                             py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](std::shared_ptr<nccl::Library> library, const py::bytes& unique_id, int size, int rank,
                       int device, int max_ctas, double timeout, double grace) {
             const nccl::Settings settings{unique_id_from(unique_id), size, rank, device, max_ctas, timeout, grace};
             py::gil_scoped_release no_gil;
             auto made = nccl::Communicator::create(std::move(library), settings);
             return std::unique_ptr<nccl::Communicator, Leave>(made.release());
           }),
           py::arg("library"), py::arg("unique_id"), py::arg("size"), py::arg("rank"), py::arg("device"),
           py::arg("max_ctas"), py::arg("timeout"), py::arg("grace") = 10.0)
      .def_property_readonly("alive", &nccl::Communicator::alive)
      .def(
          "launch",
          [](nccl::Communicator& self, const std::string& op, const std::vector<uint64_t>& calls, uintptr_t stream) {
            return self.launch(op, calls_from(calls), pointer<nccl::CudaStream>(stream));
          },
          py::arg("op"), py::arg("calls"), py::arg("stream"), NoGil())
      .def(
          "join",
          [](nccl::Communicator& self, const std::string& op, const nccl::Event& event, uintptr_t stream) {
            self.join(op, event, pointer<nccl::CudaStream>(stream));
          },
          py::arg("op"), py::arg("event"), py::arg("stream"), NoGil())
      .def("abort", &nccl::Communicator::abort, py::arg("reason"), NoGil());
  m.def("is_capturing", [](uintptr_t stream) { return nccl::is_capturing(pointer<nccl::CudaStream>(stream)); });
}

}  // namespace

PYBIND11_MODULE(_nccl, m) {
  define_errors(m);
  define_library(m);
  define_communicator(m);
}
