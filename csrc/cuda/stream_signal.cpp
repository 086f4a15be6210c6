// Flags in device memory that streams set and wait for, without a kernel and without the host; and the one setting
// that a thread needs which watches streams beside others that capture CUDA graphs.
//
// Streams and addresses come as integers: a flag may lie in the memory of a peer, of which this process has no tensor.
// The calling thread gets a context of the device if it has none: driver calls need one, and torch does not give it to
// a new thread. A driver that is not there is no error until a flag is used.
#include <limits>

#include <torch/csrc/stable/library.h>

#include "../error.h"
#include "driver.h"

namespace parallel_ops::cuda {
namespace {

const Driver& found_driver(const char* op) {
  const Driver& driver = Driver::get();
  PARALLEL_OPS_CHECK(
      driver.status == Driver::kFound, op, ": the CUDA driver cannot be used: ",
      driver.status == Driver::kNoLibrary ? "libcuda.so.1 is not installed" : "it is older than CUDA 12");
  return driver;
}

void call(const char* op, StreamValue32 Driver::* function, int64_t device, int64_t stream, int64_t address,
          int64_t value, unsigned flags) {
  const Driver& driver = found_driver(op);
  PARALLEL_OPS_CHECK(address != 0 && address % 4 == 0, op, ": the address must be a multiple of 4, got ", address);
  PARALLEL_OPS_CHECK(value >= 0 && value <= std::numeric_limits<uint32_t>::max(), op,
                     ": the value must fit into 32 bits, got ", value);
  driver.ensure_context(static_cast<int>(device));
  const Result result = (driver.*function)(reinterpret_cast<Stream>(stream), static_cast<DevicePointer>(address),
                                           static_cast<uint32_t>(value), flags);
  PARALLEL_OPS_CHECK(result == kSuccess, op, ": ", driver.describe(result));
}

void stream_write_value(int64_t device, int64_t stream, int64_t address, int64_t value) {
  call("stream_write_value", &Driver::stream_write_value, device, stream, address, value, kWriteFenced);
}

void stream_wait_value(int64_t device, int64_t stream, int64_t address, int64_t value) {
  call("stream_wait_value", &Driver::stream_wait_value, device, stream, address, value, kWaitGeq);
}

// Sets how strictly calls of this thread are judged while any thread captures a CUDA graph; returns what was set.
int64_t thread_exchange_stream_capture_mode(int64_t device, int64_t mode) {
  const char* const op = "thread_exchange_stream_capture_mode";
  const Driver& driver = found_driver(op);
  PARALLEL_OPS_CHECK(mode >= 0 && mode <= 2, op, ": the mode must be 0, 1 or 2, got ", mode);
  driver.ensure_context(static_cast<int>(device));
  int exchanged = static_cast<int>(mode);
  const Result result = driver.exchange_capture_mode(&exchanged);
  PARALLEL_OPS_CHECK(result == kSuccess, op, ": ", driver.describe(result));
  return exchanged;
}

int64_t stream_signal_status() { return Driver::get().status; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CompositeExplicitAutograd, m) {
  m.impl("stream_write_value", TORCH_BOX(&stream_write_value));
  m.impl("stream_wait_value", TORCH_BOX(&stream_wait_value));
  m.impl("thread_exchange_stream_capture_mode", TORCH_BOX(&thread_exchange_stream_capture_mode));
  m.impl("stream_signal_status", TORCH_BOX(&stream_signal_status));
}

}  // namespace parallel_ops::cuda
