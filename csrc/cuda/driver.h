// The few driver calls that this package makes, found in libcuda.so.1 when the first of them is needed.
//
// Own declarations, so that every build has them, with or without a CUDA toolkit, and nothing links libcuda; a test
// compares them with cuda.h where a toolkit is installed.
#pragma once

#include <dlfcn.h>

namespace parallel_ops::cuda {

using Result = int;                   // CUresult
using Stream = void*;                 // CUstream
using Event = void*;                  // CUevent
constexpr Result kSuccess = 0;        // CUDA_SUCCESS
constexpr Result kNotReady = 600;     // CUDA_ERROR_NOT_READY
constexpr unsigned kNoTiming = 2;     // CU_EVENT_DISABLE_TIMING
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr int kThreadLocalMode = 1;   // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

// F(name without the prefix "cu", parameters); captures' status and mode are enums.
#define PARALLEL_OPS_CUDA_FUNCTIONS(F)                  \
  F(GetErrorString, (Result, const char**))             \
  F(CtxGetCurrent, (void**))                            \
  F(CtxSetCurrent, (void*))                             \
  F(DevicePrimaryCtxRetain, (void**, int))              \
  F(ThreadExchangeStreamCaptureMode, (int*))            \
  F(EventCreate, (Event*, unsigned))                    \
  F(EventDestroy_v2, (Event))                           \
  F(EventRecord, (Event, Stream))                       \
  F(EventQuery, (Event))                                \
  F(StreamCreateWithPriority, (Stream*, unsigned, int)) \
  F(StreamDestroy_v2, (Stream))                         \
  F(StreamWaitEvent, (Stream, Event, unsigned))         \
  F(StreamIsCapturing, (Stream, int*))

struct Driver {
#define PARALLEL_OPS_CUDA_ENTRY(name, parameters) Result(*name) parameters = nullptr;
  PARALLEL_OPS_CUDA_FUNCTIONS(PARALLEL_OPS_CUDA_ENTRY)
#undef PARALLEL_OPS_CUDA_ENTRY
  bool complete = false;  // every driver that NCCL works with is

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  const char* describe(Result result) const {
    const char* text = nullptr;
    return GetErrorString(result, &text) == kSuccess && text != nullptr ? text : "unknown error";
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    complete = library != nullptr;
#define PARALLEL_OPS_CUDA_LOAD(name, parameters) \
  if (complete) complete = (name = reinterpret_cast<decltype(name)>(dlsym(library, "cu" #name))) != nullptr;
    PARALLEL_OPS_CUDA_FUNCTIONS(PARALLEL_OPS_CUDA_LOAD)
#undef PARALLEL_OPS_CUDA_LOAD
  }
};

}  // namespace parallel_ops::cuda
