// What this package uses of NCCL's C interface, declared here so that it builds with neither NCCL nor CUDA headers.
// Types have other names than in nccl.h and the same layout; a test compares the two where nccl.h is installed.
#pragma once

#include <climits>
#include <cstddef>

namespace parallel_ops::nccl {

// As ncclGetVersion encodes it from 2.9 on.
constexpr int version(int major, int minor, int patch = 0) { return major * 10000 + minor * 100 + patch; }

struct Comm;
struct Window;      // ncclWindow_vidmem: memory of all ranks that was registered together
struct CudaStream;  // CUstream_st

struct UniqueId {
  char bytes[128];
};

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat8e4m3 = 10,
  kFloat8e5m2 = 11,
};

enum RedOp : int { kSum = 0 };

constexpr int kUndefined = INT_MIN;  // a setting that NCCL chooses
constexpr int kCtaPolicyZero = 2;    // copy engines in place of multiprocessors, where they can do the work
constexpr int kWindowSymmetric = 1;  // every rank passes the same offset into the window

// ncclConfig_t as of 2.28. The structure only ever grows at its end, and the library reads no more than the shorter
// of its own and the caller's, so this one serves older and newer libraries.
struct RawConfig {
  size_t size = sizeof(RawConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int header_version = version(2, 28);
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
  int channels_per_net_peer = kUndefined;
  int nvlink_centric_sched = kUndefined;
};

// ncclCommProperties_t as of 2.29.7; that of 2.29.2 is another one.
struct Properties {
  size_t size = sizeof(Properties);
  unsigned int magic = 0xcafebeef;
  unsigned int header_version = version(2, 29, 7);
  int rank = 0;
  int size_of_group = 0;
  int cuda_device = 0;
  int nvml_device = 0;
  bool device_api = false;
  bool multimem = false;
  int gin_type = 0;
  int lsa_teams = 0;
  bool host_rma = false;  // puts and signals
  int railed_gin_type = 0;
};

// How many signals of a peer a stream waits for; index and context must be 0 up to 2.30.
struct WaitSignalDesc {
  int count;
  int peer;
  int signal_index = 0;
  int context = 0;
};

// F(name without the prefix "nccl", first version that has it, result, parameters)
#define PARALLEL_OPS_NCCL_FUNCTIONS(F)                                                                       \
  F(GetVersion, version(2, 0), Result, (int*))                                                               \
  F(GetErrorString, version(2, 0), const char*, (Result))                                                    \
  F(GetLastError, version(2, 13), const char*, (Comm*))                                                      \
  F(GetUniqueId, version(2, 0), Result, (UniqueId*))                                                         \
  F(CommInitRankConfig, version(2, 14), Result, (Comm**, int, UniqueId, int, RawConfig*))                    \
  F(CommAbort, version(2, 4), Result, (Comm*))                                                               \
  F(CommGetAsyncError, version(2, 4), Result, (Comm*, Result*))                                              \
  F(GroupStart, version(2, 0), Result, ())                                                                   \
  F(GroupEnd, version(2, 0), Result, ())                                                                     \
  F(Send, version(2, 7), Result, (const void*, size_t, DataType, int, Comm*, CudaStream*))                   \
  F(Recv, version(2, 7), Result, (void*, size_t, DataType, int, Comm*, CudaStream*))                         \
  F(AllGather, version(2, 0), Result, (const void*, void*, size_t, DataType, Comm*, CudaStream*))            \
  F(AlltoAll, version(2, 28), Result, (const void*, void*, size_t, DataType, Comm*, CudaStream*))            \
  F(ReduceScatter, version(2, 0), Result, (const void*, void*, size_t, DataType, RedOp, Comm*, CudaStream*)) \
  F(AllReduce, version(2, 0), Result, (const void*, void*, size_t, DataType, RedOp, Comm*, CudaStream*))     \
  F(MemAlloc, version(2, 19), Result, (void**, size_t))                                                      \
  F(MemFree, version(2, 19), Result, (void*))                                                                \
  F(CommWindowRegister, version(2, 27), Result, (Comm*, void*, size_t, Window**, int))                       \
  F(PutSignal, version(2, 29, 2), Result,                                                                    \
    (const void*, size_t, DataType, int, Window*, size_t, int, int, unsigned, Comm*, CudaStream*))           \
  F(Signal, version(2, 29, 2), Result, (int, int, int, unsigned, Comm*, CudaStream*))                        \
  F(WaitSignal, version(2, 29, 2), Result, (int, WaitSignalDesc*, Comm*, CudaStream*))                       \
  F(CommQueryProperties, version(2, 29, 7), Result, (Comm*, Properties*))

}  // namespace parallel_ops::nccl
