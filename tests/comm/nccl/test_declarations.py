"""What the binding declares of NCCL and of CUDA's driver, against their headers, where these are installed."""

import re
import shutil
import subprocess

import pytest

from support.transports import nccl as support

pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

STUBS = {
    "cuda_runtime.h": "#include <cstddef>\n#define CUDART_VERSION 0\ntypedef struct CUstream_st* cudaStream_t;\n"
    "typedef struct CUevent_st* cudaEvent_t;\n",
    "cuda_fp16.h": "",
}

NCCL = """
#include <nccl.h>
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
#define COMPARE(name, result, parameters) \\
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
}
VALUES = {
    **{f"k{n}": f"nccl{n}" for n in ("Success", "InvalidArgument", "InvalidUsage", "InProgress", "Uint8", "Int32")},
    **{f"k{n}": f"nccl{n}" for n in ("Int64", "Float16", "Float32", "Float64", "Bfloat16")},
    "kSum": "ncclSum",
    "kUndefined": "NCCL_CONFIG_UNDEF_INT",
}


def test_declarations_are_those_of_nccl_h(tmp_path):
    """Layouts, values and signatures, checked by the compiler; CUDA's types are stubs, so no toolkit is needed."""
    include = support.installed().parent.parent / "include"
    if not (include / "nccl.h").exists():
        pytest.skip("needs nccl.h beside the library")
    if int(re.search(r"NCCL_VERSION_CODE (\d+)", (include / "nccl.h").read_text())[1]) < 21800:
        pytest.skip("needs the header of NCCL 2.18 or later, which has all functions")
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
    lines = [NCCL, "namespace parallel_ops::nccl {", "PARALLEL_OPS_NCCL_FUNCTIONS(COMPARE)", "}"]
    lines += [
        f"static_assert(offsetof(p::RawConfig, {own}) == offsetof(ncclConfig_t, {field}));"
        for own, field in FIELDS.items()
    ]
    lines += [f"static_assert(int(p::{own}) == int({theirs}));" for own, theirs in VALUES.items()]
    lines += [
        "static_assert(sizeof(p::UniqueId) == sizeof(ncclUniqueId));",
        "static_assert(sizeof(p::RawConfig) <= sizeof(ncclConfig_t));",
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
template <> struct Abi<CUstream*> { using type = void**; };
template <class R, class... A> auto abi(R (*)(A...)) -> typename Abi<R>::type (*)(typename Abi<A>::type...);
template <class A, class B> constexpr bool same = std::is_same_v<decltype(abi(A())), decltype(abi(B()))>;
static_assert(sizeof(CUresult) == sizeof(int) && sizeof(CUstream) == sizeof(void*));
#define COMPARE(name, parameters) static_assert(same<decltype(&cu##name), decltype(ours::Driver::name)>, #name);
PARALLEL_OPS_CUDA_FUNCTIONS(COMPARE)
static_assert(sizeof(CUstreamCaptureStatus) == sizeof(int) && CU_STREAM_CAPTURE_STATUS_NONE == 0);
static_assert(sizeof(CUstreamCaptureMode) == sizeof(int) && CU_STREAM_CAPTURE_MODE_THREAD_LOCAL == 1);
static_assert(sizeof(CUdevice) == sizeof(int));
static_assert(ours::kSuccess == CUDA_SUCCESS && ours::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(ours::kNoTiming == CU_EVENT_DISABLE_TIMING && ours::kNonBlocking == CU_STREAM_NON_BLOCKING);
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
