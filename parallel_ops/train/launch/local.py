"""Starts one local process per rank, with torch's elastic agent.

The parent forwards SIGINT to its workers as SIGTERM, and they save a checkpoint. Workers exit with the parent, however
it ends. Only the first rank's own error is reported; follow-up connection errors are dropped. A suspended process
ignores SIGTERM, so workers that remain for a while after a failure, or long after another has finished, are killed.
"""

import contextlib
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from parallel_ops._internal.command_line import unbroken_output
from parallel_ops.comm.errors import named
from parallel_ops.train.checkpoint.checkpoints import CheckpointError
from parallel_ops.train.config import Settings
from parallel_ops.train.launch.options import Start
from parallel_ops.train.launch.signals import GracefulShutdown
from parallel_ops.train.launch.watchdog import during, is_lost, longest
from parallel_ops.train.launch.worker import run_rank
from parallel_ops.train.planner_bridge import uses_cuda
from parallel_ops.train.results import NotFinite, Result

FAILED = 1
# Errors whose message suffices, without a traceback.
PLAIN = (ValueError, OSError, CheckpointError, NotFinite)
# Seconds that the other processes have to exit after a failure: they look for the lost rank, which takes three.
_GRACE = 10.0


class Failure(RuntimeError):
    """A run that failed in another process.

    Attributes:
        trace: The traceback of that process; empty if the message suffices.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class Stopped(NamedTuple):
    """The end of a run: its result, if it took steps, and the signal that stopped it."""

    result: Result | None
    signal: str | None


def run_here(settings: Settings, start: Start) -> Stopped:
    """Trains in local processes, one per rank of the plan.

    Raises:
        ValueError: There are too few GPUs. Failure: A process failed.
    """
    ranks = settings.plan.gpus
    if uses_cuda(settings) and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"parallel: the plan has {ranks} ranks, and this torch sees {torch.cuda.device_count()} GPUs; change the "
            "plan, set run.device=cpu, or start it with torchrun on several nodes"
        )
    for name in ("distributed.elastic", "distributed.launcher", "multiprocessing.spawn"):
        # The error is reported once, by this process.
        logging.getLogger(f"torch.{name}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="parallel_ops-") as folder:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=Path(folder).name, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=start.max_restarts, monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )  # fmt: skip
        threads = max(1, torch.get_num_threads() // ranks)
        agent = _Agent(config, (settings, start, folder, threads))
        limit = longest(settings.run.timeout)
        stopped = agent.wait(Path(folder), limit)
        if agent.error is None and agent.results is not None:
            result = agent.results[0]
            return Stopped(result, stopped or (result.stopped if result else None))
        failures = _failures(Path(folder))
        if agent.overdue and not failures:
            raise Failure(f"{agent.overdue} did not respond for {limit:.0f} s after the last step: killed")
        if stopped and not failures:
            return Stopped(None, stopped)  # nothing to save yet
        if isinstance(agent.error, ChildFailedError):
            raise _first_failure(agent.error, Path(folder), failures) from None
        raise agent.error or Failure("the processes ended without a result")


class _Agent:
    """The elastic agent in a thread that blocks SIGINT, as its processes then do. The main thread handles signals."""

    def __init__(self, config: LaunchConfig, arguments: tuple[Any, ...]) -> None:
        self.results: dict[int, Any] | None = None
        self.error: BaseException | None = None
        self.overdue = ""  # the ranks that were killed long after another one had finished
        self._thread = threading.Thread(target=self._run, args=(config, arguments), name="elastic agent", daemon=True)

    def _run(self, config: LaunchConfig, arguments: tuple[Any, ...]) -> None:
        resource_tracker.ensure_running()  # its start would unblock the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.results = elastic_launch(config, _rank)(*arguments)
        except BaseException as error:
            self.error = error

    def wait(self, folder: Path, seconds: float) -> str | None:
        """Waits until all processes have ended. The first stop signal is forwarded to them as SIGTERM, the second kills
        them.

        Args:
            seconds: How long other processes may take to finish after the first one.

        Returns:
            The name of the first signal, or ``None``.
        """
        asked: list[str] = []

        def note(number: int, _: Any) -> None:
            asked.append(signal.Signals(number).name)
            (folder / "stop").touch()  # for processes that start after this
            for child in multiprocessing.active_children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid or 0, signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            self._thread.start()
            leftover = _Leftover(folder, seconds)
            while self._thread.is_alive() and not self.overdue:
                self.overdue = leftover.kill_overdue()
                self._thread.join(0.2)
            if self.overdue:
                self._thread.join(_GRACE)  # a thread that still runs would abort the interpreter at its exit
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return asked[0] if asked else None


class _Leftover:
    """Kills processes that remain too long after another one has failed or finished."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._due: dict[int, float] = {}
        self._seen: set[str] = set()
        self._finished = False

    def kill_overdue(self) -> str:
        """Names the ranks that it killed after the last step, since the agent may then wait forever; else empty."""
        now = time.monotonic()
        there = {child.pid or 0 for child in multiprocessing.active_children()}
        names = {path.name for path in self._folder.iterdir()} - self._seen
        self._seen |= names
        for prefix, seconds in (("failed-", _GRACE), ("finished-", self._seconds)):
            if any(name.startswith(prefix) for name in names):
                # Processes of a later start have other ids.
                self._due = {pid: min(self._due.get(pid, math.inf), now + seconds) for pid in there}
                self._finished = prefix == "finished-"
        late = [pid for pid, end in self._due.items() if now > end and pid in there]
        for pid in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._due = {pid: end for pid, end in self._due.items() if pid in there and pid not in late}
        # Processes that have finished do not exit before the agent has the results of all.
        running, finished = self._ranks_of("running", late), self._ranks_of("finished", late)
        return named(running or finished) if late and self._finished else ""

    def _ranks_of(self, state: str, pids: list[int]) -> list[int]:
        paths = (path for pid in pids for path in self._folder.glob(f"{state}-{pid}-*"))
        return [int(path.name.rpartition("-")[2]) for path in paths]


def _rank(settings: Settings, start: Start, folder: str, threads: int) -> Result | None:
    """The main function of a local process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    running = Path(folder, f"running-{os.getpid()}-{rank}")
    running.touch()
    if Path(folder, "stop").exists():
        return None
    if attempt:
        start = replace(start, resume=True)

    def report(message: str, **more: Any) -> None:
        failure = {"attempt": attempt, "rank": rank, "time": time.time(), "message": message}
        path = Path(folder, f"failed-{attempt}-{rank}.json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps({**failure, "lost": False, "names": True, "trace": "", **more}), encoding="utf-8")
        part.rename(path)

    def note(text: str) -> None:
        Path(folder, f"activity-{rank}").write_text(text, encoding="utf-8")

    try:
        with unbroken_output():
            result = run_rank(settings, start, GracefulShutdown(), report, note)
        running.rename(running.with_name(f"finished-{os.getpid()}-{rank}"))
        return result
    except Exception as error:
        lost = is_lost(error)
        trace = "" if isinstance(error, PLAIN) else traceback.format_exc()
        report(str(error) if lost else _in_words(error), lost=lost, names=lost, trace=trace)
        sys.stdout.flush()
        sys.stderr.flush()
        # A regular exit would wait for collectives that never finish.
        os._exit(FAILED)


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, PLAIN) else f"{type(error).__name__}: {error}{during(error)}"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(FAILED)


def _failures(folder: Path) -> list[dict[str, Any]]:
    """The failures of the last attempt: ranks' own errors first, lost connections last, each by time."""
    failures = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failed-*.json")]
    last = max((found["attempt"] for found in failures), default=0)
    return sorted((f for f in failures if f["attempt"] == last), key=lambda found: (found["lost"], found["time"]))


def _first_failure(error: ChildFailedError, folder: Path, failures: list[dict[str, Any]]) -> Failure:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0 and (not failures or failures[0]["lost"]):
        file = folder / f"activity-{rank}"
        last = f"; its last activity: {file.read_text()}" if file.exists() else ""
        return Failure(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}{last}")
    if not failures:
        return Failure(f"rank {rank} ended with exit code {failure.exitcode}")
    alike = {found["message"] for found in failures if not found["lost"]}
    everywhere = len(alike) == 1 and len(failures) > 1 and not failures[0]["trace"]
    where = "" if everywhere or failures[0]["names"] else f"rank {failures[0]['rank']}: "
    return Failure(f"{where}{failures[0]['message']}", failures[0]["trace"] if not failures[0]["lost"] else "")
