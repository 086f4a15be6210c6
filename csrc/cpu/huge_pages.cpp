// Huge pages for tensors that Python allocates.
#include <torch/csrc/stable/library.h>

#include "memory.h"
#include "output.h"

namespace parallel_ops::cpu {
namespace {

// For a fresh contiguous tensor: a hint to the kernel, which changes no values.
void advise_huge_pages_(const torch::stable::Tensor& t) {
  advise_huge_pages(writable<char>("advise_huge_pages_", "t", t), t.numel() * static_cast<int64_t>(t.element_size()));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) { m.impl("advise_huge_pages_", TORCH_BOX(&advise_huge_pages_)); }

}  // namespace parallel_ops::cpu
