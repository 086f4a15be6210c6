// A libnccl that writes down what it is asked and answers as it is told, so that the binding can be tested for real
// without a GPU: versions, arguments, errors in the background, work that never ends.
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "api.h"

using namespace parallel_ops::nccl;

namespace parallel_ops::nccl {
struct Comm {
  int size, rank;
};
}  // namespace parallel_ops::nccl

namespace {

std::mutex mutex;
std::string lines;
int reported_version = FAKE_VERSION;
int async_error = kSuccess;  // what the background work ends with
int polls_in_progress = 0;   // how often it is still under way when asked; negative: for ever
std::string failing;         // the function that fails
Result failure = kInternalError;
std::atomic<bool> holds_abort = false;  // aborting does not end
int ids = 0;
int alive = 0;  // communicators that were neither aborted nor destroyed

Result note(const char* name, const char* format = "", ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  std::lock_guard lock(mutex);
  lines += std::string(name) + (*text ? " " : "") + text + "\n";
  return failing == name ? failure : kSuccess;
}

unsigned long long number(const void* pointer) { return reinterpret_cast<unsigned long long>(pointer); }

}  // namespace

extern "C" {

// For the tests.
void fake_reset() {
  lines.clear();
  failing.clear();
  reported_version = FAKE_VERSION;
  async_error = kSuccess;
  polls_in_progress = 0;
}
void fake_hold_abort(bool hold) { holds_abort = hold; }
void fake_version(int code) { reported_version = code; }
void fake_async(int error, int polls) { async_error = error, polls_in_progress = polls; }
void fake_failing(const char* name, int code) { failing = name, failure = static_cast<Result>(code); }
int fake_alive() { return alive; }
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
const char* ncclGetErrorString(Result code) { return code == kRemoteError ? "remote process exited" : "an error"; }
const char* ncclGetLastError(Comm*) { return "what NCCL said last"; }
Result ncclGetUniqueId(UniqueId* id) {
  memset(id->bytes, ++ids, sizeof(id->bytes));
  return note("GetUniqueId");
}
Result ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, RawConfig* c) {
  *comm = new Comm{size, rank}, ++alive;
  Result result = note("CommInitRankConfig", "size=%d rank=%d id=%d blocking=%d min=%d max=%d policy=%d net=%s name=%s",
                       size, rank, id.bytes[127], c->blocking, c->min_ctas, c->max_ctas, c->cta_policy,
                       c->net_name ? c->net_name : "-", c->comm_name ? c->comm_name : "-");
  return result == kSuccess ? kInProgress : result;
}
Result ncclCommFinalize(Comm*) { return note("CommFinalize"); }
Result ncclCommDestroy(Comm* comm) {
  delete comm, --alive;
  return note("CommDestroy");
}
Result ncclCommAbort(Comm* comm) {
  while (holds_abort) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const int rank = comm->rank;
  delete comm, --alive;
  return note("CommAbort", "rank=%d", rank);
}
Result ncclCommGetAsyncError(Comm*, Result* state) {
  *state = polls_in_progress != 0 ? kInProgress : static_cast<Result>(async_error);
  if (polls_in_progress > 0) --polls_in_progress;
  return kSuccess;
}
Result ncclCommCuDevice(const Comm*, int* device) {
  *device = 3;
  return kSuccess;
}
Result ncclGroupStart() { return note("GroupStart"); }
Result ncclGroupEnd() { return note("GroupEnd"); }
Result ncclSend(const void* x, size_t count, DataType type, int peer, Comm*, CudaStream* stream) {
  return note("Send", "%llx count=%zu type=%d peer=%d stream=%llx", number(x), count, type, peer, number(stream));
}
Result ncclRecv(void* out, size_t count, DataType type, int peer, Comm*, CudaStream* stream) {
  return note("Recv", "%llx count=%zu type=%d peer=%d stream=%llx", number(out), count, type, peer, number(stream));
}
Result ncclAllReduce(const void* x, void* out, size_t count, DataType type, RedOp op, Comm*, CudaStream* stream) {
  return note("AllReduce", "%llx %llx count=%zu type=%d op=%d stream=%llx", number(x), number(out), count, type, op,
              number(stream));
}

}  // extern "C"
