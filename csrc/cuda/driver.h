// The few driver calls that this package makes, found in libcuda.so.1 when the first of them is needed.
//
// Own declarations, so that every build has them, with or without a CUDA toolkit, and nothing links libcuda; a test
// compares them with cuda.h where a toolkit is installed.
#pragma once

#include <dlfcn.h>

namespace parallel_ops::cuda {

using Result = int;                  // CUresult
using Stream = void*;                // CUstream
using Event = void*;                 // CUevent
constexpr Result kSuccess = 0;       // CUDA_SUCCESS
constexpr Result kNotReady = 600;    // CUDA_ERROR_NOT_READY
constexpr unsigned kNoTiming = 2;    // CU_EVENT_DISABLE_TIMING
constexpr int kThreadLocalMode = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

using ExchangeCaptureMode = Result (*)(int*);  // CUstreamCaptureMode*
using GetErrorString = Result (*)(Result, const char**);
using ContextGetCurrent = Result (*)(void** context);
using ContextSetCurrent = Result (*)(void* context);
using PrimaryContextRetain = Result (*)(void** context, int device);
using EventCreate = Result (*)(Event*, unsigned flags);
using EventDestroy = Result (*)(Event);
using EventRecord = Result (*)(Event, Stream);
using EventQuery = Result (*)(Event);
using StreamWaitEvent = Result (*)(Stream, Event, unsigned flags);
using StreamIsCapturing = Result (*)(Stream, int*);  // CUstreamCaptureStatus*

struct Driver {
  ExchangeCaptureMode exchange_capture_mode = nullptr;
  GetErrorString get_error_string = nullptr;
  ContextGetCurrent context_get_current = nullptr;
  ContextSetCurrent context_set_current = nullptr;
  PrimaryContextRetain primary_context_retain = nullptr;
  EventCreate event_create = nullptr;
  EventDestroy event_destroy = nullptr;
  EventRecord event_record = nullptr;
  EventQuery event_query = nullptr;
  StreamWaitEvent stream_wait_event = nullptr;
  StreamIsCapturing stream_is_capturing = nullptr;

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  // Every driver that NCCL works with is.
  bool complete() const {
    return context_get_current && context_set_current && primary_context_retain && exchange_capture_mode &&
           get_error_string && event_create && event_destroy && event_record && event_query && stream_wait_event &&
           stream_is_capturing;
  }

  // A thread that only runtime calls have been made in so far may have no current context.
  void ensure_context(int device) const {
    void* context = nullptr;
    if (context_get_current(&context) == kSuccess && context != nullptr) return;
    if (primary_context_retain(&context, device) == kSuccess) context_set_current(context);
  }

  const char* describe(Result result) const {
    const char* text = nullptr;
    return get_error_string(result, &text) == kSuccess && text != nullptr ? text : "unknown error";
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) return;
    exchange_capture_mode = reinterpret_cast<ExchangeCaptureMode>(dlsym(library, "cuThreadExchangeStreamCaptureMode"));
    get_error_string = reinterpret_cast<GetErrorString>(dlsym(library, "cuGetErrorString"));
    context_get_current = reinterpret_cast<ContextGetCurrent>(dlsym(library, "cuCtxGetCurrent"));
    context_set_current = reinterpret_cast<ContextSetCurrent>(dlsym(library, "cuCtxSetCurrent"));
    primary_context_retain = reinterpret_cast<PrimaryContextRetain>(dlsym(library, "cuDevicePrimaryCtxRetain"));
    event_create = reinterpret_cast<EventCreate>(dlsym(library, "cuEventCreate"));
    event_destroy = reinterpret_cast<EventDestroy>(dlsym(library, "cuEventDestroy_v2"));
    event_record = reinterpret_cast<EventRecord>(dlsym(library, "cuEventRecord"));
    event_query = reinterpret_cast<EventQuery>(dlsym(library, "cuEventQuery"));
    stream_wait_event = reinterpret_cast<StreamWaitEvent>(dlsym(library, "cuStreamWaitEvent"));
    stream_is_capturing = reinterpret_cast<StreamIsCapturing>(dlsym(library, "cuStreamIsCapturing"));
  }
};

}  // namespace parallel_ops::cuda
