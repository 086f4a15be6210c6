#include "communicator.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace parallel_ops::nccl {
namespace {

using Seconds = std::chrono::duration<double>;

// Between two looks of the watch: short beside any timeout, long beside the microsecond that a look takes.
constexpr std::chrono::milliseconds kInterval{20};

// One that is dropped waits so long for what it has enqueued.
constexpr std::chrono::seconds kLeaving{2};

std::string text_of(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", number);
  return text;
}

// Runs `call` on a thread of its own. False if it does not return in time; the thread goes on.
bool returns_within(double seconds, std::function<void()> call) {
  const auto returned = std::make_shared<std::atomic<bool>>(false);
  std::thread([call = std::move(call), returned] {
    call();
    *returned = true;
  }).detach();
  const auto end = std::chrono::steady_clock::now() + Seconds(seconds);
  while (!*returned && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(kInterval / 20);
  return *returned;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<const Library> library, const Settings& settings)
    : library_(std::move(library)), settings_(settings), process_(getpid()), context_(context_of(settings.device)) {
  const InContext current(context_);
  fork_ = std::make_unique<Event>();
  // Of its own: torch's streams of this priority are a pool of 32 that FSDP takes from, too.
  check_cuda("cuStreamCreate",
             driver().StreamCreateWithPriority(reinterpret_cast<cuda::Stream*>(&side_), cuda::kNonBlocking, -1));
}

std::unique_ptr<Communicator> Communicator::create(std::shared_ptr<const Library> library, const Settings& settings) {
  if (settings.size < 1 || settings.rank < 0 || settings.rank >= settings.size) {
    throw std::invalid_argument("communicator: rank must be one of the " + std::to_string(settings.size) +
                                " ranks, got " + std::to_string(settings.rank));
  }
  RawConfig config;
  config.blocking = 1;
  config.max_ctas = settings.max_ctas;
  std::unique_ptr<Communicator> self(new Communicator(library, settings));
  self->watcher_ = std::thread(&Communicator::watch, self.get());
  self->guarded("connect", [&] {
    // NCCL stores the communicator before it waits for the other ranks, so that it can be aborted meanwhile.
    const Result result = library->CommInitRankConfig(reinterpret_cast<Comm**>(&self->comm_), settings.size,
                                                      settings.id, settings.rank, &config);
    if (!self->aborted()) library->check(self->who("connect"), result);  // after an abort, its reason says more
    self->live("connect");
  });
  return self;
}

std::shared_ptr<Event> Communicator::launch(const std::string& op, const std::vector<Call>& calls, CudaStream* stream) {
  std::shared_ptr<Event> event;
  guarded(op, [&] {
    Comm* comm = live(op);
    Result state = kSuccess;
    library_->check(who(op), library_->CommGetAsyncError(comm, &state), comm);
    library_->check(who(op), state, comm);
    const bool capturing = is_capturing(stream);
    fork_->record(stream);
    fork_->join(side_);
    library_->check(who(op), library_->GroupStart(), comm);
    Result result = kSuccess;
    for (size_t i = 0; i < calls.size() && result == kSuccess; ++i) result = call(calls[i], comm);
    // The group is closed even after an error: NCCL's groups are a state of the thread.
    const Result ended = library_->GroupEnd();
    library_->check(who(op), result, comm);
    library_->check(who(op), ended, comm);
    event = std::make_shared<Event>();
    event->record(side_);
    if (capturing) return;  // it happens when the graph is launched, and its events cannot be asked
    std::lock_guard lock(watched_);
    pending_.push_back(
        {op, event, Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(settings_.timeout))});
    if (std::exchange(idle_, false)) changed_.notify_one();
  });
  return event;
}

Result Communicator::call(const Call& c, Comm* comm) const {
  switch (c.kind) {
    case Kind::kSend:
      return library_->Send(c.input, c.count, c.type, c.peer, comm, side_);
    case Kind::kRecv:
      return library_->Recv(c.output, c.count, c.type, c.peer, comm, side_);
    case Kind::kAllGather:
      return library_->AllGather(c.input, c.output, c.count, c.type, comm, side_);
    case Kind::kReduceScatter:
      return library_->ReduceScatter(c.input, c.output, c.count, c.type, kSum, comm, side_);
    case Kind::kAllReduce:
      return library_->AllReduce(c.input, c.output, c.count, c.type, kSum, comm, side_);
  }
  return kInvalidArgument;
}

void Communicator::join(const std::string& op, const Event& event, CudaStream* stream) {
  check(op);
  {
    const InContext current(context_);
    event.join(stream);
  }
  live(op);
}

void Communicator::check(const std::string& op) {
  std::unique_lock lock(calling_, std::try_to_lock);
  Comm* comm = live(op);
  if (!lock.owns_lock()) return;  // a call of another thread, which will see the error
  try {
    Result state = kSuccess;
    library_->check(who(op), library_->CommGetAsyncError(comm, &state), comm);
    library_->check(who(op), state, comm);
  } catch (const std::exception& error) {
    lock.unlock();
    abort("it was aborted after this error: " + std::string(error.what()));
    throw;
  }
}

void Communicator::guarded(const std::string& op, const std::function<void()>& body) {
  if (!is_own()) throw NcclError(who(op) + ": the communicator is another process's", kInvalidUsage);
  try {
    std::lock_guard serial(calling_);
    const InContext current(context_);
    {
      std::lock_guard lock(watched_);
      busy_ = op;
      busy_since_ = Clock::now();
      if (std::exchange(idle_, false)) changed_.notify_one();
    }
    struct Done {
      Communicator& self;
      ~Done() {
        std::lock_guard lock(self.watched_);
        self.busy_.clear();
      }
    } done{*this};
    body();
  } catch (const std::exception& error) {
    abort("it was aborted after this error: " + std::string(error.what()));
    throw;
  }
}

void Communicator::abort(const std::string& reason) {
  if (!is_own()) return;
  {
    std::lock_guard lock(reason_mutex_);
    if (ended_.empty()) ended_ = reason;
  }
  Comm* comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  // A call that is about to return is waited for; NCCL ends one that hangs.
  std::unique_lock lock(calling_, std::chrono::seconds(1));
  library_->CommAbort(comm);
}

bool Communicator::aborted() const {
  std::lock_guard lock(reason_mutex_);
  return !ended_.empty();
}

bool Communicator::is_own() const { return getpid() == process_; }

std::string Communicator::who(const std::string& op) const {
  return op + ": rank " + std::to_string(settings_.rank) + " of " + std::to_string(settings_.size);
}

Comm* Communicator::live(const std::string& op) const {
  Comm* comm = comm_;
  if (comm == nullptr) {
    std::lock_guard lock(reason_mutex_);
    throw NcclError(who(op) + ": the communicator is no more; " + ended_, kInvalidUsage);
  }
  return comm;
}

// A kernel whose peer is gone spins for ever, and so would the next cudaDeviceSynchronize of the process.
void Communicator::watch() {
  const InContext current(context_);
  ignore_captures();
  std::unique_lock lock(watched_);
  while (!stopping_) {
    if (pending_.empty() && busy_.empty()) {
      idle_ = true;
      changed_.wait(lock, [&] { return !idle_ || stopping_; });
      continue;
    }
    if (changed_.wait_for(lock, kInterval, [&] { return stopping_; })) return;
    std::shared_ptr<Event> late;
    const std::string reason = look(late);
    if (reason.empty()) continue;
    pending_.clear();
    lock.unlock();
    end_what_is_stuck(reason, late);
    return;
  }
}

std::string Communicator::look(std::shared_ptr<Event>& late) {
  const auto now = Clock::now();
  const std::string within =
      " within " + text_of(settings_.timeout) + " s: a peer is gone, stuck, or made a different call";
  if (!busy_.empty() && now - busy_since_ > Seconds(settings_.timeout)) {
    return "it was aborted because " + who(busy_) + " had no answer from the other ranks" + within;
  }
  try {
    while (!pending_.empty() && pending_.front().event->done()) pending_.pop_front();
  } catch (const std::exception& error) {
    return "it was aborted after this error of " + who(pending_.front().op) + ": " + error.what();
  }
  if (std::unique_lock lock(calling_, std::try_to_lock); lock.owns_lock()) {
    Comm* comm = comm_;
    Result state = kSuccess;
    if (comm != nullptr && library_->CommGetAsyncError(comm, &state) == kSuccess && state != kSuccess &&
        state != kInProgress) {
      return "it was aborted after this error: " + who(pending_.empty() ? "watch" : pending_.front().op) +
             ": NCCL reported \"" + library_->describe(state) + "\"";
    }
  }
  if (!pending_.empty() && now > pending_.front().deadline) {
    late = pending_.front().event;
    return "it was aborted because " + who(pending_.front().op) + " was not done on the GPU" + within;
  }
  return "";
}

void Communicator::end_what_is_stuck(const std::string& reason, const std::shared_ptr<Event>& late) {
  // An abort ends kernels and NCCL's own loops. It does not end a call that waits in the kernel of the system, nor a
  // stream that waits for a peer's copy engine, and then may not return either: nothing but the end of the process
  // frees the host thread that waits.
  const auto end = Clock::now() + Seconds(settings_.grace);
  bool gone = returns_within(settings_.grace, [this, reason] { abort(reason); });
  const auto ended = [&] {
    {
      std::lock_guard lock(watched_);
      if (!busy_.empty()) return false;
    }
    try {
      return late == nullptr || late->done();
    } catch (const std::exception&) {  // CUDA's own, which every call that follows reports
      return true;
    }
  };
  while (gone && !ended()) {
    gone = Clock::now() < end;
    std::this_thread::sleep_for(kInterval);
  }
  if (gone) return;
  const char* what = late == nullptr ? "a call of NCCL does not return" : "the GPU cannot be freed";
  std::fprintf(stderr, "parallel_ops: %s; %s, so this process ends\n", reason.c_str(), what);
  std::fflush(stderr);
  std::_Exit(1);
}

Communicator::~Communicator() {
  {
    std::unique_lock lock(watched_);
    const auto end = Clock::now() + kLeaving;
    while (alive() && !pending_.empty() && Clock::now() < end) {
      lock.unlock();
      std::this_thread::sleep_for(kInterval / 4);
      lock.lock();
      std::shared_ptr<Event> late;
      if (!pending_.empty() && !look(late).empty()) break;
    }
    stopping_ = true;
    changed_.notify_one();
  }
  if (watcher_.joinable()) watcher_.join();
  // An event is done when the data is in a buffer of NCCL's: to finalize waits until it has left, an abort drops it.
  if (Comm* comm = comm_.exchange(nullptr)) {
    const auto library = library_;
    const bool left = pending_.empty() && returns_within(settings_.grace, [library, comm] {
                        if (library->CommFinalize(comm) == kSuccess) library->CommDestroy(comm);
                      });
    if (!left) returns_within(settings_.grace, [library, comm] { library->CommAbort(comm); });
  }
  driver().StreamDestroy_v2(side_);
}

}  // namespace parallel_ops::nccl
