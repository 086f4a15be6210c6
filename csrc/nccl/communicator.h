// A communicator with a stream of its own, which waits for the caller's and which the caller's waits for.
//
// It blocks the host, as torch's do: a group that NCCL enqueues on a thread of its own would have to be polled for, and
// cannot be captured in a CUDA graph. A thread watches what was enqueued, and calls that do not return: after an error
// or the timeout it aborts the communicator, so that its kernels end and later calls fail at once.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "events.h"
#include "library.h"

namespace parallel_ops::nccl {

enum class Kind : int { kSend, kRecv, kAllGather, kReduceScatter, kAllReduce, kAllToAll };

// One operation on device memory. `count` is what NCCL's function of that name calls so.
struct Call {
  Kind kind;
  const void* input;
  void* output;
  size_t count;
  DataType type;
  int peer;
};

// Memory from NCCL's allocator, and the window by which the other ranks know it.
class Segment {
 public:
  // Throws NcclError where there is not so much memory.
  Segment(std::shared_ptr<const Library> library, size_t size);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  void* data = nullptr;
  size_t size;
  Window* window = nullptr;

 private:
  std::shared_ptr<const Library> library_;
};

// `input` goes to where `output`, in `segment`, lies at the peer.
struct Put {
  const void* input;
  size_t offset;
  size_t bytes;
  int peer;
  std::shared_ptr<Segment> segment;
};

struct Settings {
  UniqueId id;
  int size;
  int rank;
  int device;
  int max_ctas;       // of one operation
  CudaStream* side;   // on which everything is enqueued
  double timeout;     // seconds, for a call and for what it has enqueued
  double connecting;  // seconds until all ranks are connected
  double grace;       // seconds that streams have to end after an abort
};

class Communicator {
 public:
  static std::unique_ptr<Communicator> create(std::shared_ptr<const Library> library, const Settings& settings);

  // Enqueues all calls as one group. Returns when they are enqueued, with an event after them.
  std::shared_ptr<Event> launch(const std::string& op, const std::vector<Call>& calls, CudaStream* stream);
  // Sends by copy engines: `sources` are told that the memory for what they put may be written; `puts` are done once
  // their peers have said so; the event is after the last of `arrivals`, (how many puts, from which peer).
  std::shared_ptr<Event> put(const std::string& op, const std::vector<int>& sources, const std::vector<Put>& puts,
                             std::vector<WaitSignalDesc> arrivals, CudaStream* stream);
  // Makes `segment` a window. Collective; blocks.
  void enroll(const std::string& op, Segment& segment);

  // Throws if something failed. Does not wait.
  void check(const std::string& op);
  void join(const std::string& op, const Event& event, CudaStream* stream);
  // Ends its kernels and frees it; every later call fails with `reason`. From any thread.
  void abort(const std::string& reason);

  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return settings_.rank; }
  int size() const { return settings_.size; }
  bool alive() const { return comm_ != nullptr; }
  // Whether ranks can put data into each other's windows.
  bool puts() const { return puts_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    std::string op;
    std::shared_ptr<Event> event;
    Clock::time_point deadline;
  };

  Communicator(std::shared_ptr<const Library> library, const Settings& settings);

  bool aborted() const;
  std::string who(const std::string& op) const;
  Comm* live(const std::string& op) const;
  // Calls NCCL, one thread at a time, and aborts the communicator if that throws, since its peers go on.
  void guarded(const std::string& op, double timeout, const std::function<void()>& body);
  std::shared_ptr<Event> enqueue(const std::string& op, CudaStream* stream, const std::function<void(Comm*)>& body);
  Result call(const Call& call, Comm* comm) const;
  void query_properties();

  void watch();
  // What is wrong, if anything is, and which event is late; called with the lock of the watch.
  std::string look(std::shared_ptr<Event>& late);
  void end_what_is_stuck(const std::string& reason, const std::shared_ptr<Event>& late);

  std::shared_ptr<const Library> library_;
  Settings settings_;
  std::shared_ptr<EventPool> events_;
  std::shared_ptr<Event> fork_;
  bool puts_ = false;

  // Held while NCCL is called, which may take long: abort() does not wait for it for ever.
  std::timed_mutex calling_;
  std::atomic<Comm*> comm_{nullptr};
  mutable std::mutex reason_mutex_;
  std::string ended_;  // why there is no communicator

  std::mutex watched_;  // what follows
  std::condition_variable changed_;
  std::deque<Pending> pending_;
  std::string busy_;  // the op that is in a call of NCCL's
  Clock::time_point busy_since_;
  double busy_for_ = 0;
  bool idle_ = false, stopping_ = false;
  std::thread watcher_;
};

}  // namespace parallel_ops::nccl
