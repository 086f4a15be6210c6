#include "communicator.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace parallel_ops::nccl {
namespace {

using Clock = std::chrono::steady_clock;

// Most launches are done within microseconds, connecting takes seconds: waits start short and grow to a millisecond.
constexpr std::chrono::microseconds kFirstSleep{20};
constexpr std::chrono::microseconds kLongestSleep{1000};
constexpr std::chrono::milliseconds kInterruptEvery{100};

}  // namespace

std::unique_ptr<Communicator> Communicator::create(std::shared_ptr<const Library> library, const Membership& membership,
                                                   const Config& config, double timeout, Interrupt interrupt) {
  if (membership.size < 1 || membership.rank < 0 || membership.rank >= membership.size) {
    throw std::invalid_argument("communicator: rank must be one of the " + std::to_string(membership.size) +
                                " ranks, got " + std::to_string(membership.rank));
  }
  RawConfig raw = config.raw(*library);
  const auto init = library->CommInitRankConfig();
  // What ends a communicator is looked up before there is one.
  library->CommAbort(), library->CommGetAsyncError(), library->CommFinalize(), library->CommDestroy();
  std::unique_ptr<Communicator> self(new Communicator(library, membership.size, membership.rank, std::move(interrupt)));
  Result result;
  {
    std::lock_guard lock(self->mutex_);
    result = init(&self->comm_, membership.size, membership.id, membership.rank, &raw);
  }
  self->guarded("connect", [&] {
    library->check(self->who("connect"), result);
    self->poll("connect", timeout);
  });
  return self;
}

void Communicator::launch(const std::string& op, const std::vector<Call>& calls, CudaStream* stream, double timeout) {
  for (const Call& call : calls) validate(op, call);
  if (calls.empty()) return;
  std::lock_guard serial(serial_);
  guarded(op, [&] {
    {
      std::lock_guard lock(mutex_);
      Comm* comm = live(op);
      const auto start = library_->GroupStart(), end = library_->GroupEnd();
      library_->check(who(op), start(), comm);
      Result result = kSuccess;
      for (size_t i = 0; i < calls.size() && (result == kSuccess || result == kInProgress); ++i) {
        result = enqueue(calls[i], comm, stream);
      }
      // The group is closed even after an error: NCCL's groups are a state of the thread.
      const Result ended = end();
      library_->check(who(op), result, comm);
      library_->check(who(op), ended, comm);
    }
    poll(op, timeout);
  });
}

void Communicator::check(const std::string& op) {
  guarded(op, [&] {
    std::lock_guard lock(mutex_);
    Comm* comm = live(op);
    Result state = kSuccess;
    library_->check(who(op), library_->CommGetAsyncError()(comm, &state), comm);
    library_->check(who(op), state, comm);
  });
}

void Communicator::finalize(double timeout) {
  std::lock_guard serial(serial_);
  guarded("finalize", [&] {
    {
      std::lock_guard lock(mutex_);
      Comm* comm = live("finalize");
      library_->check(who("finalize"), library_->CommFinalize()(comm), comm);
    }
    poll("finalize", timeout);
    std::lock_guard lock(mutex_);
    Comm* comm = live("finalize");
    comm_ = nullptr;
    ended_ = "it was finalized";
    library_->check(who("finalize"), library_->CommDestroy()(comm));
  });
}

void Communicator::abort(const std::string& reason) {
  Comm* comm = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    comm = std::exchange(comm_, nullptr);
    ended_ = reason;
  }
  // No other thread can reach it now. It waits for the device, which may take long; other calls fail meanwhile.
  library_->CommAbort()(comm);
}

Communicator::~Communicator() {
  try {
    abort("it was dropped");
  } catch (...) {  // a destructor must not throw
  }
}

int Communicator::device() {
  std::lock_guard lock(mutex_);
  Comm* comm = live("device");
  int device = -1;
  library_->check(who("device"), library_->CommCuDevice()(comm, &device), comm);
  return device;
}

bool Communicator::alive() {
  std::lock_guard lock(mutex_);
  return comm_ != nullptr;
}

std::string Communicator::who(const std::string& op) const {
  return op + ": rank " + std::to_string(rank_) + " of " + std::to_string(size_);
}

Comm* Communicator::live(const std::string& op) const {
  if (comm_ == nullptr) {
    throw NcclError(who(op) + ": the communicator is no more; " + ended_, kInvalidUsage);
  }
  return comm_;
}

void Communicator::guarded(const std::string& op, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    abort("it was aborted after this error: " + std::string(error.what()));
    throw;
  } catch (...) {
    abort("it was aborted when " + op + " was interrupted");
    throw;
  }
}

void Communicator::poll(const std::string& op, double timeout) {
  const auto start = Clock::now();
  auto next_interrupt = start + kInterruptEvery;
  for (std::chrono::microseconds sleep = kFirstSleep;; sleep = std::min(2 * sleep, kLongestSleep)) {
    {
      std::lock_guard lock(mutex_);
      Comm* comm = live(op);
      Result state = kSuccess;
      library_->check(who(op), library_->CommGetAsyncError()(comm, &state), comm);
      library_->check(who(op), state, comm);
      if (state == kSuccess) return;
    }
    const auto now = Clock::now();
    const double waited = std::chrono::duration<double>(now - start).count();
    if (waited > timeout) {
      throw NcclError(who(op) + ": no answer from the other ranks within " + std::to_string(timeout) + " s", kTimeout);
    }
    if (now > next_interrupt && interrupt_) {
      interrupt_();
      next_interrupt = Clock::now() + kInterruptEvery;
    }
    std::this_thread::sleep_for(sleep);
  }
}

}  // namespace parallel_ops::nccl
