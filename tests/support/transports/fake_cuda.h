// The part of a CUDA driver that the NCCL binding calls, on the CPU: streams are threads that do one thing after the
// other, but for stream 0, which is the calling thread itself, as in tests all that is computed runs on it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fake {

void note_driver(const char* name, void* stream);

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;
  bool captured = false;
  void* context = nullptr;

  uint64_t start() {
    std::lock_guard lock(mutex);
    return ++recorded;
  }
  void finish(uint64_t n) {
    std::lock_guard lock(mutex);
    done = n;
    changed.notify_all();
  }
  void wait(uint64_t n) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= n; });
  }
};

class Stream {
 public:
  Stream() { std::thread(&Stream::run, this).detach(); }
  void push(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
};

// What is captured is enqueued anew by every replay, with events of the replay.
using Replay = std::map<Event*, std::shared_ptr<Event>>;
struct Capture {
  std::mutex mutex;
  bool active = false, valid = true;
  std::vector<std::function<void(Replay&)>> steps;
};

// All of these live as long as the process: streams still run when its static objects go.
inline Capture& capture() {
  static auto* it = new Capture;
  return *it;
}

inline std::atomic<bool> strict{false};  // nothing can be made without a current context

inline std::atomic<bool> discarding{false};  // streams do nothing, so that the time of the host is all there is

inline thread_local int capture_mode = 0;  // how calls of this thread are judged while another one captures

inline void forbidden_while_capturing() {
  std::lock_guard lock(capture().mutex);
  if (capture().active && capture_mode == 0) capture().valid = false;
}

inline Stream& stream(void* handle) {
  static auto* mutex = new std::mutex;
  static auto* all = new std::map<void*, std::unique_ptr<Stream>>;
  std::lock_guard lock(*mutex);
  auto& found = (*all)[handle];
  if (!found) found = std::make_unique<Stream>();
  return *found;
}

inline void record(Event* event, void* on) {
  const uint64_t n = event->start();
  if (on == nullptr || discarding) return event->finish(n);
  stream(on).push([=] { event->finish(n); });
}

inline void wait(void* on, Event* event) {
  if (discarding) return;
  uint64_t n;
  {
    std::lock_guard lock(event->mutex);
    n = event->recorded;
  }
  if (on == nullptr) return event->wait(n);
  stream(on).push([=] { event->wait(n); });
}

inline Event* of_replay(Replay& replay, Event* event) {
  auto& own = replay[event];
  if (!own) own = std::make_shared<Event>();
  return own.get();
}

// Enqueues `work`, or captures it. True if it is captured.
inline bool captured(std::function<void(Replay&)> step) {
  std::lock_guard lock(capture().mutex);
  if (!capture().active) return false;
  capture().steps.push_back(std::move(step));
  return true;
}

inline void enqueue(void* on, std::function<void()> work) {
  if (discarding) return;
  if (!captured([=](Replay&) { stream(on).push(work); })) stream(on).push(std::move(work));
}

}  // namespace fake

namespace fake {
inline thread_local void* context = nullptr;  // none, as in a thread that has made no call
inline int contexts[16];
}  // namespace fake

extern "C" {

int cuCtxGetCurrent(void** context) {
  *context = fake::context;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  fake::context = context;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &fake::contexts[device];
  return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  static std::atomic<intptr_t> made{0};
  *stream = reinterpret_cast<void*>(0x1000 * ++made);
  return 0;
}
int cuStreamDestroy_v2(void*) { return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, fake::capture_mode);
  return 0;
}
int cuGetErrorString(int result, const char** text) {
  *text = result == 907 ? "operation not permitted on an event last recorded in a capturing stream" : "an error";
  return 0;
}
int cuEventCreate(void** event, unsigned) {
  if (fake::strict && fake::context == nullptr) return 201;  // of no device
  auto* made = new fake::Event;
  made->context = fake::context;
  *event = made;
  return 0;
}
int cuEventDestroy_v2(void*) { return 0; }  // streams may still refer to it
int cuEventRecord(void* handle, void* on) {
  auto* event = static_cast<fake::Event*>(handle);
  if (event->context != fake::context) return 400;  // an event and a stream of different devices
  fake::note_driver("EventRecord", on);
  event->captured = fake::captured([=](fake::Replay& replay) { fake::record(fake::of_replay(replay, event), on); });
  if (!event->captured) fake::record(event, on);
  return 0;
}
int cuEventQuery(void* handle) {
  fake::forbidden_while_capturing();
  auto* event = static_cast<fake::Event*>(handle);
  if (event->captured) return 907;
  std::lock_guard lock(event->mutex);
  return event->done >= event->recorded ? 0 : 600;
}
int cuStreamWaitEvent(void* on, void* handle, unsigned) {
  auto* event = static_cast<fake::Event*>(handle);
  fake::note_driver("StreamWaitEvent", on);
  if (!fake::captured([=](fake::Replay& replay) { fake::wait(on, fake::of_replay(replay, event)); })) {
    if (event->captured) return 1;
    fake::wait(on, event);
  }
  return 0;
}
int cuStreamIsCapturing(void*, int* status) {
  std::lock_guard lock(fake::capture().mutex);
  *status = fake::capture().active ? 1 : 0;
  return 0;
}

// For the tests.
void fake_strict(bool on) { fake::strict = on; }
void* fake_context(int device) { return fake::context = device < 0 ? nullptr : &fake::contexts[device]; }
void* fake_current() { return fake::context; }
void fake_capture_begin() {
  std::lock_guard lock(fake::capture().mutex);
  fake::capture().active = fake::capture().valid = true;
  fake::capture().steps.clear();
}
// How many steps were captured, or -1 if something was done that ends a capture.
int fake_capture_end() {
  std::lock_guard lock(fake::capture().mutex);
  fake::capture().active = false;
  return fake::capture().valid ? static_cast<int>(fake::capture().steps.size()) : -1;
}
void fake_replay() {
  auto* replay = new fake::Replay;
  for (const auto& step : fake::capture().steps) step(*replay);
}

}  // extern "C"
