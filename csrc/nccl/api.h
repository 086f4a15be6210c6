// What this package uses of NCCL's C interface, declared here so that it builds with neither NCCL nor CUDA headers.
// Types have other names than in nccl.h and the same layout; a test compares the two where nccl.h is installed.
#pragma once

#include <climits>
#include <cstddef>

namespace parallel_ops::nccl {

// As ncclGetVersion encodes it from 2.9 on.
constexpr int version(int major, int minor, int patch = 0) { return major * 10000 + minor * 100 + patch; }

struct Comm;
struct CudaStream;  // CUstream_st

struct UniqueId {
  char bytes[128];
};

enum Result : int { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };

enum DataType : int {
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum RedOp : int { kSum = 0 };

// The first release whose configuration is filled here.
constexpr int kLeastVersion = version(2, 18);
constexpr int kUndefined = INT_MIN;  // a setting that NCCL chooses

// ncclConfig_t as of 2.18. The structure only ever grows at its end, and the library reads no more than the shorter
// of its own and the caller's, so this one serves newer libraries.
struct RawConfig {
  size_t size = sizeof(RawConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int header_version = version(2, 18);
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

// F(name without the prefix "nccl", result, parameters)
#define PARALLEL_OPS_NCCL_FUNCTIONS(F)                                                        \
  F(GetVersion, Result, (int*))                                                               \
  F(GetErrorString, const char*, (Result))                                                    \
  F(GetLastError, const char*, (Comm*))                                                       \
  F(GetUniqueId, Result, (UniqueId*))                                                         \
  F(CommInitRankConfig, Result, (Comm**, int, UniqueId, int, RawConfig*))                     \
  F(CommFinalize, Result, (Comm*))                                                            \
  F(CommDestroy, Result, (Comm*))                                                             \
  F(CommAbort, Result, (Comm*))                                                               \
  F(CommGetAsyncError, Result, (Comm*, Result*))                                              \
  F(GroupStart, Result, ())                                                                   \
  F(GroupEnd, Result, ())                                                                     \
  F(Send, Result, (const void*, size_t, DataType, int, Comm*, CudaStream*))                   \
  F(Recv, Result, (void*, size_t, DataType, int, Comm*, CudaStream*))                         \
  F(AllGather, Result, (const void*, void*, size_t, DataType, Comm*, CudaStream*))            \
  F(ReduceScatter, Result, (const void*, void*, size_t, DataType, RedOp, Comm*, CudaStream*)) \
  F(AllReduce, Result, (const void*, void*, size_t, DataType, RedOp, Comm*, CudaStream*))

}  // namespace parallel_ops::nccl
