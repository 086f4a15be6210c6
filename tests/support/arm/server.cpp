// The CPU kernels without torch: calls of ops come in on stdin, results go out on stdout.
//
// The extension sees torch through the C functions of its stable ABI alone. Those that csrc/cpu uses are defined here
// over plain memory, so csrc/cpu links unchanged into a small static program, which qemu runs on any machine.
// tests/support/arm/__init__.py is the other end.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/version.h>

using torch::headeronly::ScalarType;

// Whole cache lines, aligned as torch aligns them; null without elements.
struct Storage {
  explicit Storage(int64_t bytes)
      : bytes(bytes),
        data(bytes == 0 ? nullptr : std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64))) {}
  ~Storage() { std::free(data); }
  int64_t bytes;
  void* data;
};

struct AtenTensorOpaque {
  std::shared_ptr<Storage> storage;
  int32_t dtype, device;  // 0 is the CPU
  std::vector<int64_t> sizes, strides;
  int64_t offset;
};

struct StableListOpaque {
  std::vector<StableIValue> items;
};

namespace {

using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

size_t element_size(int32_t dtype) {
  switch (static_cast<ScalarType>(dtype)) {
    case ScalarType::Bool:
    case ScalarType::Byte:
    case ScalarType::Char:
      return 1;
    case ScalarType::Short:
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Int:
    case ScalarType::Float:
      return 4;
    case ScalarType::Long:
    case ScalarType::Double:
      return 8;
    default:
      throw std::runtime_error("no such dtype here: " + std::to_string(dtype));
  }
}

int64_t numel(const AtenTensorOpaque& t) {
  int64_t n = 1;
  for (int64_t size : t.sizes) n *= size;
  return n;
}

void* first_element(const AtenTensorOpaque& t) {
  if (t.storage->data == nullptr) return nullptr;
  return static_cast<char*>(t.storage->data) + t.offset * static_cast<int64_t>(element_size(t.dtype));
}

template <class T>
T read() {
  T value;
  if (std::fread(&value, sizeof value, 1, stdin) != 1) std::exit(0);
  return value;
}
void read_bytes(void* to, int64_t n) {
  if (n > 0 && std::fread(to, static_cast<size_t>(n), 1, stdin) != 1) std::exit(0);
}
std::vector<int64_t> read_integers() {
  std::vector<int64_t> values(static_cast<size_t>(read<int64_t>()));
  read_bytes(values.data(), static_cast<int64_t>(values.size()) * 8);
  return values;
}
std::string read_text() {
  std::string value(static_cast<size_t>(read<int64_t>()), ' ');
  read_bytes(value.data(), static_cast<int64_t>(value.size()));
  return value;
}

template <class T>
void write(T value) {
  std::fwrite(&value, sizeof value, 1, stdout);
}
void write_bytes(const void* from, int64_t n) {
  write(n);
  std::fwrite(from, 1, static_cast<size_t>(n), stdout);
}

using Storages = std::vector<std::shared_ptr<Storage>>;

StableIValue read_argument(const Storages& storages) {
  const char kind = read<char>();
  if (kind == '?') {  // an optional that has a value
    auto* value = new StableIValue;
    *value = read_argument(storages);
    return reinterpret_cast<StableIValue>(value);
  }
  if (kind == 'l') {
    auto* list = new StableListOpaque;
    for (int64_t item : read_integers()) list->items.push_back(static_cast<StableIValue>(item));
    return reinterpret_cast<StableIValue>(list);
  }
  if (kind == 't') {
    const auto storage = static_cast<size_t>(read<int64_t>());
    const auto dtype = static_cast<int32_t>(read<int64_t>()), device = static_cast<int32_t>(read<int64_t>());
    auto sizes = read_integers(), strides = read_integers();
    return reinterpret_cast<StableIValue>(new AtenTensorOpaque{storages.at(storage), dtype, device, std::move(sizes),
                                                               std::move(strides), read<int64_t>()});
  }
  return read<StableIValue>();  // a number, or 0 for none
}

void write_tensor(const AtenTensorOpaque& t) {
  write<int64_t>(t.dtype);
  write_bytes(t.sizes.data(), static_cast<int64_t>(t.sizes.size()) * 8);
  write_bytes(t.strides.data(), static_cast<int64_t>(t.strides.size()) * 8);
  write(t.offset);
  write_bytes(t.storage->data, t.storage->bytes);
}

// One call: the memory of its tensors, the op, whether it writes to them, how many results it has, its arguments. The
// answer has the memory again, if it was written to, and the results; or an error.
void serve() {
  Storages storages(static_cast<size_t>(read<int64_t>()));
  for (auto& storage : storages) {
    storage = std::make_shared<Storage>(read<int64_t>());
    read_bytes(storage->data, storage->bytes);
  }
  const std::string name = read_text();
  const int64_t writes = read<int64_t>(), results = read<int64_t>(), arguments = read<int64_t>();
  std::vector<StableIValue> stack;
  for (int64_t i = 0; i < arguments; ++i) stack.push_back(read_argument(storages));
  stack.resize(static_cast<size_t>(std::max(arguments, results)));
  std::string error;
  try {
    kernels().at(name)(stack.data(), static_cast<uint64_t>(arguments), static_cast<uint64_t>(results));
  } catch (const std::exception& raised) {
    error = raised.what();
  }
  write_bytes(error.data(), static_cast<int64_t>(error.size()));
  if (error.empty()) {
    for (const auto& storage : storages) {
      if (writes != 0) write_bytes(storage->data, storage->bytes);
    }
    for (int64_t i = 0; i < results; ++i) {
      const std::unique_ptr<AtenTensorOpaque> t(reinterpret_cast<AtenTensorHandle>(stack[static_cast<size_t>(i)]));
      write_tensor(*t);
    }
  }
  std::fflush(stdout);
}

}  // namespace

extern "C" {

uint64_t aoti_torch_abi_version() { return TORCH_ABI_VERSION; }
int32_t aoti_torch_device_type_cpu() { return 0; }

#define DTYPE(NAME, TYPE) \
  int32_t NAME() { return static_cast<int32_t>(ScalarType::TYPE); }
DTYPE(aoti_torch_dtype_bfloat16, BFloat16)
DTYPE(aoti_torch_dtype_bool, Bool)
DTYPE(aoti_torch_dtype_complex32, ComplexHalf)
DTYPE(aoti_torch_dtype_complex64, ComplexFloat)
DTYPE(aoti_torch_dtype_complex128, ComplexDouble)
DTYPE(aoti_torch_dtype_float16, Half)
DTYPE(aoti_torch_dtype_float32, Float)
DTYPE(aoti_torch_dtype_float64, Double)
DTYPE(aoti_torch_dtype_float8_e4m3fn, Float8_e4m3fn)
DTYPE(aoti_torch_dtype_float8_e4m3fnuz, Float8_e4m3fnuz)
DTYPE(aoti_torch_dtype_float8_e5m2, Float8_e5m2)
DTYPE(aoti_torch_dtype_float8_e5m2fnuz, Float8_e5m2fnuz)
DTYPE(torch_dtype_float8_e8m0fnu, Float8_e8m0fnu)
DTYPE(torch_dtype_float4_e2m1fn_x2, Float4_e2m1fn_x2)
DTYPE(aoti_torch_dtype_int8, Char)
DTYPE(aoti_torch_dtype_int16, Short)
DTYPE(aoti_torch_dtype_int32, Int)
DTYPE(aoti_torch_dtype_int64, Long)
DTYPE(aoti_torch_dtype_uint8, Byte)
DTYPE(aoti_torch_dtype_uint16, UInt16)
DTYPE(aoti_torch_dtype_uint32, UInt32)
DTYPE(aoti_torch_dtype_uint64, UInt64)
#undef DTYPE
size_t aoti_torch_dtype_element_size(int32_t dtype) { return element_size(dtype); }

#define PROPERTY(NAME, TYPE, VALUE)                      \
  AOTITorchError NAME(AtenTensorHandle t, TYPE* value) { \
    *value = VALUE;                                      \
    return AOTI_TORCH_SUCCESS;                           \
  }
PROPERTY(aoti_torch_get_device_type, int32_t, t->device)
PROPERTY(aoti_torch_get_dtype, int32_t, t->dtype)
PROPERTY(aoti_torch_get_dim, int64_t, static_cast<int64_t>(t->sizes.size()))
PROPERTY(aoti_torch_get_numel, int64_t, numel(*t))
PROPERTY(aoti_torch_get_sizes, int64_t*, t->sizes.data())
PROPERTY(aoti_torch_get_strides, int64_t*, t->strides.data())
PROPERTY(aoti_torch_get_storage_offset, int64_t, t->offset)
PROPERTY(aoti_torch_get_storage_size, int64_t, t->storage->bytes)
PROPERTY(torch_get_mutable_data_ptr, void*, first_element(*t))
PROPERTY(torch_get_const_data_ptr, const void*, first_element(*t))
PROPERTY(aoti_torch_new_tensor_handle, AtenTensorHandle, new AtenTensorOpaque(*t))
#undef PROPERTY

AOTITorchError aoti_torch_get_size(AtenTensorHandle t, int64_t d, int64_t* size) {
  *size = t->sizes.at(static_cast<size_t>(d));
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_stride(AtenTensorHandle t, int64_t d, int64_t* stride) {
  *stride = t->strides.at(static_cast<size_t>(d));
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle t, bool* contiguous) {
  int64_t expected = 1;
  *contiguous = true;
  for (size_t d = t->sizes.size(); d-- > 0; expected *= t->sizes[d]) {
    if (t->sizes[d] != 1 && t->strides[d] != expected) *contiguous = numel(*t) == 0;
  }
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle t) {
  delete t;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t, int32_t, AtenTensorHandle* made) {
  int64_t elements = 1;
  for (int64_t d = 0; d < dim; ++d) elements = sizes[d] == 0 ? 0 : elements + (sizes[d] - 1) * strides[d];
  for (int64_t d = 0; d < dim; ++d) elements = sizes[d] == 0 ? 0 : elements;
  auto storage = std::make_shared<Storage>(elements * static_cast<int64_t>(element_size(dtype)));
  if (storage->bytes > 0 && storage->data == nullptr) return AOTI_TORCH_FAILURE;
  if (storage->bytes > 0) std::memset(storage->data, 0xff, static_cast<size_t>(storage->bytes));  // NaN
  *made = new AtenTensorOpaque{std::move(storage), dtype, 0, {sizes, sizes + dim}, {strides, strides + dim}, 0};
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle t, int64_t dim, const int64_t* sizes,
                                              const int64_t* strides, int64_t further, AtenTensorHandle* made) {
  *made = new AtenTensorOpaque{t->storage,         t->dtype, t->device, {sizes, sizes + dim}, {strides, strides + dim},
                               t->offset + further};
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_aten_narrow(AtenTensorHandle t, int64_t dim, int64_t start, int64_t length,
                                      AtenTensorHandle* made) {
  const auto d = static_cast<size_t>(dim);
  *made = new AtenTensorOpaque(*t);
  (*made)->offset += start * t->strides.at(d);
  (*made)->sizes.at(d) = length;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_call_dispatcher(const char* name, const char*, StableIValue* stack, uint64_t) {
  if (std::strcmp(name, "aten::transpose") != 0) return AOTI_TORCH_FAILURE;
  auto* t = reinterpret_cast<AtenTensorHandle>(stack[0]);
  std::swap(t->sizes.at(stack[1]), t->sizes.at(stack[2]));
  std::swap(t->strides.at(stack[1]), t->strides.at(stack[2]));
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_list_size(StableListHandle list, size_t* size) {
  *size = list->items.size();
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* item) {
  *item = list->items.at(index);
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_delete_list(StableListHandle list) {
  delete list;
  return AOTI_TORCH_SUCCESS;
}

// Two pieces, as two threads would have them, one after the other.
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*run)(int64_t, int64_t, void*),
                                  void* context) {
  const int64_t middle = end - begin > grain ? begin + (end - begin) / 2 : end;
  if (begin < middle) run(begin, middle, context);
  if (middle < end) run(middle, end, context);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, TorchLibraryHandle*) {
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) { return AOTI_TORCH_SUCCESS; }
AOTITorchError torch_library_impl(TorchLibraryHandle, const char* name, Kernel kernel, uint64_t) {
  kernels()[name] = kernel;
  return AOTI_TORCH_SUCCESS;
}

}  // extern "C"

int main() {
  std::string names;
  for (const auto& [name, kernel] : kernels()) names += name + " ";
  write_bytes(names.data(), static_cast<int64_t>(names.size()));
  std::fflush(stdout);
  for (;;) serve();
}
