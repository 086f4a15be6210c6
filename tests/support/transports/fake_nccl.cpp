// A libnccl whose ranks are threads or processes of this machine, and a CUDA driver for it: every entry that the
// binding calls moves the bytes that NCCL would move, on streams, so that ops run from end to end without a GPU. Ranks
// that make different calls get an error. It is as strict as NCCL: a send is done when its data is in a buffer, which
// an abort drops and finalizing flushes; an id of an earlier life answers nobody; a call can be told never to return,
// not even after an abort. It writes down what it is asked if told so, and fails as it is told.
#include <fcntl.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "api.h"
#include "fake_cuda.h"
#include "fake_messages.h"

using fake::Board, fake::Channel, fake::Group, fake::shared, fake::size_of, fake::wait_until;

namespace {

constexpr Result kSystemError = Result(2), kInternalError = Result(3), kRemoteError = Result(6);

std::mutex mutex;
bool logging = false;
std::string lines, failing, stuck;  // the function that fails, and the one that never returns
std::vector<std::string> boards;    // files, which are there until all ranks have joined
int reported_version = FAKE_VERSION, async_error = kSuccess, ids = 0;
Result failure = kInternalError;
std::atomic<int> alive{0};
Result note(const char* name, const char* format = "", ...) {
  std::unique_lock lock(mutex);
  if (logging) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    lines += std::string(name) + (*text ? " " : "") + text + "\n";
  }
  const bool returns = stuck != name;
  const Result result = failing == name ? failure : kSuccess;
  lock.unlock();
  while (!returns) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  return result;
}

unsigned long long number(const void* pointer) { return reinterpret_cast<unsigned long long>(pointer); }

}  // namespace

void fake::note_driver(const char* name, void* stream) { note(name, "stream=%llx", number(stream)); }

namespace {

// The same on all ranks that make the same call.
uint64_t tag_of(int kind, size_t count, DataType type) { return kind * 1000003 + count * 31 + type; }

extern "C" Result ncclGroupEnd();

// What the calls of a group do, on their stream.
thread_local std::vector<std::function<void(Group&)>> grouped;
thread_local std::vector<std::function<void()>> after_group;
thread_local int depth = 0;
thread_local Comm* comm_of_group = nullptr;
thread_local CudaStream* stream_of_group = nullptr;

void launch(Comm* comm, CudaStream* stream, std::function<void()> work) {
  fake::enqueue(stream, [=] {
    ++comm->running;
    if (!comm->aborted) work();
    --comm->running;
  });
}

Result add(Result result, Comm* comm, CudaStream* stream, std::function<void(Group&)> calls,
           std::function<void()> after = nullptr) {
  if (result != kSuccess) return result;
  comm_of_group = comm, stream_of_group = stream;
  grouped.push_back(std::move(calls));
  if (after) after_group.push_back(std::move(after));
  return depth == 0 ? (++depth, ncclGroupEnd()) : kSuccess;
}

}  // namespace

extern "C" {

// For the tests.
void fake_reset() {
  std::lock_guard lock(mutex);
  for (const std::string& board : boards) unlink(board.c_str());
  boards.clear();
  lines.clear();
  failing.clear();
  stuck.clear();
  reported_version = FAKE_VERSION, async_error = kSuccess;
  logging = fake::discarding = false;
}
void fake_logging(bool on) { logging = on; }
void fake_discard(bool on) { fake::discarding = on; }  // nothing is moved, and nothing waits for other ranks
void fake_version(int code) { reported_version = code; }
void fake_async(int error) { async_error = error; }
void fake_failing(const char* name, int code) {
  std::lock_guard lock(mutex);
  failing = name, failure = static_cast<Result>(code);
}
void fake_stuck(const char* name) {  // never returns, not even after an abort
  std::lock_guard lock(mutex);
  stuck = name;
}
int fake_alive() { return alive; }  // communicators that were not ended
const char* fake_log() {
  static std::string copy;
  std::lock_guard lock(mutex);
  copy = lines;
  return copy.c_str();
}

// As NCCL has them.
Result ncclGetVersion(int* version) {
  *version = reported_version;
  return kSuccess;
}
const char* ncclGetErrorString(Result code) {
  return code == kRemoteError ? "remote process exited" : code == kInvalidUsage ? "invalid usage" : "an error";
}
const char* ncclGetLastError(Comm*) { return "what NCCL said last"; }
Result ncclGetUniqueId(UniqueId* id) {
  memset(id->bytes, 0, sizeof(id->bytes));
  snprintf(id->bytes, sizeof(id->bytes), "/dev/shm/fake_nccl.%d.%d", getpid(), ++ids);
  const int file = open(id->bytes, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(Board)) != 0) return kSystemError;
  close(file);
  {
    std::lock_guard lock(mutex);
    boards.push_back(id->bytes);
  }
  return note("GetUniqueId");
}
Result ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, RawConfig* c) {
  const Result result =
      note("CommInitRankConfig", "size=%d rank=%d blocking=%d max=%d", size, rank, c->blocking, c->max_ctas);
  if (result != kSuccess) return result;
  auto* made = new Comm{size, rank, nullptr};
  ++alive;
  *comm = made;
  const int file = open(id.bytes, O_RDWR);
  if (file < 0) {  // of an earlier life: whoever made it listens no more
    wait_until(made->aborted, [] { return false; });
    return kInternalError;
  }
  made->board = shared<Board>(file, sizeof(Board));
  close(file);
  if (++made->board->joined == size) unlink(id.bytes);
  return wait_until(made->aborted, [&] { return made->board->joined == size; }) ? kSuccess : kInternalError;
}
Result ncclCommFinalize(Comm* comm) {
  const Result result = note("CommFinalize", "rank=%d", comm->rank);
  return wait_until(comm->aborted, [&] { return comm->flushed(); }) ? result : kInternalError;
}
Result ncclCommDestroy(Comm* comm) {
  --alive;
  return note("CommDestroy", "rank=%d", comm->rank);
}
Result ncclCommAbort(Comm* comm) {
  comm->aborted = true;
  --alive;
  for (int peer = 0; comm->board != nullptr && peer < comm->size; ++peer) {
    Channel& channel = comm->board->channels[comm->rank][peer];
    channel.lost = channel.written.load();  // what is in a buffer of this rank's
  }
  std::atomic<bool> never{false};
  wait_until(never, [&] { return comm->running == 0; });
  return note("CommAbort", "rank=%d", comm->rank);
}
Result ncclCommGetAsyncError(Comm* comm, Result* state) {
  *state = static_cast<Result>(comm->error != kSuccess ? comm->error.load() : async_error);
  return kSuccess;
}
Result ncclGroupStart() {
  ++depth;
  return note("GroupStart");
}
Result ncclGroupEnd() {
  const Result result = note("GroupEnd");
  if (--depth > 0 || grouped.empty()) return result;
  Comm* comm = comm_of_group;
  launch(comm, stream_of_group, [comm, calls = std::move(grouped), after = std::move(after_group)] {
    Group group(*comm, 0);
    for (const auto& call : calls) call(group);
    group.run();
    if (comm->aborted || comm->error != kSuccess) return;
    for (const auto& last : after) last();
  });
  grouped.clear(), after_group.clear();
  return result;
}
Result ncclSend(const void* x, size_t count, DataType type, int peer, Comm* comm, CudaStream* stream) {
  return add(note("Send", "%llx count=%zu type=%d peer=%d stream=%llx", number(x), count, type, peer, number(stream)),
             comm, stream, [=](Group& group) { group.tag(1), group.send(x, count * size_of(type), peer); });
}
Result ncclRecv(void* out, size_t count, DataType type, int peer, Comm* comm, CudaStream* stream) {
  return add(note("Recv", "%llx count=%zu type=%d peer=%d stream=%llx", number(out), count, type, peer, number(stream)),
             comm, stream, [=](Group& group) { group.tag(1), group.receive(out, count * size_of(type), peer); });
}

namespace {
Result collective(const char* name, int kind, const void* x, void* out, size_t count, DataType type, Comm* comm,
                  CudaStream* stream, bool scatters, bool sums) {
  const Result result =
      note(name, "%llx %llx count=%zu type=%d stream=%llx", number(x), number(out), count, type, number(stream));
  const size_t bytes = count * size_of(type);
  const uint64_t tag = tag_of(kind, count, type);
  auto landing = std::make_shared<std::vector<char>>(sums ? bytes * comm->size : 0);
  char* const to = sums ? landing->data() : static_cast<char*>(out);
  const char* const from = static_cast<const char*>(x);
  const auto calls = [=](Group& group) {
    group.tag(tag);
    for (int peer = 0; peer < comm->size; ++peer) {
      const char* part = from + (scatters ? peer * bytes : 0);
      if (peer != comm->rank) {
        group.send(part, bytes, peer);
        group.receive(to + peer * bytes, bytes, peer);
      } else if (to + peer * bytes != part) {
        memmove(to + peer * bytes, part, bytes);
      }
    }
  };
  const auto after = [=] {
    if (!sums) return;
    std::vector<const char*> parts;
    for (int rank = 0; rank < comm->size; ++rank) parts.push_back(landing->data() + rank * bytes);
    fake::sum(static_cast<char*>(out), parts, count, type);
  };
  return add(result, comm, stream, calls, after);
}
}  // namespace

Result ncclAllGather(const void* x, void* out, size_t count, DataType type, Comm* comm, CudaStream* stream) {
  return collective("AllGather", 2, x, out, count, type, comm, stream, false, false);
}
Result ncclReduceScatter(const void* x, void* out, size_t count, DataType type, RedOp, Comm* comm, CudaStream* stream) {
  return collective("ReduceScatter", 3, x, out, count, type, comm, stream, true, true);
}
Result ncclAllReduce(const void* x, void* out, size_t count, DataType type, RedOp, Comm* comm, CudaStream* stream) {
  return collective("AllReduce", 4, x, out, count, type, comm, stream, false, true);
}

}  // extern "C"
