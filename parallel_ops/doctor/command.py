"""Runs the checks one after another and prints them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from parallel_ops.doctor.finding import Finding
from parallel_ops.doctor.machine import check_machine
from parallel_ops.doctor.ranks import check_ranks, check_this_rank
from parallel_ops.train.launch.rendezvous import first_rank, under_torchrun

_RUN = """
[run]
steps = 2
device = "{device}"

[model]
vocab_size = 256
seq_length = 32
num_layers = 1
hidden_size = 64
num_heads = 4

[data]
paths = ["{data}"]

[parallel]
dp = {ranks}
global_batch = {ranks}
micro_batch = 1

[precision]
dtype = "fp32"
"""


def check_all(processes: int | None, seconds: float) -> Iterator[Finding]:
    """The checks of the machine, and if none of them failed those of its ranks, and then a run of two steps.

    Under torchrun this process is one of the ranks, on any number of nodes; there is no run of two steps then.

    Args:
        processes: Ranks; by default one on each GPU, or two on CPUs. seconds: For each message, and for the start.

    Raises:
        ValueError: There are more ranks than GPUs.
    """
    if under_torchrun():
        yield from (finding for finding in check_machine() if first_rank() or finding.status != "ok")
        yield from check_this_rank(seconds)
        return
    gpus = torch.cuda.device_count()
    ranks = processes or gpus or 2
    if ranks > gpus > 0:
        raise ValueError(f"--processes: there are {gpus} GPUs, got {ranks}")
    for part in (
        check_machine(), check_ranks(ranks, "nccl" if gpus else "gloo", seconds) if ranks > 1 else iter(()),
        _two_steps(ranks, "cuda" if gpus else "cpu", seconds),
    ):  # fmt: skip
        failed = False
        for finding in part:
            failed = failed or finding.status == "failed"
            yield finding
        if failed:
            return


def _two_steps(ranks: int, device: str, seconds: float) -> Iterator[Finding]:
    """A run of the trainer, by the command that a user would start."""
    with tempfile.TemporaryDirectory(prefix="parallel_ops-doctor-") as folder:
        data, file = Path(folder) / "tokens.npy", Path(folder) / "run.toml"
        np.save(data, np.random.default_rng(0).integers(256, size=4096, dtype=np.uint16))
        file.write_text(_RUN.format(device=device, data=data, ranks=ranks), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        command = [sys.executable, "-m", "parallel_ops", "train", str(file)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=120 + 10 * seconds, check=False
            )
        except subprocess.TimeoutExpired:
            yield Finding(
                "failed", "two steps", "did not end in time", "run it by hand: parallel-ops train, see --help"
            )
            return
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            yield Finding("failed", "two steps", lines[-1] if lines else f"exit code {done.returncode}", "see above")
            return
        yield Finding("ok", "two steps", f"of a small model on {ranks} rank{'s' if ranks > 1 else ''}")
