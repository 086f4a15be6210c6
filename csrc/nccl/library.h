// A libnccl.so.2 opened at run time: its version, and its functions as a table that records which are missing.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "api.h"

namespace parallel_ops::nccl {

std::string version_string(int code);

// NCCL reported an error, or did not finish in time.
struct NcclError : std::runtime_error {
  NcclError(const std::string& message, Result code) : std::runtime_error(message), code(code) {}
  Result code;
};

// The library is too old for this call.
struct NotSupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Library {
 public:
  // Throws std::runtime_error, in the words of the dynamic loader, if `path` cannot be opened or is not NCCL.
  static std::shared_ptr<const Library> open(const std::string& path);
  // The copy of libnccl.so.2 that this process has already loaded, such as torch's; null if there is none.
  static std::shared_ptr<const Library> loaded();

  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  int version_code() const { return version_code_; }
  const std::string& path() const { return path_; }
  UniqueId unique_id() const;
  std::string describe(Result code) const;

  bool has(int since) const { return version_code_ >= since; }
  // Throws NotSupported unless the library is at least as new as `since`.
  void require(const std::string& what, int since) const;
  // Throws NcclError if `code` is an error. `who` begins the message: the op, and the rank if there is one.
  void check(const std::string& who, Result code, Comm* comm = nullptr) const;

#define PARALLEL_OPS_NCCL_ENTRY(name, since, result, parameters) result(*name) parameters = nullptr;
  struct Functions {
    PARALLEL_OPS_NCCL_FUNCTIONS(PARALLEL_OPS_NCCL_ENTRY)
  };
#undef PARALLEL_OPS_NCCL_ENTRY

  // One accessor a function: throws NotSupported where the library has none.
#define PARALLEL_OPS_NCCL_ACCESSOR(name, since, result, parameters)                          \
  auto name() const {                                                                        \
    if (functions_.name == nullptr || version_code_ < (since)) missing("nccl" #name, since); \
    return functions_.name;                                                                  \
  }
  PARALLEL_OPS_NCCL_FUNCTIONS(PARALLEL_OPS_NCCL_ACCESSOR)
#undef PARALLEL_OPS_NCCL_ACCESSOR

 private:
  Library(void* handle, const std::string& name);
  [[noreturn]] void missing(const std::string& function, int since) const;

  void* handle_;
  std::string path_;
  int version_code_ = 0;
  Functions functions_;
};

}  // namespace parallel_ops::nccl
