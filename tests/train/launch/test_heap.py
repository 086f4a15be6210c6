"""Freed memory stays: in a process of its own, since it stays so for good."""

import platform
import subprocess
import sys

import pytest

from parallel_ops.train.launch import malloc as heap

_FAULTS = """
import resource, runpy, sys
import numpy as np

if sys.argv[2] == "keep":
    runpy.run_path(sys.argv[1])["keep_freed_memory"]()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(64 << 20, np.uint8).fill(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    command = [sys.executable, "-c", _FAULTS, heap.__file__, how]
    return [int(n) for n in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_second_use_faults_nothing_in():
    given_back, kept = faults("give back"), faults("keep")
    assert min(given_back[1:]) > 20  # 32 huge pages of 2 MiB, or 16,384 small ones
    assert max(kept[1:]) <= 4
