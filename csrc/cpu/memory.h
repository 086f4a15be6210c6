// Where tensors become pointers.
#pragma once

#include <cstdint>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include "../error.h"

namespace parallel_ops::cpu {

// Raises unless the storage holds every element of the tensor. FSDP2 frees a gathered parameter by giving its storage a
// size of zero bytes; a tensor that autograd has saved of it keeps its shape and has a null pointer, or, where it
// starts past the first element, one into the first page.
inline void check_memory(const char* op, const char* name, const torch::stable::Tensor& t) {
  int64_t held = 0, last = t.storage_offset();
  PARALLEL_OPS_CHECK(aoti_torch_get_storage_size(t.get(), &held) == TORCH_SUCCESS, op, ": ", name,
                     " has no storage to read");
  const auto sizes = t.sizes(), strides = t.strides();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return;
    last += (sizes[d] - 1) * strides[d];
  }
  const int64_t needed = (last + 1) * static_cast<int64_t>(t.element_size());
  PARALLEL_OPS_CHECK(needed <= held, op, ": ", name, " needs ", needed, " bytes, but its storage has ", held,
                     ": its memory was freed, as FSDP2 frees parameters when it reshards them");
}

// The memory of an argument that an op reads, or reads and writes.
template <class T>
const T* readable(const char* op, const char* name, const torch::stable::Tensor& t) {
  check_memory(op, name, t);
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* writable(const char* op, const char* name, const torch::stable::Tensor& t) {
  check_memory(op, name, t);
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace parallel_ops::cpu
