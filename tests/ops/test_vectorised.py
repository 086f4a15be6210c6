"""The machine code of the CPU kernels: loops that the compiler did not vectorise take several times as long."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import parallel_ops

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="needs objdump, and clones for x86-64-v4"
)


def test_loops_of_16_bits_use_vectors_of_512_bits():
    (library,) = Path(parallel_ops.__file__).parent.glob("_C*.so")
    made_by = library.read_bytes()
    gcc = re.search(rb"GCC: \([^)]*\) (\d+)", made_by)
    if b"clang version" in made_by or gcc is None or int(gcc[1]) < 12:
        pytest.skip("compiled by g++ 11 or Clang, which make no clones")
    command = ["objdump", "-dC", "--no-show-raw-insn", str(library)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = dict(function.split("\n", 1) for function in re.split(r"\n\n(?=[0-9a-f]{16} <)", code)[1:])
    loops = [name for name in functions if "[clone .arch_x86_64_v4]>" in name and re.search("Half|BFloat16", name)]
    assert len(loops) > 100
    assert not [name for name in loops if "zmm" not in functions[name]]
