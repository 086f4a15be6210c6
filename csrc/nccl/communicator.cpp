#include "communicator.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

namespace parallel_ops::nccl {
namespace {

using Clock = std::chrono::steady_clock;

// Most launches are done within microseconds, connecting takes seconds: waits start short and grow to a millisecond.
constexpr std::chrono::microseconds kFirstSleep{20};
constexpr std::chrono::microseconds kLongestSleep{1000};
constexpr std::chrono::milliseconds kInterruptEvery{100};

const char* const kNames[] = {"send",      "recv",   "all_reduce", "reduce_scatter", "all_gather",
                              "broadcast", "reduce", "all_to_all", "gather",         "scatter"};

bool has_peer(Kind kind) { return kind == Kind::kSend || kind == Kind::kRecv; }

bool has_root(Kind kind) {
  return kind == Kind::kBroadcast || kind == Kind::kReduce || kind == Kind::kGather || kind == Kind::kScatter;
}

// Whether this rank reads or writes the buffer at all; where it does not, null is fine.
bool needs_input(const Call& call, int rank) {
  if (call.kind == Kind::kRecv) return false;
  return (call.kind != Kind::kBroadcast && call.kind != Kind::kScatter) || call.peer == rank;
}

bool needs_output(const Call& call, int rank) {
  if (call.kind == Kind::kSend) return false;
  return (call.kind != Kind::kReduce && call.kind != Kind::kGather) || call.peer == rank;
}

}  // namespace

Kind kind_of(const std::string& name) {
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) throw std::invalid_argument("call: no operation is called " + name);
  return static_cast<Kind>(found - std::begin(kNames));
}

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

std::unique_ptr<Communicator> Communicator::split(int color, int key, const Config& config, double timeout) {
  RawConfig raw = config.raw(*library_);
  const auto split = library_->CommSplit();
  // NCCL fills in the new handle from a thread of its own; if that never ends, its memory must outlive this call.
  auto handle = std::make_unique<Comm*>(nullptr);
  std::lock_guard serial(serial_);
  guarded("split", [&] {
    try {
      {
        std::lock_guard lock(mutex_);
        Comm* comm = live("split");
        library_->check(who("split"), split(comm, color, key, handle.get(), &raw), comm);
      }
      poll("split", timeout);
    } catch (...) {
      static_cast<void>(handle.release());
      throw;
    }
  });
  if (color == kNoColor) return nullptr;
  // Known by its rank in this communicator until NCCL says which it has in the new one.
  std::unique_ptr<Communicator> child(new Communicator(library_, size_, rank_, interrupt_));
  child->comm_ = *handle;
  child->guarded("split", [&] {
    child->poll("split", timeout);
    std::lock_guard lock(child->mutex_);
    Comm* comm = child->live("split");
    int size = 0, rank = 0;
    library_->check(who("split"), library_->CommCount()(comm, &size), comm);
    library_->check(who("split"), library_->CommUserRank()(comm, &rank), comm);
    child->size_ = size, child->rank_ = rank;
  });
  return child;
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
  // Nobody else has it any more. It may take long, for it waits for the device, and other calls shall fail meanwhile.
  library_->CommAbort()(comm);
}

Communicator::~Communicator() {
  try {
    abort("it was dropped");
  } catch (...) {  // a destructor has nobody to tell
  }
}

WindowHandle* Communicator::register_window(void* data, size_t size, int flags, double timeout) {
  const auto add = library_->CommWindowRegister();
  library_->CommWindowDeregister();
  // As in split(): NCCL may write the handle from another thread.
  auto window = std::make_unique<WindowHandle*>(nullptr);
  std::lock_guard serial(serial_);
  guarded("register_window", [&] {
    try {
      {
        std::lock_guard lock(mutex_);
        Comm* comm = live("register_window");
        library_->check(who("register_window"), add(comm, data, size, window.get(), flags), comm);
      }
      poll("register_window", timeout);
    } catch (...) {
      static_cast<void>(window.release());
      throw;
    }
  });
  return *window;
}

void Communicator::deregister_window(WindowHandle* window) {
  std::lock_guard serial(serial_);
  std::lock_guard lock(mutex_);
  if (comm_ == nullptr || window == nullptr) return;  // an aborted communicator has no windows
  library_->check(who("deregister_window"), library_->CommWindowDeregister()(comm_, window), comm_);
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

void Communicator::validate(const std::string& op, const Call& call) const {
  const std::string name = kNames[static_cast<int>(call.kind)];
  if ((has_peer(call.kind) || has_root(call.kind)) && (call.peer < 0 || call.peer >= size_)) {
    throw std::invalid_argument(who(op) + ": the " + (has_root(call.kind) ? "root" : "peer") + " of " + name +
                                " must be one of the ranks, got " + std::to_string(call.peer));
  }
  if (call.count > 0 &&
      ((needs_input(call, rank_) && call.input == nullptr) || (needs_output(call, rank_) && call.output == nullptr))) {
    throw std::invalid_argument(who(op) + ": a buffer of " + name + " is null");
  }
  if (call.kind == Kind::kAllToAll) library_->AlltoAll();
  if (call.kind == Kind::kGather) library_->Gather();
  if (call.kind == Kind::kScatter) library_->Scatter();
  if (call.type == kFloat8e4m3 || call.type == kFloat8e5m2) library_->require("a float8 tensor", version(2, 24));
}

Result Communicator::enqueue(const Call& c, Comm* comm, CudaStream* stream) const {
  const Library& nccl = *library_;
  switch (c.kind) {
    case Kind::kSend:
      return nccl.Send()(c.input, c.count, c.type, c.peer, comm, stream);
    case Kind::kRecv:
      return nccl.Recv()(c.output, c.count, c.type, c.peer, comm, stream);
    case Kind::kAllReduce:
      return nccl.AllReduce()(c.input, c.output, c.count, c.type, c.op, comm, stream);
    case Kind::kReduceScatter:
      return nccl.ReduceScatter()(c.input, c.output, c.count, c.type, c.op, comm, stream);
    case Kind::kAllGather:
      return nccl.AllGather()(c.input, c.output, c.count, c.type, comm, stream);
    case Kind::kBroadcast:
      return nccl.Broadcast()(c.input, c.output, c.count, c.type, c.peer, comm, stream);
    case Kind::kReduce:
      return nccl.Reduce()(c.input, c.output, c.count, c.type, c.op, c.peer, comm, stream);
    case Kind::kAllToAll:
      return nccl.AlltoAll()(c.input, c.output, c.count, c.type, comm, stream);
    case Kind::kGather:
      return nccl.Gather()(c.input, c.output, c.count, c.type, c.peer, comm, stream);
    case Kind::kScatter:
      return nccl.Scatter()(c.input, c.output, c.count, c.type, c.peer, comm, stream);
  }
  return kInvalidArgument;
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
