// A libnccl.so.2 opened at run time, and its functions as a table.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "api.h"

namespace parallel_ops::nccl {

// NCCL reported an error, or did not finish in time.
struct NcclError : std::runtime_error {
  NcclError(const std::string& message, Result code) : std::runtime_error(message), code(code) {}
  Result code;
};

// The library is too old, or has not what releases of its version have.
struct NotSupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Library {
 public:
  // Throws std::runtime_error, in the words of the dynamic loader, if `path` cannot be opened or is not NCCL, and
  // NotSupported if it is too old.
  static std::shared_ptr<const Library> open(const std::string& path);
  // The copy of libnccl.so.2 that this process has already loaded, such as torch's; null if there is none.
  static std::shared_ptr<const Library> loaded();

  int version_code() const { return version_code_; }
  std::string version() const;
  const std::string& path() const { return path_; }
  UniqueId unique_id() const;
  std::string describe(Result code) const;
  // Throws NcclError if `code` is an error. `who` begins the message: the op, and the rank if there is one.
  void check(const std::string& who, Result code, Comm* comm = nullptr) const;

#define PARALLEL_OPS_NCCL_ENTRY(name, result, parameters) result(*name) parameters = nullptr;
  PARALLEL_OPS_NCCL_FUNCTIONS(PARALLEL_OPS_NCCL_ENTRY)
#undef PARALLEL_OPS_NCCL_ENTRY

 private:
  Library(void* handle, const std::string& name);

  std::string path_;
  int version_code_ = 0;
};

}  // namespace parallel_ops::nccl
