"""Stream signals without a GPU: against a driver that the test builds, and against the declarations of cuda.h."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel_ops.comm.transport.symmetric import stream_signal

ROOT = Path(__file__).parents[3]
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

# Flags are set in place, in host memory; a wait that would not be over is an error, 600 as the real cudaErrorNotReady.
DRIVER = """
#include <cstdint>
thread_local void* context = nullptr;
extern "C" int cuStreamWriteValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags) {
  if (context == nullptr) return 201;
  if (stream != reinterpret_cast<void*>(77) || flags != 0) return 1;
  *reinterpret_cast<uint32_t*>(address) = value;
  return 0;
}
#ifndef OLD
extern "C" int cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags) {
  if (context == nullptr) return 201;
  if (stream != reinterpret_cast<void*>(77) || flags != 0) return 1;
  return static_cast<int32_t>(*reinterpret_cast<uint32_t*>(address) - value) >= 0 ? 0 : 600;
}
#endif
extern "C" int cuCtxGetCurrent(void** current) {
  *current = context;
  return 0;
}
extern "C" int cuCtxSetCurrent(void* chosen) {
  context = chosen;
  return 0;
}
extern "C" int cuDevicePrimaryCtxRetain(void** primary, int device) {
  *primary = &context;
  return device == 3 ? 0 : 101;
}
extern "C" int cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int current = 0;
  if (context == nullptr) return 201;
  const int former = current;
  current = *mode;
  *mode = former;
  return 0;
}
extern "C" int cuGetErrorString(int result, const char** text) {
  *text = result == 600 ? "device not ready" : "invalid argument";
  return 0;
}
"""

CALLS = """
import ctypes, threading, torch, parallel_ops
from parallel_ops.comm.transport.symmetric import stream_signal
print(stream_signal.why_not())
ops = torch.ops.parallel_ops
flags = (ctypes.c_uint32 * 4)()
at = ctypes.addressof(flags)

def attempt(op, *args):
    try:
        op(*args)
    except RuntimeError as error:
        print(str(error).splitlines()[0])

def in_a_new_thread(*call):
    thread = threading.Thread(target=attempt, args=call)
    thread.start()
    thread.join()

attempt(ops.thread_exchange_stream_capture_mode, 0, 3)
attempt(ops.thread_exchange_stream_capture_mode, 0, 1)
attempt(ops.stream_write_value, 0, 77, at, 1)
attempt(ops.stream_write_value, 3, 77, at + 8, 2**32 - 1)
attempt(ops.stream_wait_value, 3, 77, at + 8, 3)
attempt(ops.stream_write_value, 3, 5, at, 1)
attempt(ops.stream_write_value, 3, 77, at + 2, 1)
attempt(ops.stream_write_value, 3, 77, 0, 1)
attempt(ops.stream_write_value, 3, 77, at, 2**32)
attempt(ops.stream_write_value, 3, 77, at, -1)
in_a_new_thread(ops.stream_write_value, 3, 77, at, 5)
in_a_new_thread(ops.stream_wait_value, 3, 77, at + 8, 2**32 - 2)
print(list(flags))
modes = (1, 2, 0) if stream_signal.why_not() is None else ()
print([ops.thread_exchange_stream_capture_mode(3, mode) for mode in modes])
"""


def calls_with_driver(folder: Path, *flags: str) -> list[str]:
    source = folder / "driver.cpp"
    source.write_text(DRIVER)
    command = ["c++", "-shared", "-fPIC", *flags, str(source), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True, capture_output=True)
    env = {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    result = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="puts a driver into LD_LIBRARY_PATH")
def test_calls_reach_the_driver(tmp_path):
    reason, *errors, flags, modes = calls_with_driver(tmp_path)
    assert reason == "None"
    assert flags == f"[5, 0, {2**32 - 1}, 0]"
    no_context = "invalid argument"  # the driver of the test has device 3 alone
    expected = [
        "thread_exchange_stream_capture_mode: the mode must be 0, 1 or 2, got 3",
        f"thread_exchange_stream_capture_mode: {no_context}",
        f"stream_write_value: {no_context}",
        "stream_wait_value: device not ready",  # 2**32 - 1 is before 3, by four steps
        "stream_write_value: invalid argument",
        "stream_write_value: the address must be a multiple of 4, got ",
        "stream_write_value: the address must be a multiple of 4, got 0",
        "stream_write_value: the value must fit into 32 bits, got 4294967296",
        "stream_write_value: the value must fit into 32 bits, got -1",
    ]
    assert modes == "[0, 1, 2]"
    assert len(errors) == len(expected)
    for error, text in zip(errors, expected, strict=True):
        assert text in error


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="puts a driver into LD_LIBRARY_PATH")
def test_a_driver_without_the_functions(tmp_path):
    reason, *errors, flags, _ = calls_with_driver(tmp_path, "-DOLD")
    assert reason == "the CUDA driver lacks stream memory operations; it is older than CUDA 12"
    assert flags == "[0, 0, 0, 0]"
    assert len(errors) == 12
    assert all("the CUDA driver cannot be used: it is older than CUDA 12" in error for error in errors)


@pytest.mark.parametrize(
    ("flags", "index", "message"),
    [
        (torch.zeros(4), 0, "flags must be a contiguous int32 vector, got torch.float32"),
        (torch.zeros(4, dtype=torch.int32), 0, "flags must be on a CUDA device, got cpu"),
        (
            torch.zeros(2, 2, dtype=torch.int32),
            0,
            r"flags must be a contiguous int32 vector, got torch.int32 of \[2, 2\]",
        ),
    ],
)
def test_flags_that_cannot_be(flags, index, message):
    for call in (stream_signal.stream_write_value, stream_signal.stream_wait_value):
        with pytest.raises(ValueError, match=message):
            call(flags, index, 1, None)


# Types are compared by what the calling convention sees of them: an enum and an int, any two pointers.
COMPARED = """
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
template <> struct Abi<CUdeviceptr> { using type = uint64_t; };
template <class R, class... A> auto abi(R (*)(A...)) -> typename Abi<R>::type (*)(typename Abi<A>::type...);
template <class A, class B> constexpr bool same = std::is_same_v<decltype(abi(A())), decltype(abi(B()))>;
static_assert(sizeof(CUresult) == sizeof(int) && sizeof(CUdeviceptr) == 8 && sizeof(CUstream) == sizeof(void*));
static_assert(sizeof(cuuint32_t) == 4);
static_assert(same<decltype(&cuStreamWriteValue32_v2), ours::StreamValue32>);
static_assert(same<decltype(&cuStreamWaitValue32_v2), ours::StreamValue32>);
static_assert(sizeof(CUstreamCaptureMode) == sizeof(int) && CU_STREAM_CAPTURE_MODE_THREAD_LOCAL == 1);
static_assert(same<decltype(&cuThreadExchangeStreamCaptureMode), ours::ExchangeCaptureMode>);
static_assert(sizeof(CUdevice) == sizeof(int));
static_assert(same<decltype(&cuCtxGetCurrent), ours::ContextGetCurrent>);
static_assert(same<decltype(&cuCtxSetCurrent), ours::ContextSetCurrent>);
static_assert(same<decltype(&cuDevicePrimaryCtxRetain), ours::PrimaryContextRetain>);
static_assert(same<decltype(&cuGetErrorString), ours::GetErrorString>);
static_assert(ours::kSuccess == CUDA_SUCCESS && ours::kWaitGeq == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(ours::kWriteFenced == CU_STREAM_WRITE_VALUE_DEFAULT);
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc and its cuda.h")
def test_declarations_are_those_of_cuda_h(tmp_path):
    """Compiles the declarations with nvcc against the toolkit's header; nothing is run, and torch is not involved."""
    source = tmp_path / "compared.cu"
    source.write_text(COMPARED)
    command = [
        "nvcc",
        "-std=c++17",
        "-c",
        "-I",
        str(ROOT / "csrc/cuda"),
        str(source),
        "-o",
        str(tmp_path / "compared.o"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_stream_waits_for_another():
    flags, x = torch.zeros(4, dtype=torch.int32, device="cuda"), torch.zeros(1, device="cuda")
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):  # enqueued first, as everywhere: a wait never precedes its producer
        torch.cuda._sleep(50_000_000)
        x.fill_(3)
        stream_signal.stream_write_value(flags, 2, 7, producer)
    stream_signal.stream_wait_value(flags, 2, 5, consumer)
    with torch.cuda.stream(consumer):
        y = 2 * x
    torch.cuda.synchronize()
    assert y.item() == 6
    assert flags.tolist() == [0, 0, 7, 0]
