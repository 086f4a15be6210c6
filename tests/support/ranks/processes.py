"""Runs of the command in processes of this machine, for tests that stop or kill some of them."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COMMAND = (sys.executable, "-m", "parallel_ops", "train")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
    return port


def start(folder: Path, log: Path, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
    """A process of ``parallel-ops train``, or ``arguments`` whole if they begin with a path; both outputs in a file."""
    call = arguments if arguments[0].startswith("/") else (*COMMAND, *arguments)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    with log.open("wb") as out:
        return subprocess.Popen(call, cwd=folder, env=environment, stdout=out, stderr=out)


@contextlib.contextmanager
def running(folder: Path, log: Path, *arguments: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process of ``start``, killed at the end of the block."""
    process = start(folder, log, *arguments, **env)
    try:
        yield process
    finally:
        process.kill()


def as_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives a rank; rank 0 has the store."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip


def ranks_of(pid: int) -> list[int]:
    """The processes that a command has started as its ranks, in their order; empty where not all are there yet."""
    found = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


def alive(pid: int) -> bool:
    """Whether a process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def send(pid: int, number: int) -> bool:
    """Whether a process was there to get a signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
