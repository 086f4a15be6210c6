// A communicator that cannot hang its caller: every call is non-blocking and polled up to a timeout, after which, as
// after an error, the communicator is aborted, so that its kernels end and later calls fail at once.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "library.h"

namespace parallel_ops::nccl {

// Settings by name; what is not set NCCL chooses.
class Config {
 public:
  // Throw std::invalid_argument for a name that is not a setting of that type.
  void set(const std::string& name, int value);
  void set(const std::string& name, const std::string& value);
  // As NCCL takes it; valid as long as this object. Throws NotSupported for a setting that is too new.
  RawConfig raw(const Library& library) const;

 private:
  std::vector<std::pair<std::string, int>> numbers_;
  std::vector<std::pair<std::string, std::string>> texts_;
};

enum class Kind { kSend, kRecv, kAllReduce };

// By the names that Python uses, for example "all_reduce". Throws std::invalid_argument.
Kind kind_of(const std::string& name);

// One operation on device memory. `count` is what NCCL's function of that name calls so.
struct Call {
  Kind kind;
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;
  DataType type = kUint8;
  RedOp op = kSum;
  int peer = 0;
};

class Communicator {
 public:
  // Called about ten times a second while waiting; may throw, which aborts the communicator.
  using Interrupt = std::function<void()>;

  struct Membership {
    UniqueId id;
    int size;
    int rank;
  };
  static std::unique_ptr<Communicator> create(std::shared_ptr<const Library> library, const Membership& membership,
                                              const Config& config, double timeout, Interrupt interrupt);

  // Enqueues all calls on the stream as one group. Returns when they are enqueued, not when they are done.
  void launch(const std::string& op, const std::vector<Call>& calls, CudaStream* stream, double timeout);
  // Throws if an operation enqueued before has failed since.
  void check(const std::string& op);
  // Waits until all ranks have finished, then frees the communicator. Collective.
  void finalize(double timeout);
  // Ends its kernels and frees it; every later call fails with `reason`. From any thread.
  void abort(const std::string& reason);

  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int device();
  bool alive();

 private:
  Communicator(std::shared_ptr<const Library> library, int size, int rank, Interrupt interrupt)
      : library_(std::move(library)), size_(size), rank_(rank), interrupt_(std::move(interrupt)) {}

  std::string who(const std::string& op) const;
  Comm* live(const std::string& op) const;
  void validate(const std::string& op, const Call& call) const;
  Result enqueue(const Call& call, Comm* comm, CudaStream* stream) const;
  // Runs `body`; whatever it throws aborts the communicator first, since its peers have gone on.
  void guarded(const std::string& op, const std::function<void()>& body);
  // Until NCCL has finished what it does in the background for this communicator.
  void poll(const std::string& op, double timeout);

  std::shared_ptr<const Library> library_;
  int size_, rank_;
  Interrupt interrupt_;
  // Held by a call until NCCL has finished it in the background: until then NCCL takes no other call, and threads
  // (forward and backward, for example) may share a communicator.
  std::mutex serial_;
  // Held only while NCCL is called, never while waiting, so that check() and abort() get through.
  mutable std::mutex mutex_;
  Comm* comm_ = nullptr;
  std::string ended_;  // why comm_ is null
};

}  // namespace parallel_ops::nccl
