"""Calls of the CUDA kernels on CPU tensors, under a driver that notes launches instead of running kernels.

Run as a program with two libraries: the registrations and csrc/cuda built for the CPU key, and launch_driver.c. Each
call is made twice for the plan to be taken down, once by Triton's own launcher, once replayed from the plan. Prints,
for each call, what was found.
"""

import ctypes
import json
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

BYTES = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "fp32": 4}


class Noted(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64),
        ("grid", ctypes.c_uint64 * 3),
        ("block", ctypes.c_uint64 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_uint64),
        ("num_arguments", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 64),
    )


class Driver(CudaDriver):
    """Triton's driver for one device of capability 9.0, whose current stream is the library's."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_current_device = lambda: 0
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_stream = lambda device: 77


class Calls:
    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver = driver
        self.kinds: dict[int, list[str]] = {}
        self.in_python = 0

    def learn(self, described: Callable[..., Any]) -> Callable[..., Any]:
        """Tells the driver how many arguments of how many bytes a kernel has, from Triton's own signature."""

        def learning(kernel: Any, compiled: Any, *rest: Any) -> Any:
            kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"] + ["*", "*"]
            self.kinds[compiled.function] = kinds
            sizes = (ctypes.c_uint * len(kinds))(*(BYTES.get(kind, 8) for kind in kinds))
            self.driver.expect(ctypes.c_uint64(compiled.function), len(kinds), sizes)
            return described(kernel, compiled, *rest)

        return learning

    def counted(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.in_python += 1
            return kernel(*args)

        return run

    def launches(self, call: Callable[..., Any], args: Sequence[Any]) -> tuple[list[Tensor], list[Any], int]:
        """The outputs of a call, its launches with each pointer as what it points to, and how often Python ran."""
        count = ctypes.c_uint64.in_dll(self.driver, "num_noted")
        count.value, self.in_python = 0, 0
        outputs = call(*args)
        outputs = [] if outputs is None else [outputs] if isinstance(outputs, Tensor) else list(outputs)
        names = {a.data_ptr(): f"argument {i}" for i, a in reversed(list(enumerate(args))) if isinstance(a, Tensor)}
        names |= {y.data_ptr(): f"output {i}" for i, y in enumerate(outputs) if y.data_ptr() not in names}
        names[0] = "null"
        noted = (Noted * 4096).in_dll(self.driver, "noted")
        found = []
        for launch in noted[: count.value]:
            words = list(launch.arguments[: launch.num_arguments])
            for i, kind in enumerate(
                self.kinds.get(launch.function, ())[: len(words)]
            ):  # none before the kernel is known
                if kind.startswith("*"):
                    words[i] = names.setdefault(words[i], f"scratch {len(names)}")
            fields = (launch.function, *launch.grid, *launch.block, launch.shared_bytes, launch.stream)
            found.append([*fields, launch.attributes, words])
        return outputs, found, self.in_python

    def compare(self, name: str, args: Sequence[Any]) -> dict[str, Any]:
        op = getattr(torch.ops.parallel_ops, name)
        for _ in range(2):
            self.launches(op, args)
        by_triton, expected, _ = self.launches(getattr(torch.ops.parallel_ops, f"python_{name}"), args)
        replayed, got, in_python = self.launches(op, args)
        alike = [[(y.shape, y.stride(), y.dtype) for y in outputs] for outputs in (by_triton, replayed)]
        return {
            "launches": len(expected),
            "outputs": alike[0] == alike[1],
            "same": got == expected,
            "in_python": in_python,
            "details": "" if got == expected else f"expected {expected}, got {got}",
        }


def setup(planned: str, driver: str) -> Calls:
    torch.cuda.current_device = lambda: None  # the index of CPU tensors
    triton.runtime.driver.set_active(Driver())
    calls = Calls(ctypes.CDLL(driver, ctypes.RTLD_GLOBAL))
    torch.ops.load_library(planned)
    sys.modules["parallel_ops._C"] = types.ModuleType("_C")
    impl = torch.library.Library.impl

    def for_cpu(self: Any, name: Any, fn: Any, key: str = "", **options: Any) -> None:
        if str(name).startswith("python_"):
            fn = calls.counted(fn)
        if key != "CPU":
            impl(self, name, fn, "CPU" if key == "CUDA" else key, **options)

    torch.library.Library.impl = for_cpu
    import parallel_ops.ops  # noqa: F401  (registers the ops)
    from parallel_ops.triton_kernels import _launch

    _launch._described = calls.learn(_launch._described)
    return calls


def main() -> None:
    calls = setup(*sys.argv[1:3])
    from support.launch_plan_cases import cases, checks

    found = {name: calls.compare(op, args) for name, (op, args) in cases().items()}
    found |= {name: {"passed": check(calls)} for name, check in checks().items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
