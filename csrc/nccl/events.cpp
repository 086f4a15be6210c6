#include "events.h"

#include <stdexcept>

#include "library.h"

namespace parallel_ops::nccl {
namespace {

void check(const char* what, cuda::Result result) {
  if (result == cuda::kSuccess) return;
  throw std::runtime_error(std::string(what) + ": CUDA reported \"" + cuda::Driver::get().describe(result) + "\"");
}

}  // namespace

Event::~Event() { pool_->give(handle_); }

bool Event::done() const {
  const cuda::Result result = cuda::Driver::get().event_query(handle_);
  if (result != cuda::kNotReady) check("cuEventQuery", result);
  return result == cuda::kSuccess;
}

void Event::join(CudaStream* stream) const {
  check("cuStreamWaitEvent", cuda::Driver::get().stream_wait_event(stream, handle_, 0));
}

void Event::record(CudaStream* stream) const {
  check("cuEventRecord", cuda::Driver::get().event_record(handle_, stream));
}

std::shared_ptr<EventPool> EventPool::create() {
  if (!cuda::Driver::get().complete()) throw NotSupported("the CUDA driver, libcuda.so.1, is not there or too old");
  return std::shared_ptr<EventPool>(new EventPool);
}

EventPool::~EventPool() {
  for (cuda::Event handle : free_) cuda::Driver::get().event_destroy(handle);
}

std::shared_ptr<Event> EventPool::take() {
  cuda::Event handle = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      handle = free_.back();
      free_.pop_back();
    }
  }
  if (handle == nullptr) check("cuEventCreate", cuda::Driver::get().event_create(&handle, cuda::kNoTiming));
  return std::make_shared<Event>(shared_from_this(), handle);
}

void EventPool::give(cuda::Event handle) {
  std::lock_guard lock(mutex_);
  free_.push_back(handle);
}

bool is_capturing(CudaStream* stream) {
  int status = 0;
  check("cuStreamIsCapturing", cuda::Driver::get().stream_is_capturing(stream, &status));
  return status != 0;
}

void ensure_context(int device) { cuda::Driver::get().ensure_context(device); }

void enter_watch_thread(int device) {
  ensure_context(device);
  int mode = cuda::kThreadLocalMode;
  check("cuThreadExchangeStreamCaptureMode", cuda::Driver::get().exchange_capture_mode(&mode));
}

}  // namespace parallel_ops::nccl
