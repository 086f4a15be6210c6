"""What ranks do in the tests of ``benchmarks.gpu_session.processes``; importing this takes no time."""

import os
import time


def answer(rank: int, size: int, what: str) -> None:
    if what == "raise" and rank == 1:
        raise ValueError("wrong on rank 1")
    if what == "exit" and rank == 0:
        os._exit(3)
    if what == "hang" and rank == 1:
        time.sleep(600)
    if what == "variable" and os.environ.get("PROOF") != "set":
        raise ValueError("the variable is not set")
