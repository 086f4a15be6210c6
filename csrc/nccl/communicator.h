// A communicator with a stream of its own, which waits for the caller's and which the caller's waits for.
//
// It blocks the host, as torch's do: a group that NCCL enqueues on a thread of its own would have to be polled for, and
// cannot be captured in a CUDA graph. A thread watches what was enqueued, and calls that do not return: after an error
// or the timeout it aborts the communicator, so that its kernels end and later calls fail at once. What an abort does
// not end, a stream or a call of the host, ends with the process.
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

enum class Kind : int { kSend, kRecv, kAllGather, kReduceScatter, kAllReduce };

// One operation on device memory. `count` is what NCCL's function of that name calls so.
struct Call {
  Kind kind;
  const void* input;
  void* output;
  size_t count;
  DataType type;
  int peer;
};

struct Settings {
  UniqueId id;
  int size;
  int rank;
  int device;
  int max_ctas;    // of one operation
  double timeout;  // seconds: to connect, for a call, and for what it has enqueued
  double grace;    // seconds that calls and streams have to end after an abort, and the communicator at the end
};

class Communicator {
 public:
  static std::unique_ptr<Communicator> create(std::shared_ptr<const Library> library, const Settings& settings);

  // Enqueues all calls as one group. Returns when they are enqueued, with an event after them.
  std::shared_ptr<Event> launch(const std::string& op, const std::vector<Call>& calls, CudaStream* stream);
  // `stream` waits for `event`. Throws if something failed. The host does not wait.
  void join(const std::string& op, const Event& event, CudaStream* stream);
  // Ends its kernels and frees it; every later call fails with `reason`. From any thread.
  void abort(const std::string& reason);

  // Waits until all that was enqueued has left this rank, and aborts only if that is late.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  bool alive() const { return comm_ != nullptr; }
  // Whether this is the process that has made it, and not a fork.
  bool is_own() const;

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
  void check(const std::string& op);
  // Calls NCCL, one thread at a time, and aborts the communicator if that throws, since its peers go on.
  void guarded(const std::string& op, const std::function<void()>& body);
  Result call(const Call& call, Comm* comm) const;

  void watch();
  // What is wrong, if anything is, and which event is late; called with the lock of the watch.
  std::string look(std::shared_ptr<Event>& late);
  void end_what_is_stuck(const std::string& reason, const std::shared_ptr<Event>& late);

  std::shared_ptr<const Library> library_;
  Settings settings_;
  int process_;
  void* context_;
  CudaStream* side_ = nullptr;  // on which everything is enqueued
  std::unique_ptr<Event> fork_;

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
  bool idle_ = false, stopping_ = false;
  std::thread watcher_;
};

}  // namespace parallel_ops::nccl
