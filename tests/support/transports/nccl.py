"""A libnccl and a CUDA driver for tests, compiled from ``fake_nccl.cpp``; ranks over it that are threads."""

import concurrent.futures
import ctypes
import functools
import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which(os.environ.get("CXX", "c++").split()[-1])
# What the fake says that it is, unless told otherwise.
VERSION = 22907

_folder = tempfile.TemporaryDirectory()


@functools.cache
def build(name: str = "libfake.so") -> str:
    """The path of the compiled fake."""
    path = Path(_folder.name, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if name != "libfake.so":
        return str(shutil.copy(build(), path))
    # By this name the binding finds the driver once the library is loaded.
    flags = [f"-DFAKE_VERSION={VERSION}", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(path)]
    compile_cpp(ROOT / "tests/support/transports/fake_nccl.cpp", *flags)
    return str(path)


def compile_cpp(source: Path, *flags: str | Path) -> None:
    """Compiles ``source`` with the binding's headers in reach, or skips the test where there is no compiler."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    command = [COMPILER, "-std=c++17", "-Wall", "-Werror", "-I", ROOT / "csrc/nccl", source, *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def installed() -> Path:
    """The real library, or skips the test where there is none."""
    from parallel_ops.comm.nccl.library import installed_libraries

    named = os.environ.get("PARALLEL_OPS_NCCL")
    paths = [Path(named)] if named else installed_libraries()
    if not paths:
        pytest.skip("needs nvidia-nccl-cu13 or nvidia-nccl-cu12, or PARALLEL_OPS_NCCL naming a library")
    return paths[0]


class Fake:
    """The controls of a fake that is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_current.restype = self._library.fake_context.restype = ctypes.c_void_p

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """``reset``, ``logging``, ``discard``, ``version``, ``async``, ``alive``, ``capture_begin``, ..."""
        return getattr(self._library, f"fake_{name}")

    def fail(self, function: str, code: int) -> None:
        """``function``, without its prefix, returns ``code``."""
        self._library.fake_failing(function.encode(), code)

    def hang(self, function: str) -> None:
        """``function``, without its prefix, never returns, not even after an abort."""
        self._library.fake_stuck(function.encode())

    def calls(self) -> list[str]:
        """The calls since logging was switched on, with their arguments."""
        return self._library.fake_log().decode().splitlines()


@functools.cache
def load(path: str | None = None) -> Fake:
    """The fake in this process, where it takes the place of the driver."""
    return Fake(path or build())


@pytest.fixture
def fake() -> Iterator[Fake]:
    """The fake as it is by default."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA driver, for which it stands in")
    fake = load()
    fake.reset()
    yield fake
    fake.reset()
    gc.collect()


def native(fake: Fake, unique_id: bytes, size: int, rank: int, timeout: float = 20.0, device: int = -1) -> Any:
    """A communicator of the binding."""
    from parallel_ops import _nccl

    return _nccl.Communicator(_nccl.Library.open(fake.path), unique_id, size, rank, device, 16, timeout)


def transport(fake: Fake, unique_id: bytes, size: int, rank: int, timeout: float = 20.0, stream: int = 0) -> Any:
    """A rank's end over the fake, on CPU tensors; stream 0 is the calling thread."""
    from parallel_ops.comm.nccl.transport import NcclTransport

    made = native(fake, unique_id, size, rank, timeout)
    return NcclTransport(made, rank, size, torch.device("cpu"), lambda: stream)


def unique_id(fake: Fake) -> bytes:
    from parallel_ops import _nccl

    return _nccl.Library.open(fake.path).unique_id()


def on_ranks(fake: Fake, size: int, function: Callable[..., Any], **options: Any) -> list[Any]:
    """What ``function(transport)`` returns on each rank; ranks are threads of this process."""
    name = unique_id(fake)

    def run(rank: int) -> Any:
        return function(transport(fake, name, size, rank, **options))

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
