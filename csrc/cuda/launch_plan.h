// What one call of an op launches on a CUDA device, kept so that the next call like it can be replayed without Python.
//
// The kernels are Triton's: Python compiles and launches them (triton_kernels), which costs the host about 20 us each,
// more than most unfused PyTorch ops. What it did for a call depends only on the shapes, strides, dtypes, device and
// 16-byte alignment of the tensors and on the other arguments. That is the key; the plan behind it says which tensors
// to allocate, which of them to return, and what to launch with which arguments, where only pointers differ from call
// to call. A call with a new key runs in Python twice; the second time Python hands the plan
// over (parallel_ops/ops/_launch_plan.py).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <torch/csrc/stable/library.h>

namespace parallel_ops::cuda {

using Words = std::vector<int64_t>;

struct Allocation {
  int32_t dtype;
  Words sizes, strides;
};

// A kernel argument: a constant, or the address of one of the call's tensors (arguments first, then allocations).
struct Argument {
  static constexpr int64_t kConstant = -1;
  int64_t tensor;     // its position, or kConstant
  uint64_t constant;  // its bits
};

struct Launch {
  void* function;
  unsigned grid[3], threads, shared_bytes;
  std::vector<Argument> arguments;
};

struct Plan {
  std::vector<Allocation> allocations;
  Words outputs;  // positions in `allocations`
  std::vector<Launch> launches;

  // `words` as Python writes them; each list is preceded by its length.
  explicit Plan(const Words& words);
};

struct Call;
struct Recording;

// The plans of one op. A key is taken down when it comes the second time: a call that is never made again, such as one
// of a batch of ever other length, costs what it would without plans.
class PlanTable {
 public:
  // `kinds` has a letter for each argument of the op: t Tensor, o Tensor?, v int, float or bool, i int?.
  PlanTable(const char* op, const char* python_op, const char* kinds) : op_(op), python_op_(python_op), kinds_(kinds) {}

  // A kernel in the calling convention of torch's stable ABI: arguments on the stack, outputs in their place.
  void call(StableIValue* stack, uint64_t num_outputs);

 private:
  struct Hash {
    size_t operator()(const Words& key) const;
  };
  using Found = std::shared_ptr<const Plan>;  // empty: this call cannot be replayed

  std::optional<Found> find(const Words& key);
  bool seen_before(const Words& key);
  void record(StableIValue* stack, const Words& key);
  void call_python(StableIValue* stack, Recording* recording = nullptr) const;
  bool replay(const Plan& plan, Call& call, StableIValue* stack, uint64_t num_outputs) const;

  const char *op_, *python_op_, *kinds_;
  std::shared_mutex mutex_;
  std::unordered_map<Words, Found, Hash> plans_;
  std::unordered_set<Words, Hash> seen_;
};

}  // namespace parallel_ops::cuda
