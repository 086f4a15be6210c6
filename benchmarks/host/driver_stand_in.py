"""Triton's own CUDA driver on a libcuda that launches nothing, and tensors of the CPU that pass for CUDA's.

So what the host does for a call on a GPU is done here: argument checks, autograd, launchers, and Triton's launch in C
up to ``cuLaunchKernelEx``. What an allocation costs is what it costs on a CPU. torch's CUDA runtime is not there: the
current device, the stream and whether a graph is captured are constants, and autograd runs the backward on the calling
thread, where CUDA has one of its own.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

_SOURCE = Path(__file__).with_suffix(".c")
_CAPABILITY = (9, 0)


@contextlib.contextmanager
def active() -> Iterator[Callable[[], int]]:
    """Within the block ops take CPU tensors for CUDA's; yields how many kernels were launched so far.

    Raises:
        RuntimeError: a libcuda is loaded, or there is no C compiler.
    """
    from parallel_ops.triton_kernels import _finish

    former = driver._active
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        library = _built(Path(folder))
        stack.enter_context(mock.patch.object(knobs.nvidia, "libcuda_path", folder))
        counters = {0: torch.zeros(2, dtype=torch.int32)}
        for owner, name, value in (
            (torch.Tensor, "is_cpu", False),
            (torch.Tensor, "is_cuda", True),
            (torch.cuda, "current_device", lambda: None),  # the index of a CPU tensor's device
            (torch.cuda, "get_device_capability", lambda device=None: _CAPABILITY),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
            (_finish, "_counter", functools.partial(_counter, counters)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        driver.set_active(_Driver())
        try:
            yield library.stand_in_launches
        finally:
            driver._active = former


class _Driver(nvidia.CudaDriver):  # type: ignore[misc]
    def __init__(self) -> None:  # not that of the base class, which asks torch for its CUDA
        self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
        self.get_current_device: Callable[[], int] = lambda: 0
        self.get_current_stream: Callable[[int], int] = lambda device: 0
        self.get_device_capability: Callable[[int], tuple[int, int]] = lambda device: _CAPABILITY


def _built(folder: Path) -> Any:
    """The library, compiled and loaded before Triton looks for it."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the stand-in for the driver needs a C compiler")
    if Path("/proc/self/maps").exists() and "libcuda.so" in Path("/proc/self/maps").read_text():
        raise RuntimeError("a libcuda is loaded, which the stand-in would not replace; hide the GPU's driver")
    target = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{nvidia.include_dirs[0]}",
         str(_SOURCE), "-o", str(target)],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)
    library.stand_in_launches.restype = ctypes.c_long
    return library


def _counter(counters: dict[int, torch.Tensor], device: torch.device) -> torch.Tensor:
    """With the questions that the real one asks."""
    torch.cuda.is_current_stream_capturing()
    return counters[torch._C._cuda_getCurrentRawStream(device.index)]
