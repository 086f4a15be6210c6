"""What the binding declares of NCCL and of CUDA's driver, against their headers, where these are installed."""

import re
import shutil
import subprocess

import pytest

from support import nccl as support

pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

STUBS = {
    "cuda_runtime.h": "#include <cstddef>\n#define CUDART_VERSION 0\ntypedef struct CUstream_st* cudaStream_t;\n"
    "typedef struct CUevent_st* cudaEvent_t;\n",
    "cuda_fp16.h": "",
}

NCCL = """
#include <nccl.h>
#include <nccl_device/core.h>
#include <cstddef>
#include <type_traits>
#include "api.h"
namespace p = parallel_ops::nccl;

template <class A, class B>
constexpr bool alike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
                       std::is_class_v<A> == std::is_class_v<B>;
template <class R, class... A, class S, class... B>
constexpr bool same_call(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) return false;
  else return alike<R, S> && (alike<A, B> && ...);
}
#define COMPARE(name, since, result, parameters) \\
  static_assert(same_call(&::nccl##name, static_cast<result (*) parameters>(nullptr)), "nccl" #name);
"""

FIELDS = {
    "size": "size",
    "magic": "magic",
    "header_version": "version",
    "blocking": "blocking",
    "cga_cluster_size": "cgaClusterSize",
    "min_ctas": "minCTAs",
    "max_ctas": "maxCTAs",
    "net_name": "netName",
    "split_share": "splitShare",
    "traffic_class": "trafficClass",
    "comm_name": "commName",
    "collnet_enable": "collnetEnable",
    "cta_policy": "CTAPolicy",
    "shrink_share": "shrinkShare",
    "nvls_ctas": "nvlsCTAs",
    "channels_per_net_peer": "nChannelsPerNetPeer",
    "nvlink_centric_sched": "nvlinkCentricSched",
}
VALUES = {
    **{f"k{n}": f"nccl{n}" for n in ("Success", "UnhandledCudaError", "SystemError", "InternalError", "RemoteError")},
    **{f"k{n}": f"nccl{n}" for n in ("InvalidArgument", "InvalidUsage", "InProgress")},
    **{f"k{n}": f"nccl{n}" for n in ("Int8", "Uint8", "Int32", "Uint32", "Int64", "Uint64", "Float16", "Float32")},
    **{f"k{n}": f"nccl{n}" for n in ("Float64", "Bfloat16", "Float8e4m3", "Float8e5m2")},
    "kSum": "ncclSum",
    "kUndefined": "NCCL_CONFIG_UNDEF_INT",
    "kCtaPolicyZero": "NCCL_CTA_POLICY_ZERO",
    "kWindowSymmetric": "NCCL_WIN_COLL_SYMMETRIC",
}
PROPERTIES = {
    "rank": "rank",
    "size_of_group": "nRanks",
    "device_api": "deviceApiSupport",
    "gin_type": "ginType",
    "lsa_teams": "nLsaTeams",
    "host_rma": "hostRmaSupport",
    "railed_gin_type": "railedGinType",
}
DESCRIPTOR = {"count": "opCnt", "peer": "peer", "signal_index": "sigIdx", "context": "ctx"}


def test_declarations_are_those_of_nccl_h(tmp_path):
    """Layouts, values and signatures, checked by the compiler; CUDA's types are stubs, so no toolkit is needed."""
    include = support.installed().parent.parent / "include"
    if not (include / "nccl.h").exists():
        pytest.skip("needs nccl.h beside the library")
    if int(re.search(r"NCCL_VERSION_CODE (\d+)", (include / "nccl.h").read_text())[1]) < 22907:
        pytest.skip("needs the header of NCCL 2.29.7 or later, which has all functions")
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
    lines = [NCCL, "namespace parallel_ops::nccl {", "PARALLEL_OPS_NCCL_FUNCTIONS(COMPARE)", "}"]
    lines += [
        f"static_assert(offsetof(p::{kind}, {own}) == offsetof({theirs}, {field}));"
        for kind, theirs, fields in (
            ("RawConfig", "ncclConfig_t", FIELDS),
            ("Properties", "ncclCommProperties_t", PROPERTIES),
            ("WaitSignalDesc", "ncclWaitSignalDesc_t", DESCRIPTOR),
        )
        for own, field in fields.items()
    ]
    lines += [f"static_assert(int(p::{own}) == int({theirs}));" for own, theirs in VALUES.items()]
    lines += [
        "static_assert(sizeof(p::UniqueId) == sizeof(ncclUniqueId));",
        "static_assert(sizeof(p::RawConfig) <= sizeof(ncclConfig_t));",
        "static_assert(sizeof(p::Properties) <= sizeof(ncclCommProperties_t));",
        "static_assert(sizeof(p::WaitSignalDesc) == sizeof(ncclWaitSignalDesc_t));",
        "static_assert(p::version(2, NCCL_MINOR, NCCL_PATCH) == NCCL_VERSION_CODE);",
        "constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;",
        "static_assert(p::RawConfig().magic == theirs.magic);",
    ]
    source = tmp_path / "comparison.cpp"
    source.write_text("\n".join(lines) + "\n")
    support.compile_cpp(source, "-fsyntax-only", "-I", include, "-I", tmp_path)


# Types are compared by what the calling convention sees of them: an enum and an int, any two pointers.
CUDA = """
#include <cuda.h>
#include <type_traits>
#include "driver.h"
namespace ours = parallel_ops::cuda;
template <class T> struct Abi { using type = T; };
template <> struct Abi<CUresult> { using type = int; };
template <class T> struct Abi<T*> { using type = void*; };
template <> struct Abi<CUstreamCaptureMode*> { using type = int*; };
template <> struct Abi<int*> { using type = int*; };
template <> struct Abi<CUcontext*> { using type = void**; };
template <> struct Abi<void**> { using type = void**; };
template <> struct Abi<const char**> { using type = const char**; };
template <> struct Abi<CUstreamCaptureStatus*> { using type = int*; };
template <> struct Abi<CUevent*> { using type = void**; };
template <class R, class... A> auto abi(R (*)(A...)) -> typename Abi<R>::type (*)(typename Abi<A>::type...);
template <class A, class B> constexpr bool same = std::is_same_v<decltype(abi(A())), decltype(abi(B()))>;
static_assert(sizeof(CUresult) == sizeof(int) && sizeof(CUstream) == sizeof(void*));
static_assert(same<decltype(&cuEventCreate), ours::EventCreate>);
static_assert(same<decltype(&cuEventDestroy_v2), ours::EventDestroy>);
static_assert(same<decltype(&cuEventRecord), ours::EventRecord>);
static_assert(same<decltype(&cuEventQuery), ours::EventQuery>);
static_assert(same<decltype(&cuStreamWaitEvent), ours::StreamWaitEvent>);
static_assert(same<decltype(&cuStreamIsCapturing), ours::StreamIsCapturing>);
static_assert(sizeof(CUstreamCaptureStatus) == sizeof(int) && CU_STREAM_CAPTURE_STATUS_NONE == 0);
static_assert(sizeof(CUstreamCaptureMode) == sizeof(int) && CU_STREAM_CAPTURE_MODE_THREAD_LOCAL == 1);
static_assert(same<decltype(&cuThreadExchangeStreamCaptureMode), ours::ExchangeCaptureMode>);
static_assert(sizeof(CUdevice) == sizeof(int));
static_assert(same<decltype(&cuCtxGetCurrent), ours::ContextGetCurrent>);
static_assert(same<decltype(&cuCtxSetCurrent), ours::ContextSetCurrent>);
static_assert(same<decltype(&cuDevicePrimaryCtxRetain), ours::PrimaryContextRetain>);
static_assert(same<decltype(&cuGetErrorString), ours::GetErrorString>);
static_assert(ours::kSuccess == CUDA_SUCCESS && ours::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(ours::kNoTiming == CU_EVENT_DISABLE_TIMING);
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc and its cuda.h")
def test_declarations_are_those_of_cuda_h(tmp_path):
    """Compiles the declarations with nvcc against the toolkit's header; nothing is run, and torch is not involved."""
    source = tmp_path / "compared.cu"
    source.write_text(CUDA)
    command = [
        "nvcc",
        "-std=c++17",
        "-c",
        "-I",
        str(support.ROOT / "csrc/cuda"),
        str(source),
        "-o",
        str(tmp_path / "compared.o"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
