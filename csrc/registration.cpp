// Every op's schema, in one place. Kernels register themselves: csrc/cpu for the CPU, parallel_ops/ops for
// CUDA (Triton), autograd, autocast and shape inference.
#include <Python.h>

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(parallel_ops, m) {
  m.def("bias_gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias, bool tanh) -> (Tensor, Tensor)");
  m.def(
      "bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, float p, Tensor? seed, SymInt index_offset)"
      " -> Tensor");
  m.def(
      "bias_dropout_add_backward(Tensor grad, bool bias, float p, Tensor? seed, SymInt index_offset)"
      " -> (Tensor, Tensor)");
  m.def("bias_swiglu(Tensor x, Tensor? bias) -> Tensor");
  m.def("bias_swiglu_backward(Tensor grad, Tensor x, Tensor? bias) -> (Tensor, Tensor)");
  m.def("scaled_masked_softmax(Tensor scores, Tensor? mask, float scale) -> Tensor");
  m.def("scaled_masked_softmax_backward(Tensor grad, Tensor y, float scale) -> Tensor");
  m.def("scaled_causal_softmax(Tensor scores, float scale, int? window) -> Tensor");
  m.def("scaled_causal_softmax_backward(Tensor grad, Tensor y, float scale, int? window) -> Tensor");
}

// `import parallel_ops._C` loads the library, which runs the registrations above; the module is empty.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
