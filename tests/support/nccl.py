"""A libnccl for tests, compiled from ``fake_nccl.cpp``, and what the tests of the binding share."""

import ctypes
import functools
import gc
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++").split()[-1])
# What the fake says that it is, unless told otherwise.
VERSION = 22803

_folder = tempfile.TemporaryDirectory()


@functools.cache
def build(name: str = "libfake.so", *flags: str) -> str:
    """The path of the compiled fake."""
    path = Path(_folder.name, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    compile_cpp(
        ROOT / "tests/support/fake_nccl.cpp", f"-DFAKE_VERSION={VERSION}", "-fPIC", "-shared", "-o", path, *flags
    )
    return str(path)


def compile_cpp(source: Path, *flags: str | Path) -> None:
    """Compiles ``source`` with the binding's headers in reach, or skips the test where there is no compiler."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    command = [COMPILER, "-std=c++17", "-Wall", "-Werror", "-I", ROOT / "csrc/nccl", source, *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


class Fake:
    """The controls of a fake that is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.fake_log.restype = ctypes.c_char_p

    def reset(self) -> None:
        self._library.fake_reset()

    def version(self, code: int) -> None:
        self._library.fake_version(code)

    def background(self, error: int = 0, polls: int = 0) -> None:
        """Work ends with ``error``, after it was found under way ``polls`` times; -1 is for ever."""
        self._library.fake_async(error, polls)

    def hold_abort(self, hold: bool) -> None:
        """Whether aborting a communicator does not end."""
        self._library.fake_hold_abort(hold)

    def failing(self, function: str, code: int) -> None:
        """``function``, without its prefix, returns ``code``."""
        self._library.fake_failing(function.encode(), code)

    def alive(self) -> int:
        """Communicators that were neither aborted nor destroyed."""
        return self._library.fake_alive()

    def log(self) -> list[str]:
        """The calls so far, with their arguments."""
        return self._library.fake_log().decode().splitlines()


@functools.cache
def _loaded() -> Fake:
    return Fake(build())


@pytest.fixture
def fake() -> Iterator[Fake]:
    """The fake, with nothing in its log."""
    fake = _loaded()
    fake.reset()
    before = fake.alive()
    yield fake
    # A communicator that an exception's traceback holds writes to the log when it goes: now, not in a later test.
    fake.reset()
    end = time.monotonic() + 1
    while fake.alive() > before and time.monotonic() < end:  # a watch thread may hold it for a moment, too
        gc.collect()
        time.sleep(0.001)
