// A CUDA driver without a device, and the few functions of torch's CUDA library that the launch plans call. It runs no
// kernel; it notes each launch, with as many arguments as it was told that the function has.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int Result;
typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  void* attributes;
  unsigned num_attributes;
} Config;  // CUlaunchConfig

enum { kMaxArguments = 64, kMaxLaunches = 4096, kMaxFunctions = 4096 };
typedef struct {
  uint64_t function, grid[3], block[3], shared_bytes, stream, attributes, num_arguments, arguments[kMaxArguments];
} Noted;

Noted noted[kMaxLaunches];
uint64_t num_noted = 0;
void* stream_of_device = (void*)77;
static unsigned sizes[kMaxFunctions][kMaxArguments], num_arguments[kMaxFunctions], num_functions = 0;

void expect(uint64_t function, unsigned count, const unsigned* bytes) {
  num_arguments[function] = count;
  memcpy(sizes[function], bytes, count * sizeof(unsigned));
}

static Result note(const Config* config, void* function, void** arguments) {
  Noted* launch = &noted[num_noted++];
  memset(launch, 0, sizeof *launch);
  launch->function = (uint64_t)function;
  for (int i = 0; i < 3; ++i) launch->grid[i] = config->grid[i], launch->block[i] = config->block[i];
  launch->shared_bytes = config->shared_bytes;
  launch->stream = (uint64_t)config->stream;
  launch->attributes = config->num_attributes;
  launch->num_arguments = num_arguments[launch->function];
  for (unsigned i = 0; i < launch->num_arguments; ++i)
    memcpy(&launch->arguments[i], arguments[i], sizes[launch->function][i]);
  return 0;
}

Result cuLaunchKernelEx(const Config* config, void* function, void** arguments, void** extra) {
  return note(config, function, arguments);
}

Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared_bytes, void* stream, void** arguments, void** extra) {
  const Config config = {{gx, gy, gz}, {bx, by, bz}, shared_bytes, stream, NULL, 0};
  return note(&config, function, arguments);
}

Result cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = (void*)(uintptr_t)++num_functions;
  return num_functions < kMaxFunctions ? 0 : 2;
}

Result cuFuncGetAttribute(int* value, int attribute, void* function) {
  *value = attribute == 0 ? 1024 : 0;  // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
  return 0;
}

Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int kSharedBytes = 81, kSharedBytesOptIn = 97;  // ..._SHARED_MEMORY_PER_MULTIPROCESSOR, ..._PER_BLOCK_OPTIN
  *value = attribute == kSharedBytes || attribute == kSharedBytesOptIn ? 232448 : 1024;
  return 0;
}

Result cuPointerGetAttribute(uint64_t* value, int attribute, uint64_t pointer) {
  *value = pointer;
  return 0;
}

Result cuGetErrorString(Result result, const char** text) {
  *text = "error";
  return 0;
}

Result cuCtxGetCurrent(void** context) {
  *context = (void*)8;
  return 0;
}

Result cuModuleLoadData(void** module, const void* image) {
  *module = (void*)8;
  return 0;
}

Result cuOccupancyMaxActiveClusters(int* clusters, void* function, const Config* config) {
  *clusters = 1;
  return 0;
}

#define ALWAYS_FINE(name) \
  Result name() { return 0; }
ALWAYS_FINE(cuInit)
ALWAYS_FINE(cuDriverGetVersion)
ALWAYS_FINE(cuCtxSetCurrent)
ALWAYS_FINE(cuCtxGetLimit)
ALWAYS_FINE(cuCtxSetLimit)
ALWAYS_FINE(cuDeviceGet)
ALWAYS_FINE(cuDevicePrimaryCtxRetain)
ALWAYS_FINE(cuFuncSetAttribute)
ALWAYS_FINE(cuFuncSetCacheConfig)
ALWAYS_FINE(cuTensorMapEncodeTiled)
ALWAYS_FINE(cuStreamWriteValue32_v2)
ALWAYS_FINE(cuStreamWaitValue32_v2)

Result aoti_torch_create_cuda_guard(int32_t device, void** guard) {
  *guard = (void*)8;
  return 0;
}
Result aoti_torch_delete_cuda_guard(void* guard) { return 0; }
Result aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = stream_of_device;
  return 0;
}
