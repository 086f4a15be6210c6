"""Ranks on this machine: an all-reduce of all of them, and a message of each pair, each within a time limit.

A rank reports what it is about to do before it does it. Where nothing comes back in time, the last reports say which
call does not return, and between whom.
"""

import multiprocessing
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel_ops.doctor.finding import Finding
from parallel_ops.train.launch.worker import gpu_of_rank

# Elements of the all-reduce, whose sum is known.
_COUNT = 1 << 20
# Seconds in which processes import torch and meet.
_START = 60.0
_CURE = (
    "look at NCCL_DEBUG=INFO, a firewall, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, and on GPUs at NCCL_P2P_DISABLE=1, "
    "which tells a broken P2P from a broken network"
)


def check_ranks(
    ranks: int, backend: str, seconds: float, probe: Callable[..., None] | None = None
) -> Iterator[Finding]:
    """Starts ``ranks`` processes, one a GPU with NCCL.

    Args:
        seconds: For each call, after the first, which also starts the processes.
        probe: What each rank runs, for tests: by default ``probe_rank``.
    """
    spawn = multiprocessing.get_context("spawn")
    reports: Any = spawn.Queue()
    port = _free_port()
    processes = [
        spawn.Process(target=probe or probe_rank, args=(rank, ranks, backend, port, seconds, reports), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield from _read(reports, range(ranks), seconds, dict(enumerate(processes)))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _read(
    reports: Any, ranks: Iterable[int], seconds: float, processes: Mapping[int, Any], *, patience: float = 1.0
) -> Iterator[Finding]:
    """Findings from what ranks report, until all have ended, one is lost or none reports in time.

    Args:
        processes: Those of ranks that were started here. patience: Factor of the time between two reports.
    """
    doing, done = dict.fromkeys(ranks, "starting"), set[int]()
    deadline = time.monotonic() + _START + seconds
    while len(done) < len(doing):
        try:
            rank, state, text, took = reports.get(timeout=0.2)
        except queue.Empty:
            lost = [r for r, process in processes.items() if r not in done and not process.is_alive()]
            if lost:
                code = processes[lost[0]].exitcode
                yield Finding(
                    "failed", doing[lost[0]], f"rank {lost[0]} ended with exit code {code}",
                    "a negative code is a signal: -9 is most often the host's memory, -11 a fault in a library",
                )  # fmt: skip
                return
            if time.monotonic() > deadline:
                yield _stuck(doing, done, seconds * patience)
                return
            continue
        if state == "begins":
            doing[rank] = text
        deadline = time.monotonic() + 2 * seconds * patience + (_START if "starting" in doing.values() else 0.0)
        if state == "failed":
            done.add(rank)
            yield Finding("failed", doing[rank], f"rank {rank}: {text}", _CURE)
        elif state == "ends":
            done.add(rank)
        elif state == "done" and text != "end" and (rank == 0 or text.startswith("send")):
            yield Finding("ok", text, f"{took * 1e3:.1f} ms")


def _stuck(doing: dict[int, str], done: set[int], seconds: float) -> Finding:
    waiting = {rank: call for rank, call in doing.items() if rank not in done}
    calls = sorted(set(waiting.values()))
    who = "; ".join(f"{call}: rank {', '.join(str(r) for r, c in waiting.items() if c == call)}" for call in calls)
    return Finding("failed", calls[0], f"no answer within {seconds:.0f} s ({who})", _CURE)


def check_this_rank(seconds: float) -> Iterator[Finding]:
    """The same for a process that torchrun has started as a rank, on any node."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reports = queue.Queue[tuple[int, str, str, float]]()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    probe = threading.Thread(target=probe_rank, args=(rank, ranks, backend, None, seconds, reports), daemon=True)
    probe.start()
    failed = False
    # Between two calls of this rank are those of other pairs.
    for finding in _read(reports, [rank], seconds, {}, patience=ranks):
        failed = failed or finding.status == "failed"
        yield finding
    if not failed:
        probe.join()  # a thread of the backend that outlives its group aborts the process


def probe_rank(rank: int, ranks: int, backend: str, port: int | None, seconds: float, reports: Any) -> None:
    """Runs the checks of one rank, and reports ``(rank, state, text, seconds)``.

    Args:
        port: Of the store on this machine; ``None`` in torchrun's environment.
    """

    def run(name: str, call: Callable[[], None]) -> None:
        reports.put((rank, "begins", name, 0.0))
        start = time.perf_counter()
        call()
        reports.put((rank, "done", name, time.perf_counter() - start))

    try:
        cuda = backend == "nccl"
        own = rank if port is not None else gpu_of_rank() if cuda else 0
        device = torch.device("cuda", own) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        torch.set_num_threads(1)
        if port is not None:
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
        run(
            "process group",
            lambda: dist.init_process_group(
                backend, timeout=timedelta(seconds=seconds), device_id=device if cuda else None
            ),
        )
        # That of a run's checkpoints. Without GLOO_SOCKET_IFNAME gloo listens where the host's name points, which on
        # many nodes is 127.0.1.1: NCCL works there, and the run does not start.
        limit = timedelta(seconds=seconds)
        run("gloo group", lambda: dist.barrier(dist.new_group(backend="gloo", timeout=limit)))
        x = torch.ones(_COUNT, device=device)

        def all_reduce() -> None:
            x.fill_(rank + 1)
            dist.all_reduce(x)
            if not bool((x == ranks * (ranks + 1) / 2).all()):
                raise RuntimeError(f"the sum is {x[0].item():g}, not {ranks * (ranks + 1) / 2:g}: data is corrupted")

        run("all-reduce, first", all_reduce)
        run("all-reduce of 4 MiB", all_reduce)
        for source in range(ranks):
            for target in range(ranks):
                if source != target and rank in (source, target):
                    _send(run, x, rank, source, target)
        run("end", all_reduce)  # no rank leaves while another still sends
        dist.destroy_process_group()
        reports.put((rank, "ends", "", 0.0))
    except Exception as error:  # whatever it is, it is what the user must see
        reports.put((rank, "failed", f"{type(error).__name__}: {error}".partition("\n")[0], 0.0))


def _send(run: Callable[[str, Callable[[], None]], None], x: torch.Tensor, rank: int, source: int, target: int) -> None:
    def call() -> None:
        if rank == source:
            dist.send(x.fill_(source), target)
        else:
            dist.recv(x.fill_(-1), source)
            if not bool((x == source).all()):
                raise RuntimeError("what arrived is not what was sent")

    if rank == target:
        run(f"send {source} to {target}", call)
    else:
        call()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])
