#include "communicator.h"

#include <utility>

namespace parallel_ops::nccl {
namespace {

constexpr int kSignalIndex = 0, kContext = 0;  // the only ones that there are so far
constexpr unsigned kNoFlags = 0;

std::chrono::steady_clock::duration seconds(double n) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(n));
}

size_t size_of(DataType type) {
  switch (type) {
    case kInt8:
    case kUint8:
    case kFloat8e4m3:
    case kFloat8e5m2:
      return 1;
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt64:
    case kUint64:
    case kFloat64:
      return 8;
    default:
      return 4;
  }
}

}  // namespace

Segment::Segment(std::shared_ptr<const Library> library, size_t size) : size(size), library_(std::move(library)) {
  library_->MemFree();
  library_->check("allocate " + std::to_string(size) + " bytes", library_->MemAlloc()(&data, size));
}

Segment::~Segment() { library_->MemFree()(data); }

Communicator::Communicator(std::shared_ptr<const Library> library, const Settings& settings)
    : library_(std::move(library)), settings_(settings), events_(EventPool::create()), fork_(events_->take()) {}

std::unique_ptr<Communicator> Communicator::create(std::shared_ptr<const Library> library, const Settings& settings) {
  if (settings.size < 1 || settings.rank < 0 || settings.rank >= settings.size) {
    throw std::invalid_argument("communicator: rank must be one of the " + std::to_string(settings.size) +
                                " ranks, got " + std::to_string(settings.rank));
  }
  RawConfig config;
  config.blocking = 1;
  config.max_ctas = settings.max_ctas;
  if (library->has(version(2, 28))) config.cta_policy = kCtaPolicyZero;
  const auto init = library->CommInitRankConfig();
  // What ends a communicator is looked up before there is one.
  library->CommAbort(), library->CommGetAsyncError();
  std::unique_ptr<Communicator> self(new Communicator(library, settings));
  ensure_context(settings.device);
  self->watcher_ = std::thread(&Communicator::watch, self.get());
  self->guarded("connect", settings.connecting, [&] {
    // NCCL stores the communicator before it waits for the other ranks, so that it can be aborted meanwhile.
    const Result result =
        init(reinterpret_cast<Comm**>(&self->comm_), settings.size, settings.id, settings.rank, &config);
    // After an abort, its reason says more.
    if (!self->aborted()) library->check(self->who("connect"), result);
    self->live("connect");
    self->query_properties();
  });
  return self;
}

void Communicator::query_properties() {
  if (!library_->has(version(2, 29, 7))) return;
  Properties properties;
  puts_ = library_->CommQueryProperties()(comm_, &properties) == kSuccess && properties.host_rma;
}

std::shared_ptr<Event> Communicator::launch(const std::string& op, const std::vector<Call>& calls, CudaStream* stream) {
  return enqueue(op, stream, [&](Comm* comm) {
    library_->check(who(op), library_->GroupStart()(), comm);
    Result result = kSuccess;
    for (size_t i = 0; i < calls.size() && result == kSuccess; ++i) result = call(calls[i], comm);
    // The group is closed even after an error: NCCL's groups are a state of the thread.
    const Result ended = library_->GroupEnd()();
    library_->check(who(op), result, comm);
    library_->check(who(op), ended, comm);
  });
}

Result Communicator::call(const Call& c, Comm* comm) const {
  const Library& nccl = *library_;
  CudaStream* const side = settings_.side;
  switch (c.kind) {
    case Kind::kSend:
      return nccl.Send()(c.input, c.count, c.type, c.peer, comm, side);
    case Kind::kRecv:
      return nccl.Recv()(c.output, c.count, c.type, c.peer, comm, side);
    case Kind::kAllGather:
      return nccl.AllGather()(c.input, c.output, c.count, c.type, comm, side);
    case Kind::kReduceScatter:
      return nccl.ReduceScatter()(c.input, c.output, c.count, c.type, kSum, comm, side);
    case Kind::kAllReduce:
      return nccl.AllReduce()(c.input, c.output, c.count, c.type, kSum, comm, side);
    case Kind::kAllToAll:
      break;
  }
  if (nccl.has(version(2, 28))) return nccl.AlltoAll()(c.input, c.output, c.count, c.type, comm, side);
  const size_t bytes = c.count * size_of(c.type);
  Result result = kSuccess;
  for (int peer = 0; peer < settings_.size && result == kSuccess; ++peer) {
    result = nccl.Send()(static_cast<const char*>(c.input) + peer * bytes, c.count, c.type, peer, comm, side);
    if (result != kSuccess) break;
    result = nccl.Recv()(static_cast<char*>(c.output) + peer * bytes, c.count, c.type, peer, comm, side);
  }
  return result;
}

std::shared_ptr<Event> Communicator::put(const std::string& op, const std::vector<int>& sources,
                                         const std::vector<Put>& puts, std::vector<WaitSignalDesc> arrivals,
                                         CudaStream* stream) {
  return enqueue(op, stream, [&](Comm* comm) {
    const Library& nccl = *library_;
    const auto check = [&](Result result) { nccl.check(who(op), result, comm); };
    // A signal is one more from its sender, whatever for. Both ends of a pair make corresponding calls in one order,
    // so the next signal of a peer is the one that is waited for here.
    for (int source : sources) check(nccl.Signal()(source, kSignalIndex, kContext, kNoFlags, comm, settings_.side));
    std::vector<WaitSignalDesc> ready;
    for (const Put& put : puts) {
      bool known = false;
      for (const WaitSignalDesc& wait : ready) known = known || wait.peer == put.peer;
      if (!known) ready.push_back({1, put.peer});
    }
    if (!ready.empty()) {
      check(nccl.WaitSignal()(static_cast<int>(ready.size()), ready.data(), comm, settings_.side));
      check(nccl.GroupStart()());
      Result result = kSuccess;
      for (size_t i = 0; i < puts.size() && result == kSuccess; ++i) {
        const Put& put = puts[i];
        result = nccl.PutSignal()(put.input, put.bytes, kUint8, put.peer, put.segment->window, put.offset, kSignalIndex,
                                  kContext, kNoFlags, comm, settings_.side);
      }
      const Result ended = nccl.GroupEnd()();
      check(result);
      check(ended);
    }
    if (!arrivals.empty()) {
      check(nccl.WaitSignal()(static_cast<int>(arrivals.size()), arrivals.data(), comm, settings_.side));
    }
  });
}

void Communicator::enroll(const std::string& op, Segment& segment) {
  guarded(op, settings_.timeout, [&] {
    Comm* comm = live(op);
    library_->check(who(op),
                    library_->CommWindowRegister()(comm, segment.data, segment.size, &segment.window, kWindowSymmetric),
                    comm);
  });
}

std::shared_ptr<Event> Communicator::enqueue(const std::string& op, CudaStream* stream,
                                             const std::function<void(Comm*)>& body) {
  std::shared_ptr<Event> event;
  guarded(op, settings_.timeout, [&] {
    Comm* comm = live(op);
    Result state = kSuccess;
    library_->check(who(op), library_->CommGetAsyncError()(comm, &state), comm);
    library_->check(who(op), state, comm);
    const bool capturing = is_capturing(stream);
    fork_->record(stream);
    fork_->join(settings_.side);
    body(comm);
    event = events_->take();
    event->record(settings_.side);
    if (capturing) return;  // it happens when the graph is launched, and its events cannot be asked
    std::lock_guard lock(watched_);
    pending_.push_back({op, event, Clock::now() + seconds(settings_.timeout)});
    if (std::exchange(idle_, false)) changed_.notify_one();
  });
  return event;
}

void Communicator::join(const std::string& op, const Event& event, CudaStream* stream) {
  check(op);
  event.join(stream);
  live(op);
}

void Communicator::check(const std::string& op) {
  std::unique_lock lock(calling_, std::try_to_lock);
  Comm* comm = live(op);
  if (!lock.owns_lock()) return;  // a call of another thread, which will see the error
  try {
    Result state = kSuccess;
    library_->check(who(op), library_->CommGetAsyncError()(comm, &state), comm);
    library_->check(who(op), state, comm);
  } catch (const std::exception& error) {
    lock.unlock();
    abort("it was aborted after this error: " + std::string(error.what()));
    throw;
  }
}

void Communicator::guarded(const std::string& op, double timeout, const std::function<void()>& body) {
  try {
    std::lock_guard serial(calling_);
    {
      std::lock_guard lock(watched_);
      busy_ = op;
      busy_since_ = Clock::now();
      busy_for_ = timeout;
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
  {
    std::lock_guard lock(reason_mutex_);
    if (ended_.empty()) ended_ = reason;
  }
  Comm* comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  // A call that is about to return is waited for; NCCL ends one that hangs.
  std::unique_lock lock(calling_, std::chrono::seconds(1));
  library_->CommAbort()(comm);
}

bool Communicator::aborted() const {
  std::lock_guard lock(reason_mutex_);
  return !ended_.empty();
}

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

}  // namespace parallel_ops::nccl
