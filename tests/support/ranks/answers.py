"""A function for ranks in the tests of ``benchmarks.harness.processes``; importing this takes no time."""

import os
import time


def answer(rank: int, size: int, what: str) -> str:
    if what == "raise" and rank == 1:
        raise ValueError("wrong on rank 1")
    if what == "exit" and rank == 0:
        os._exit(3)
    if what == "hang" and rank == 1:
        time.sleep(600)
    return os.environ.get("PROOF", "")
