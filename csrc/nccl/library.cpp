#include "library.h"

#include <dlfcn.h>

#include <utility>

namespace parallel_ops::nccl {

std::string version_string(int code) {
  // Up to 2.8 the encoding had one digit less for the major version.
  const int major = code < 10000 ? code / 1000 : code / 10000;
  const int minor = code < 10000 ? code / 100 % 10 : code / 100 % 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(code % 100);
}

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

Library::Library(void* handle, const std::string& name) : handle_(handle), path_(name) {
#define PARALLEL_OPS_NCCL_LOAD(name, since, result, parameters) \
  functions_.name = reinterpret_cast<decltype(functions_.name)>(dlsym(handle, "nccl" #name));
  PARALLEL_OPS_NCCL_FUNCTIONS(PARALLEL_OPS_NCCL_LOAD)
#undef PARALLEL_OPS_NCCL_LOAD
  if (functions_.GetVersion == nullptr || functions_.GetErrorString == nullptr ||
      functions_.GetVersion(&version_code_) != kSuccess) {
    dlclose(handle);
    throw std::runtime_error(name + ": not an NCCL library (it has no working ncclGetVersion)");
  }
  // Below 2.9 codes are a digit shorter and compare as smaller than every version asked for here.
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(functions_.GetVersion), &info) != 0 && info.dli_fname != nullptr) {
    path_ = info.dli_fname;
  }
}

// NCCL keeps threads and exit handlers of its own, so its code has to stay: the handle is never closed.
Library::~Library() = default;

UniqueId Library::unique_id() const {
  UniqueId id;
  check("unique_id", GetUniqueId()(&id));
  return id;
}

std::string Library::describe(Result code) const {
  return std::string(functions_.GetErrorString(code)) + " (ncclResult_t " + std::to_string(code) + ")";
}

void Library::require(const std::string& what, int since) const {
  if (version_code_ < since) {
    throw NotSupported(what + " needs NCCL " + version_string(since) + " or later; this is " +
                       version_string(version_code_) + ", from " + path_);
  }
}

void Library::missing(const std::string& function, int since) const {
  require(function, since);
  throw NotSupported(function + " is not in NCCL " + version_string(version_code_) + ", from " + path_ +
                     ", although releases have it since " + version_string(since));
}

void Library::check(const std::string& who, Result code, Comm* comm) const {
  if (code == kSuccess || code == kInProgress) return;
  std::string message = who + ": NCCL " + version_string(version_code_) + " reported \"" + describe(code) + "\"";
  const char* last = functions_.GetLastError == nullptr ? nullptr : functions_.GetLastError(comm);
  if (last != nullptr && *last != '\0') message += std::string(": ") + last;
  throw NcclError(message, code);
}

}  // namespace parallel_ops::nccl
