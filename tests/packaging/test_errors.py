"""Errors of the compiled ops, in an extension that brings its own copy of the C++ library, as some CUDA images link."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.further import thinned

ROOT = Path(__file__).parents[2]
SOURCE = """
#include <cstring>
#include "error.h"

extern "C" void message(char* into) {
  try {
    PARALLEL_OPS_CHECK(1 + 1 == 3, "op: row ", int64_t{-3}, " of ", size_t{7}, ": p = ", 0.5, ", ", std::string("no"));
  } catch (const std::exception& error) {
    std::strcpy(into, error.what());
  }
}
"""
CALL = """
import ctypes, sys, torch
into = ctypes.create_string_buffer(100)
ctypes.CDLL(sys.argv[1]).message(into)
print(into.value.decode())
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("library", thinned(["-static-libstdc++", "-shared-libgcc"]))
def test_a_message_is_made_without_streams(tmp_path, library):
    source, built = tmp_path / "message.cpp", tmp_path / "message.so"
    source.write_text(SOURCE)
    flags = ["-std=c++17", "-shared", "-fPIC", "-include", "cstdint", "-I", str(ROOT / "csrc"), library]
    subprocess.run(["c++", *flags, str(source), "-o", str(built)], check=True, timeout=120)
    command = [sys.executable, "-c", CALL, str(built)]
    called = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert called.stdout == "op: row -3 of 7: p = 0.5, no\n", called.stderr


def test_nothing_in_the_extension_writes_through_a_stream():
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp") and "nccl" not in p.parts]
    found = [
        p.name for p in sources for word in ("STD_TORCH_CHECK", "<sstream>", "<iostream>") if word in p.read_text()
    ]
    assert sources and not found
