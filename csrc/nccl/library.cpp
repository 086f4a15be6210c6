#include "library.h"

#include <dlfcn.h>

namespace parallel_ops::nccl {

std::shared_ptr<const Library> Library::open(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw std::runtime_error(reason == nullptr ? path + ": cannot be opened" : reason);
  }
  return std::shared_ptr<const Library>(new Library(handle, path));
}

std::shared_ptr<const Library> Library::loaded() {
  void* handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  return handle == nullptr ? nullptr : std::shared_ptr<const Library>(new Library(handle, "libnccl.so.2"));
}

// NCCL keeps threads and exit handlers of its own, so its code has to stay: the handle is never closed.
Library::Library(void* handle, const std::string& name) : path_(name) {
  std::string missing;
#define PARALLEL_OPS_NCCL_LOAD(name, result, parameters)                            \
  this->name = reinterpret_cast<decltype(this->name)>(dlsym(handle, "nccl" #name)); \
  if (this->name == nullptr) missing += std::string(missing.empty() ? "" : ", ") + "nccl" #name;
  PARALLEL_OPS_NCCL_FUNCTIONS(PARALLEL_OPS_NCCL_LOAD)
#undef PARALLEL_OPS_NCCL_LOAD
  if (GetVersion == nullptr || GetVersion(&version_code_) != kSuccess) {
    throw std::runtime_error(name + ": not an NCCL library (it has no working ncclGetVersion)");
  }
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(GetVersion), &info) != 0 && info.dli_fname != nullptr) path_ = info.dli_fname;
  if (version_code_ < kLeastVersion) {  // below 2.9 codes are a digit shorter, and smaller, too
    throw NotSupported("NCCL 2.18 or later is needed; this is " + version() + ", from " + path_);
  }
  if (!missing.empty()) throw NotSupported(missing + " is not in NCCL " + version() + ", from " + path_);
}

std::string Library::version() const {
  const int code = version_code_, major = code < 10000 ? code / 1000 : code / 10000;
  const int minor = code < 10000 ? code / 100 % 10 : code / 100 % 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(code % 100);
}

UniqueId Library::unique_id() const {
  UniqueId id;
  check("unique_id", GetUniqueId(&id));
  return id;
}

std::string Library::describe(Result code) const {
  return std::string(GetErrorString(code)) + " (ncclResult_t " + std::to_string(code) + ")";
}

void Library::check(const std::string& who, Result code, Comm* comm) const {
  if (code == kSuccess || code == kInProgress) return;
  std::string message = who + ": NCCL " + version() + " reported \"" + describe(code) + "\"";
  const char* last = GetLastError(comm);
  if (last != nullptr && *last != '\0') message += std::string(": ") + last;
  throw NcclError(message, code);
}

}  // namespace parallel_ops::nccl
