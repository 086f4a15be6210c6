"""Starts one local process per rank, with torch's elastic agent.

The parent has a store with a board, on which ranks write their state, what they do, and the error they end with. It
forwards SIGINT to its workers as SIGTERM, and they save a checkpoint. Workers exit with the parent, however it ends.
Only the first rank's own error is reported; follow-up connection errors are dropped. A suspended process ignores
SIGTERM, so workers that remain for a while after a failure, or long after another has finished, are killed.
"""

import contextlib
import functools
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from parallel_ops._internal.command_line import unbroken_output
from parallel_ops.comm.errors import Board, named
from parallel_ops.train.checkpoint.checkpoints import CheckpointError
from parallel_ops.train.config import Settings
from parallel_ops.train.launch.options import Start
from parallel_ops.train.launch.signals import GracefulShutdown, stop_signals
from parallel_ops.train.launch.watchdog import during, is_lost, longest
from parallel_ops.train.launch.worker import run_rank
from parallel_ops.train.planner_bridge import uses_cuda
from parallel_ops.train.results import NotFinite, Result

FAILED = 1
# Errors whose message suffices, without a traceback.
PLAIN = (ValueError, OSError, CheckpointError, NotFinite)
# Seconds that the other processes have to exit after a failure: they look for the lost rank, which takes three.
_GRACE = 10.0
# The parent's place on the board, after those of the ranks.
_PARENT = -1


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
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=os.path.basename(folder), rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=start.max_restarts, monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )  # fmt: skip
        threads = max(1, torch.get_num_threads() // ranks)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "localhost", 0, is_master=True, wait_for_workers=False
        )
        board = Board(store, _PARENT, ranks)
        agent = _Agent(config, (settings, start, store.port, threads))
        limit = longest(settings.run.timeout)
        stopped = agent.wait(board, limit)
        if agent.error is None and agent.results is not None:
            result = agent.results[0]
            return Stopped(result, stopped or (result.stopped if result else None))
        failures = _failures(board)
        if agent.overdue and not failures:
            raise Failure(f"{agent.overdue} did not respond for {limit:.0f} s after the last step: killed")
        if stopped and not failures:
            return Stopped(None, stopped)  # nothing to save yet
        if isinstance(agent.error, ChildFailedError):
            raise _first_failure(agent.error, board, failures) from None
        raise agent.error or Failure("the processes ended without a result")


class _Agent:
    """The elastic agent in a thread that blocks what a terminal sends to all processes, as its processes then do. The
    main thread handles signals."""

    def __init__(self, config: LaunchConfig, arguments: tuple[Any, ...]) -> None:
        self.results: dict[int, Any] | None = None
        self.error: BaseException | None = None
        self.overdue = ""  # the ranks that were killed long after another one had finished
        self._thread = threading.Thread(target=self._run, args=(config, arguments), name="elastic agent", daemon=True)

    def _run(self, config: LaunchConfig, arguments: tuple[Any, ...]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        resource_tracker.ensure_running()  # its start would unblock the next signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.results = elastic_launch(config, _rank)(*arguments)
        except BaseException as error:
            self.error = error

    def wait(self, board: Board, seconds: float) -> str | None:
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
            board.write("stop")  # for processes that start after this
            for child in _processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)

        before = {number: signal.signal(number, note) for number in stop_signals()}
        try:
            self._thread.start()
            leftover = _Leftover(board, seconds)
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

    def __init__(self, board: Board, seconds: float) -> None:
        self._board, self._seconds = board, seconds
        self._due: dict[int, float] = {}
        self._seen: set[tuple[int, str]] = set()
        self._finished = False

    def kill_overdue(self) -> str:
        """Names the ranks that it killed after the last step, since the agent may then wait forever; else empty."""
        now = time.monotonic()
        there = _processes()
        states = {rank: json.loads(text) for rank, text in _texts(self._board, "state").items()}
        new = {(state["pid"], state["name"]) for state in states.values()} - self._seen
        self._seen |= new
        for name, seconds in (("failed", _GRACE), ("finished", self._seconds)):
            if any(name == other for _, other in new):
                # Processes of a later start have other ids.
                self._due = {pid: min(self._due.get(pid, math.inf), now + seconds) for pid in there}
                self._finished = name == "finished"
        late = [pid for pid, end in self._due.items() if now > end and pid in there]
        for pid in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._due = {pid: end for pid, end in self._due.items() if pid in there and pid not in late}
        # Processes that have finished do not exit before the agent has the results of all.
        killed = {rank: state["name"] for rank, state in states.items() if state["pid"] in late}
        running = [rank for rank, name in killed.items() if name == "running"]
        return named(running or killed) if late and self._finished else ""


def _processes() -> set[int]:
    """Ids of the local processes that the agent has not reaped.

    ``multiprocessing.active_children`` would reap those that have ended: the agent's thread, which reaps them too, may
    then find no exit code, and counts that as a failure.
    """
    return {child.pid for child in list(multiprocessing.process._children) if child.pid}  # type: ignore[attr-defined]


def _texts(board: Board, topic: str) -> dict[int, str]:
    return board.read(topic, board.having(topic, range(board.ranks)))


def _rank(settings: Settings, start: Start, port: int, threads: int) -> Result | None:
    """The main function of a local process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    store = dist.TCPStore("localhost", port, is_master=False)  # type: ignore[attr-defined]
    board = Board(store, rank, settings.plan.gpus)

    def enter(name: str) -> None:
        board.write("state", json.dumps({"pid": os.getpid(), "name": name}))

    enter("running")
    if board.having("stop", [_PARENT]):
        return None
    if attempt:
        start = replace(start, resume=True)

    def report(message: str, **more: Any) -> None:
        failure = {"attempt": attempt, "rank": rank, "time": time.time(), "message": message}
        board.write("failure", json.dumps({**failure, "lost": False, "names": True, "trace": "", **more}))
        enter("failed")
        board.having("failure", [rank])  # answered: the process may end

    try:
        with unbroken_output():
            result = run_rank(settings, start, GracefulShutdown(), report, functools.partial(board.write, "activity"))
        enter("finished")
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


def _failures(board: Board) -> list[dict[str, Any]]:
    """The failures of the last attempt: ranks' own errors first, lost connections last, each by time."""
    failures = [json.loads(text) for text in _texts(board, "failure").values()]
    last = max((found["attempt"] for found in failures), default=0)
    return sorted((f for f in failures if f["attempt"] == last), key=lambda found: (found["lost"], found["time"]))


def _first_failure(error: ChildFailedError, board: Board, failures: list[dict[str, Any]]) -> Failure:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0 and (not failures or failures[0]["lost"]):
        activity = _texts(board, "activity").get(rank)
        last = f"; its last activity: {activity}" if activity else ""
        return Failure(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}{last}")
    if not failures:
        return Failure(f"rank {rank} ended with exit code {failure.exitcode}")
    alike = {found["message"] for found in failures if not found["lost"]}
    everywhere = len(alike) == 1 and len(failures) > 1 and not failures[0]["trace"]
    where = "" if everywhere or failures[0]["names"] else f"rank {failures[0]['rank']}: "
    return Failure(f"{where}{failures[0]['message']}", failures[0]["trace"] if not failures[0]["lost"] else "")
