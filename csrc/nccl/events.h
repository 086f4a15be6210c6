// CUDA's context, streams and events, by the driver that is found at run time.
#pragma once

#include <string>

#include "../cuda/driver.h"
#include "api.h"

namespace parallel_ops::nccl {

// The driver. Throws NotSupported where there is none.
const cuda::Driver& driver();
// Throws std::runtime_error in the words of CUDA.
void check_cuda(const char* what, cuda::Result result);

bool is_capturing(CudaStream* stream);
// What other threads capture is no mistake of this thread's calls.
void ignore_captures();

// The primary context of a device; of a negative one whatever is current.
void* context_of(int device);

// The context is current while this lasts, and then what was before.
class InContext {
 public:
  explicit InContext(void* context);
  ~InContext();
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  void* before_ = nullptr;
  bool changed_ = false;
};

// Made, and recorded, in the current context. Streams that were told to wait for it keep doing so when it is gone.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Throws std::runtime_error if what was recorded has failed.
  bool done() const;
  // `stream` waits for what was recorded; the host does not.
  void join(CudaStream* stream) const;
  void record(CudaStream* stream) const;

 private:
  cuda::Event handle_ = nullptr;
};

}  // namespace parallel_ops::nccl
