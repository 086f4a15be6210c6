// Errors of the compiled ops.
//
// Torch's own macro puts the function, the path of the source and the line before the message, and writes through a
// stream. That ends the process where the extension was linked with a static libstdc++, as some CUDA images do: streams
// find the facets of their locale by addresses that the two copies of the library do not share.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace parallel_ops {

inline std::string text(const char* part) { return part; }
inline std::string text(const std::string& part) { return part; }
inline std::string text(double part) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", part);
  return digits;
}
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
std::string text(T part) {
  return std::to_string(part);
}

template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const Parts&... parts) {
  throw std::runtime_error((std::string() + ... + text(parts)));
}

}  // namespace parallel_ops

// RuntimeError in Python, with the message that the other arguments make.
#define PARALLEL_OPS_CHECK(condition, ...)                                    \
  do {                                                                        \
    if (__builtin_expect(!(condition), 0)) ::parallel_ops::fail(__VA_ARGS__); \
  } while (false)
