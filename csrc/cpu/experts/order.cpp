// sort_by_expert on the CPU: a stable counting sort of the slots (token, choice) by the expert that they chose.
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../output.h"
#include "../rows.h"

namespace parallel_ops::cpu {
namespace {

constexpr int32_t kNone = -1;
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

struct Options {
  int64_t experts;
  std::optional<int64_t> capacity;  // rows of every expert
  int64_t multiple;                 // else an expert's rows are padded to a multiple of it
};

// Rows of the order. Without a capacity, the most that any choice of experts can need.
int64_t row_count(int64_t slots, const Options& o) {
  if (o.capacity) return o.experts * *o.capacity;
  return (slots + o.experts * (o.multiple - 1)) / o.multiple * o.multiple;
}

// ids: the expert of each slot, -1 for none.
void place(const std::vector<int32_t>& ids, const Options& o, std::vector<int64_t>& next, int32_t* rows,
           int32_t* places, int32_t* ends) {
  std::vector<int64_t> counts(static_cast<size_t>(o.experts));
  for (const int32_t id : ids) {
    if (id >= 0) ++counts[static_cast<size_t>(id)];
  }
  int64_t end = 0;
  for (int64_t e = 0; e < o.experts; ++e) {
    next[static_cast<size_t>(e)] = end;
    end += o.capacity ? *o.capacity : ceil_div(counts[static_cast<size_t>(e)], o.multiple) * o.multiple;
    ends[e] = static_cast<int32_t>(end);
  }
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    const int32_t id = ids[slot];
    places[slot] = kNone;
    if (id < 0) continue;
    int64_t& row = next[static_cast<size_t>(id)];
    if (row == ends[id]) continue;  // over capacity
    rows[row] = static_cast<int32_t>(slot);
    places[slot] = static_cast<int32_t>(row++);
  }
}

template <class I>
std::vector<int32_t> read_ids(const Tensor& experts, int64_t num_experts) {
  const Rows<I> tokens("sort_by_expert", "experts", experts);
  const int64_t choices = experts.size(1);
  std::vector<I> scratch(static_cast<size_t>(choices));
  std::vector<int32_t> ids;
  ids.reserve(static_cast<size_t>(experts.numel()));
  for (int64_t t = 0; t < experts.size(0); ++t) {
    const I* chosen = tokens.tile(t, 0, choices, scratch.data());
    for (int64_t j = 0; j < choices; ++j) {
      PARALLEL_OPS_CHECK(chosen[j] >= -1 && chosen[j] < num_experts, "sort_by_expert: experts holds ", chosen[j],
                         ", which is neither -1 nor one of ", num_experts, " experts");
      ids.push_back(static_cast<int32_t>(chosen[j]));
    }
  }
  return ids;
}

std::tuple<Tensor, Tensor, Tensor> sort_by_expert(const Tensor& experts, int64_t num_experts,
                                                  std::optional<int64_t> capacity, int64_t multiple) {
  const char* op = "sort_by_expert";
  const bool wide = experts.scalar_type() == ScalarType::Long;
  PARALLEL_OPS_CHECK(experts.is_cpu() && experts.dim() == 2 && (wide || experts.scalar_type() == ScalarType::Int), op,
                     ": experts must be [t, k], int64 or int32");
  PARALLEL_OPS_CHECK(experts.size(1) > 0 && num_experts > 0 && num_experts <= kMost, op,
                     ": there must be at least one choice a token, and one expert");
  PARALLEL_OPS_CHECK(multiple > 0 && multiple <= kMost &&
                         (!capacity || (*capacity >= 0 && *capacity <= kMost && *capacity % multiple == 0)),
                     op, ": multiple must be at least 1, and capacity a multiple of it");
  const Options options{num_experts, capacity, multiple};
  const int64_t count = row_count(experts.numel(), options);
  PARALLEL_OPS_CHECK(count <= kMost && experts.numel() <= kMost, op, ": more than ", kMost, " rows");
  Tensor rows = empty_tensor({count}, ScalarType::Int);
  Tensor places = empty_tensor({experts.size(0), experts.size(1)}, ScalarType::Int);
  Tensor ends = empty_tensor({num_experts}, ScalarType::Int);
  const std::vector<int32_t> ids =
      wide ? read_ids<int64_t>(experts, num_experts) : read_ids<int32_t>(experts, num_experts);
  std::vector<int64_t> next(static_cast<size_t>(num_experts));
  int32_t* to_rows = static_cast<int32_t*>(rows.mutable_data_ptr());
  std::fill_n(to_rows, count, kNone);
  place(ids, options, next, to_rows, static_cast<int32_t*>(places.mutable_data_ptr()),
        static_cast<int32_t*>(ends.mutable_data_ptr()));
  return {rows, places, ends};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) { m.impl("sort_by_expert", TORCH_BOX(&sort_by_expert)); }

}  // namespace parallel_ops::cpu
