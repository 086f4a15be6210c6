#include "launch_plan.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include <torch/headeronly/util/Exception.h>

#include "device.h"

namespace parallel_ops::cuda {

struct Recording {
  std::shared_ptr<const Plan> plan;
};

constexpr int64_t kAbsent = -1;

// What a call is about: the key, and the address of each tensor among its arguments.
struct Call {
  Words key;
  std::vector<void*> addresses;
  int32_t device_type = 0, device_index = 0;
  bool has_tensor = false;

  void add(AtenTensorHandle tensor) {
    int64_t dim = 0;
    int32_t dtype = 0, type = 0, index = 0;
    int64_t *sizes = nullptr, *strides = nullptr;
    void* data = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &index));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
    // One tensor passed twice is another call than two tensors: Python cannot tell which of the two a kernel got.
    const auto same = std::find(addresses.begin(), addresses.end(), data);
    const int64_t twin = data == nullptr || same == addresses.end() ? kAbsent : same - addresses.begin();
    const int64_t aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    key.insert(key.end(), {dim, dtype, type, index, aligned, twin});
    key.insert(key.end(), sizes, sizes + dim);
    key.insert(key.end(), strides, strides + dim);
    addresses.push_back(data);
    if (!has_tensor) device_type = type, device_index = index;
    has_tensor = true;
  }

  void add_absent() {
    key.push_back(kAbsent);
    addresses.push_back(nullptr);
  }

  void read(const char* kinds, const StableIValue* stack) {
    key.clear();
    addresses.clear();
    has_tensor = false;
    for (size_t i = 0; kinds[i] != '\0'; ++i) {
      const bool optional = kinds[i] == 'o' || kinds[i] == 'i';
      // A present optional value lies behind a pointer.
      const StableIValue* value = optional ? reinterpret_cast<const StableIValue*>(stack[i]) : stack + i;
      if (value == nullptr) {
        add_absent();
      } else if (kinds[i] == 't' || kinds[i] == 'o') {
        add(reinterpret_cast<AtenTensorHandle>(*value));
      } else {
        key.insert(key.end(), {1, static_cast<int64_t>(*value)});
        addresses.push_back(nullptr);
      }
    }
  }
};

namespace {

using torch::stable::detail::to;

// More keys than any training run has; a run with ever new shapes starts over instead of growing without end.
constexpr size_t kMaxPlans = 4096;

struct Reader {
  const Words& words;
  size_t at = 0;

  int64_t word() {
    STD_TORCH_CHECK(at < words.size(), "keep_launch_plan: the plan ends early");
    return words[at++];
  }
  Words list() {
    Words out(static_cast<size_t>(word()));
    for (int64_t& w : out) w = word();
    return out;
  }
};

// The arguments on the stack, which a kernel has to take off it.
struct Owned {
  const char* kinds;
  StableIValue* stack;

  ~Owned() {
    for (size_t i = 0; kinds[i] != '\0'; ++i) {
      if (kinds[i] == 't') to<torch::stable::Tensor>(stack[i]);
      if (kinds[i] == 'o') to<std::optional<torch::stable::Tensor>>(stack[i]);
      if (kinds[i] == 'i') to<std::optional<int64_t>>(stack[i]);
    }
  }
};

struct Allocated {
  std::vector<AtenTensorHandle> tensors;

  ~Allocated() { free(); }

  void free() {
    for (AtenTensorHandle tensor : tensors)
      if (tensor != nullptr) aoti_torch_delete_tensor_object(tensor);
    tensors.clear();
  }

  // Adds the addresses to those of the arguments. False, with nothing kept, where memory is short.
  bool add(const std::vector<Allocation>& wanted, Call& call) {
    for (const Allocation& each : wanted) {
      AtenTensorHandle tensor = nullptr;
      if (aoti_torch_empty_strided(each.sizes.size(), each.sizes.data(), each.strides.data(), each.dtype,
                                   call.device_type, call.device_index, &tensor) != TORCH_SUCCESS) {
        free();
        return false;
      }
      tensors.push_back(tensor);
      void* data = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
      call.addresses.push_back(data);
    }
    return true;
  }
};

void launch(const char* op, const Launch& what, const std::vector<void*>& addresses, Stream stream) {
  thread_local std::vector<uint64_t> values;
  thread_local std::vector<void*> pointers;
  values.clear();
  for (const Argument& argument : what.arguments)
    values.push_back(argument.tensor == Argument::kConstant ? argument.constant
                                                            : reinterpret_cast<uint64_t>(addresses[argument.tensor]));
  pointers.clear();
  for (uint64_t& value : values) pointers.push_back(&value);  // the kernel knows how many of the bytes it wants
  const Driver& driver = Driver::get();
  const Result result = driver.launch_kernel(what.function, what.grid[0], what.grid[1], what.grid[2], what.threads, 1,
                                             1, what.shared_bytes, stream, pointers.data(), nullptr);
  STD_TORCH_CHECK(result == kSuccess, op, ": launching a kernel failed: ", driver.describe(result));
}

// What Python reports of the call that it runs: a plan, if one is wanted, or what went wrong.
thread_local Recording* current = nullptr;
thread_local std::string failure;

bool launch_plan_wanted() { return current != nullptr; }

void keep_launch_plan(std::vector<int64_t> words) {
  STD_TORCH_CHECK(current != nullptr, "keep_launch_plan: no plan is wanted");
  current->plan = std::make_shared<const Plan>(words);
}

void report_launch_failure(std::string reason) { failure = std::move(reason); }

}  // namespace

Plan::Plan(const Words& words) {
  Reader reader{words};
  for (int64_t n = reader.word(); n > 0; --n) {
    const auto dtype = static_cast<int32_t>(reader.word());
    Words sizes = reader.list(), strides = reader.list();
    allocations.push_back({dtype, std::move(sizes), std::move(strides)});
  }
  outputs = reader.list();
  for (int64_t n = reader.word(); n > 0; --n) {
    Launch launch;
    launch.function = reinterpret_cast<void*>(reader.word());
    for (unsigned& size : launch.grid) size = static_cast<unsigned>(reader.word());
    launch.threads = static_cast<unsigned>(reader.word());
    launch.shared_bytes = static_cast<unsigned>(reader.word());
    for (int64_t arguments = reader.word(); arguments > 0; --arguments) {
      const int64_t tensor = reader.word();
      launch.arguments.push_back({tensor, static_cast<uint64_t>(reader.word())});
    }
    launches.push_back(std::move(launch));
  }
}

size_t PlanTable::Hash::operator()(const Words& key) const {
  uint64_t hash = key.size();
  for (int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u + (hash >> 29);
  return hash;
}

void PlanTable::call(StableIValue* stack, uint64_t num_outputs) {
  thread_local Call call;
  if (!Device::get().usable()) return call_python(stack);
  call.read(kinds_, stack);
  const std::optional<Found> plan = find(call.key);
  if (!plan) return seen_before(call.key) ? record(stack, call.key) : call_python(stack);
  // Where the call cannot be replayed, or memory is short, Python makes it; its error then has the right type.
  if (*plan == nullptr || !replay(**plan, call, stack, num_outputs)) call_python(stack);
}

std::optional<PlanTable::Found> PlanTable::find(const Words& key) {
  std::shared_lock lock(mutex_);
  const auto found = plans_.find(key);
  return found == plans_.end() ? std::nullopt : std::optional(found->second);
}

bool PlanTable::seen_before(const Words& key) {
  std::unique_lock lock(mutex_);
  if (seen_.size() >= kMaxPlans) seen_.clear();
  return !seen_.insert(key).second;
}

bool PlanTable::replay(const Plan& plan, Call& call, StableIValue* stack, uint64_t num_outputs) const {
  const Device::Guard guard(call.device_index);
  Allocated allocated;
  if (!allocated.add(plan.allocations, call)) return false;
  {
    const Owned arguments{kinds_, stack};
    const Stream stream = guard.stream();
    for (const Launch& each : plan.launches) launch(op_, each, call.addresses, stream);
  }
  for (uint64_t i = 0; i < num_outputs; ++i)
    stack[i] = torch::stable::detail::from(std::exchange(allocated.tensors[plan.outputs[i]], nullptr));
  return true;
}

void PlanTable::record(StableIValue* stack, const Words& key) {
  const Words kept = key;  // the call in Python may come back here for another op
  Recording recording;
  call_python(stack, &recording);
  std::unique_lock lock(mutex_);
  if (plans_.size() >= kMaxPlans) plans_.clear();
  plans_[kept] = recording.plan;
  seen_.erase(kept);
}

void PlanTable::call_python(StableIValue* stack, Recording* recording) const {
  failure.clear();
  Recording* outer = std::exchange(current, recording);
  const AOTITorchError error = torch_call_dispatcher(python_op_, "", stack, TORCH_ABI_VERSION);
  current = outer;
  // The error itself does not come through this interface; where the op was called through Python's `planned`, that
  // raises it again (parallel_ops/ops/_launch_plan.py).
  STD_TORCH_CHECK(error == TORCH_SUCCESS, op_, ": the call failed in Python: ", failure);
}

// op, the letters of PlanTable for its arguments
#define PARALLEL_OPS_FOR_EACH_PLANNED_OP(X) \
  X(bias_gelu, "tov")                       \
  X(bias_gelu_backward, "ttov")             \
  X(bias_swiglu, "to")                      \
  X(bias_swiglu_backward, "tto")            \
  X(bias_dropout_add, "totvov")             \
  X(bias_dropout_add_backward, "tvvov")     \
  X(scaled_masked_softmax, "tov")           \
  X(scaled_masked_softmax_backward, "ttv")  \
  X(scaled_causal_softmax, "tvi")           \
  X(scaled_causal_softmax_backward, "ttvi") \
  X(cross_entropy_statistics, "ttvvvvv")    \
  X(cross_entropy_combine, "ttvv")          \
  X(cross_entropy_backward, "ttttvvv")      \
  X(cross_entropy_backward_, "ttttvvv")     \
  X(layer_norm, "ttoovv")                   \
  X(layer_norm_backward, "tottttvv")        \
  X(rms_norm, "ttovv")                      \
  X(rms_norm_backward, "totttv")            \
  X(rotary_embedding, "tttov")              \
  X(rotary_embedding_backward, "tttov")

#define PARALLEL_OPS_KERNEL(op, kinds)                               \
  void op(StableIValue* stack, uint64_t, uint64_t num_outputs) {     \
    static PlanTable table(#op, "parallel_ops::python_" #op, kinds); \
    table.call(stack, num_outputs);                                  \
  }

namespace {
PARALLEL_OPS_FOR_EACH_PLANNED_OP(PARALLEL_OPS_KERNEL)
}  // namespace

}  // namespace parallel_ops::cuda

// A test builds this file for CPU tensors.
#ifndef PARALLEL_OPS_PLANNED_KEY
#define PARALLEL_OPS_PLANNED_KEY CUDA
#endif
#define PARALLEL_OPS_IMPL(op, kinds) m.impl(#op, &parallel_ops::cuda::op);

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, PARALLEL_OPS_PLANNED_KEY,
                          m){PARALLEL_OPS_FOR_EACH_PLANNED_OP(PARALLEL_OPS_IMPL)}

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CompositeExplicitAutograd, m) {
  m.impl("launch_plan_wanted", TORCH_BOX(&parallel_ops::cuda::launch_plan_wanted));
  m.impl("keep_launch_plan", TORCH_BOX(&parallel_ops::cuda::keep_launch_plan));
  m.impl("report_launch_failure", TORCH_BOX(&parallel_ops::cuda::report_launch_failure));
}
