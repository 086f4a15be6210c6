#include "events.h"

#include <stdexcept>

#include "library.h"

namespace parallel_ops::nccl {

const cuda::Driver& driver() {
  const cuda::Driver& found = cuda::Driver::get();
  if (!found.complete) throw NotSupported("the CUDA driver, libcuda.so.1, is not there or too old");
  return found;
}

void check_cuda(const char* what, cuda::Result result) {
  if (result == cuda::kSuccess) return;
  throw std::runtime_error(std::string(what) + ": CUDA reported \"" + driver().describe(result) + "\"");
}

bool is_capturing(CudaStream* stream) {
  int status = 0;
  check_cuda("cuStreamIsCapturing", driver().StreamIsCapturing(stream, &status));
  return status != 0;
}

void ignore_captures() {
  int mode = cuda::kThreadLocalMode;
  check_cuda("cuThreadExchangeStreamCaptureMode", driver().ThreadExchangeStreamCaptureMode(&mode));
}

void* context_of(int device) {
  void* context = nullptr;
  if (device < 0) {
    check_cuda("cuCtxGetCurrent", driver().CtxGetCurrent(&context));
  } else {
    check_cuda("cuDevicePrimaryCtxRetain", driver().DevicePrimaryCtxRetain(&context, device));
  }
  return context;
}

InContext::InContext(void* context) {
  check_cuda("cuCtxGetCurrent", driver().CtxGetCurrent(&before_));
  if (before_ == context) return;
  check_cuda("cuCtxSetCurrent", driver().CtxSetCurrent(context));
  changed_ = true;
}

InContext::~InContext() {
  if (changed_) driver().CtxSetCurrent(before_);
}

Event::Event() { check_cuda("cuEventCreate", driver().EventCreate(&handle_, cuda::kNoTiming)); }

Event::~Event() { driver().EventDestroy_v2(handle_); }

bool Event::done() const {
  const cuda::Result result = driver().EventQuery(handle_);
  if (result != cuda::kNotReady) check_cuda("cuEventQuery", result);
  return result == cuda::kSuccess;
}

void Event::join(CudaStream* stream) const {
  check_cuda("cuStreamWaitEvent", driver().StreamWaitEvent(stream, handle_, 0));
}

void Event::record(CudaStream* stream) const { check_cuda("cuEventRecord", driver().EventRecord(handle_, stream)); }

}  // namespace parallel_ops::nccl
