// The current device and stream of a CUDA build of torch, found at run time: every build of this package has this code.
#pragma once

#include <dlfcn.h>

#include <cstdint>

#include <torch/headeronly/util/Exception.h>

#include "driver.h"

namespace parallel_ops::cuda {

class Device {
 public:
  static const Device& get() {
    static const Device device;
    return device;
  }

  // Are torch's CUDA functions and the driver's there?
  bool usable() const { return create_guard_ && delete_guard_ && current_stream_ && Driver::get().can_launch(); }

  // Makes a device current, in torch and for the driver.
  class Guard {
   public:
    explicit Guard(int32_t index) : index_(index) {
      STD_TORCH_CHECK(get().create_guard_(index, &guard_) == 0, "parallel_ops: cannot make CUDA device ", index,
                      " current");
      Driver::get().ensure_context(index);
    }
    ~Guard() { get().delete_guard_(guard_); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

    Stream stream() const {
      Stream stream = nullptr;
      STD_TORCH_CHECK(get().current_stream_(index_, &stream) == 0, "parallel_ops: CUDA device ", index_,
                      " has no current stream");
      return stream;
    }

   private:
    int32_t index_;
    void* guard_ = nullptr;
  };

 private:
  Device() {
    // Part of torch's C interface, but only in the library of CUDA builds, which nothing here links.
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    const auto find = [library](const char* name) {
      void* function = dlsym(RTLD_DEFAULT, name);
      return function != nullptr || library == nullptr ? function : dlsym(library, name);
    };
    create_guard_ = reinterpret_cast<decltype(create_guard_)>(find("aoti_torch_create_cuda_guard"));
    delete_guard_ = reinterpret_cast<decltype(delete_guard_)>(find("aoti_torch_delete_cuda_guard"));
    current_stream_ = reinterpret_cast<decltype(current_stream_)>(find("aoti_torch_get_current_cuda_stream"));
  }

  int32_t (*create_guard_)(int32_t, void**) = nullptr;
  int32_t (*delete_guard_)(void*) = nullptr;
  int32_t (*current_stream_)(int32_t, void**) = nullptr;
};

}  // namespace parallel_ops::cuda
