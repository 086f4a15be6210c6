// The thread of a communicator that ends what never would: a kernel whose peer is gone spins for ever, and so would the
// next cudaDeviceSynchronize of the process.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "communicator.h"

namespace parallel_ops::nccl {
namespace {

// Between two looks: short beside any timeout, long beside the microsecond that a look takes.
constexpr std::chrono::milliseconds kInterval{20};

// What a communicator has enqueued may take so long after it was dropped.
constexpr std::chrono::seconds kLeaving{2};

std::string text_of(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", number);
  return text;
}

}  // namespace

void Communicator::watch() {
  enter_watch_thread(settings_.device);
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
  const auto within = [](double time) {
    return " within " + text_of(time) + " s: a peer is gone, stuck, or made a different call";
  };
  if (!busy_.empty() && now - busy_since_ > std::chrono::duration<double>(busy_for_)) {
    return "it was aborted because " + who(busy_) + " had no answer from the other ranks" + within(busy_for_);
  }
  try {
    while (!pending_.empty() && pending_.front().event->done()) pending_.pop_front();
  } catch (const std::exception& error) {
    return "it was aborted after this error of " + who(pending_.front().op) + ": " + error.what();
  }
  if (std::unique_lock lock(calling_, std::try_to_lock); lock.owns_lock()) {
    Comm* comm = comm_;
    Result state = kSuccess;
    if (comm != nullptr && library_->CommGetAsyncError()(comm, &state) == kSuccess && state != kSuccess &&
        state != kInProgress) {
      return "it was aborted after this error: " + who(pending_.empty() ? "watch" : pending_.front().op) +
             ": NCCL reported \"" + library_->describe(state) + "\"";
    }
  }
  if (!pending_.empty() && now > pending_.front().deadline) {
    late = pending_.front().event;
    return "it was aborted because " + who(pending_.front().op) + " was not done on the GPU" +
           within(settings_.timeout);
  }
  return "";
}

void Communicator::end_what_is_stuck(const std::string& reason, const std::shared_ptr<Event>& late) {
  if (late == nullptr) return abort(reason);
  // An abort ends kernels. A stream that waits for a peer's copy engine may wait on, and then the abort does not return
  // either: nothing but the end of the process frees the host thread that waits for that stream.
  const auto aborted = std::make_shared<std::atomic<bool>>(false);
  std::thread([this, reason, aborted] {
    abort(reason);
    *aborted = true;
  }).detach();
  const auto ended = [&] {
    try {
      return *aborted && late->done();
    } catch (const std::exception&) {  // CUDA's own, which every call that follows reports
      return true;
    }
  };
  const auto end = Clock::now() + std::chrono::duration<double>(settings_.grace);
  while (!ended()) {
    if (Clock::now() > end) {
      std::fprintf(stderr, "parallel_ops: %s; the GPU cannot be freed, so this process ends\n", reason.c_str());
      std::fflush(stderr);
      std::_Exit(1);
    }
    std::this_thread::sleep_for(kInterval);
  }
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
  try {
    abort("it was dropped");
  } catch (...) {  // a destructor must not throw
  }
}

}  // namespace parallel_ops::nccl
