// CUDA's events and the order of streams, by the driver that is found at run time.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../cuda/driver.h"
#include "api.h"

namespace parallel_ops::nccl {

class EventPool;

// An event that was recorded. Goes back to its pool; streams that were told to wait for it keep doing so.
class Event {
 public:
  Event(std::shared_ptr<EventPool> pool, cuda::Event handle) : pool_(std::move(pool)), handle_(handle) {}
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Throws std::runtime_error if what was recorded has failed.
  bool done() const;
  // `stream` waits for what was recorded; the host does not.
  void join(CudaStream* stream) const;
  void record(CudaStream* stream) const;

 private:
  std::shared_ptr<EventPool> pool_;
  cuda::Event handle_;
};

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  // Throws NotSupported where there is no CUDA driver.
  static std::shared_ptr<EventPool> create();
  ~EventPool();

  std::shared_ptr<Event> take();
  void give(cuda::Event handle);

 private:
  EventPool() = default;

  std::mutex mutex_;
  std::vector<cuda::Event> free_;
};

bool is_capturing(CudaStream* stream);
// The calling thread works on `device` unless it has a context; what other threads capture is no mistake of its calls.
void enter_watch_thread(int device);
void ensure_context(int device);

}  // namespace parallel_ops::nccl
