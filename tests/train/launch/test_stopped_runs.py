"""Whole runs of which a rank is stopped, killed or fails: they end in time, with one error that names it."""

import contextlib
import os
import pickle
import re
import signal
import sys
import time

import pytest

from parallel_ops.train.checkpoint.checkpoints import steps_in
from parallel_ops.train.launch.heartbeats import SLOW
from support.ranks import processes

# Seconds: the shortest in which a thread of a busy machine surely gets its turn.
TIMEOUT = 10


STEPS = ("--steps", "1000000", "--set", f"run.timeout={TIMEOUT}", "--set", "logging.interval=1")


def wait_for(text, logs, seconds=240):
    end = time.monotonic() + seconds
    while not all(text in log.read_text() for log in logs):
        assert time.monotonic() < end, [log.read_text()[-2000:] for log in logs]
        time.sleep(0.1)


def last_line(log):
    return log.read_text().splitlines()[-1]


def wait_for_step(step, log):
    """Until a rank has taken a step, and the records, which are written once a second, have it too."""
    wait_for(f"step {step}/", [log])
    time.sleep(2.0)


@contextlib.contextmanager
def three(folder):
    """Ranks that something else than the command started: the processes, and what they print, after three steps."""
    logs, port = [folder / f"rank-{rank}" for rank in range(3)], processes.free_port()
    options = ("--set", "parallel=dp=3,zero=3,global_batch=3", "--set", "checkpoint.dir=none")
    started = [
        processes.start(folder, log, "run.toml", *STEPS, *options, **processes.as_rank(rank, 3, port))
        for rank, log in enumerate(logs)
    ]
    try:
        wait_for_step(3, logs[0])
        yield started, logs
    finally:
        for process in started:
            process.kill()


@pytest.mark.runs
def test_a_process_of_the_command_is_stopped(folder):
    log = folder / "log"
    with processes.running(folder, log, "run.toml", *STEPS) as run:
        wait_for_step(5, log)
        workers = processes.ranks_of(run.pid)
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGSTOP)
        begin = time.monotonic()
        assert run.wait(120) == 1
        assert time.monotonic() - begin > TIMEOUT
    last = last_line(log)
    assert last.startswith("error: rank 1 did not respond for 1") and "s ago: step " in last, log.read_text()
    assert f"(run.timeout is {TIMEOUT} s)" in last and "Traceback" not in log.read_text()
    assert not any(map(processes.alive, workers))
    # The call that does not return, and torch's own record of it.
    said = re.search(r"; rank 0 waits in (\w+) number \d+ of group .*; torch's flight recorder: (\S+)$", last)
    assert said, last
    recorded = pickle.loads((folder / said[2]).read_bytes())["entries"]
    assert any(said[1] in entry["profiling_name"] and not entry["retired"] for entry in recorded)


STOPS = """
import os, signal, threading
from multiprocessing import util

def stop(*thread, **options):
    if os.environ.get("RANK") == "{rank}" and all(t.name.startswith("parallel_ops-") for t in thread[:1]):
        os.kill(os.getpid(), signal.SIGSTOP)
    return join(*thread, **options) if thread else None

join = threading.Thread.join
"""
# Before others know that it has finished, or as its process exits.
BEFORE, AT_EXIT = "threading.Thread.join = stop", "util.Finalize(None, stop, exitpriority=0)"


@pytest.mark.parametrize(("rank", "when"), [(0, BEFORE), (0, AT_EXIT), (1, AT_EXIT)])
@pytest.mark.runs
def test_a_process_of_the_command_is_stopped_after_the_last_step(folder, rank, when):
    (folder / "sitecustomize.py").write_text(STOPS.format(rank=rank) + when)
    log = folder / "log"
    options = ("--steps", "2", "--set", "run.timeout=5")
    with processes.running(folder, log, "run.toml", *options, PYTHONPATH=str(folder)) as run:
        assert run.wait(240) == 1
    wanted = f"error: rank {rank} did not respond for {5 * SLOW} s after the last step: killed"
    assert last_line(log) == wanted and "Traceback" not in log.read_text()
    assert list(steps_in(folder / "checkpoints")) == [2]


@pytest.mark.parametrize("stopped", [0, 2])
@pytest.mark.runs
def test_a_rank_that_something_else_started_is_stopped(folder, stopped):
    """Rank 0 has the store of these three, and the others end without it too."""
    with three(folder) as (started, logs):
        os.kill(started[stopped].pid, signal.SIGSTOP)
        ends = [process.wait(120) for rank, process in enumerate(started) if rank != stopped]
        assert ends == [1, 1] and started[stopped].poll() is None
    said = [last_line(log) for rank, log in enumerate(logs) if rank != stopped]
    if stopped == 0:
        assert all(line.startswith("error: the store of the run, rank 0's, does not answer; rank ") for line in said)
    else:
        reasons = {line.partition("; rank ")[0] for line in said}  # before what each rank itself waits in
        assert len(reasons) == 1 and said[0].startswith("error: rank 2 did not respond"), said


@pytest.mark.runs
def test_a_rank_that_fails_is_named_by_those_that_lose_it(folder):
    """Not stopped but killed: no timeout passes."""
    with three(folder) as (started, logs):
        started[1].kill()
        assert [started[rank].wait(120) for rank in (0, 2)] == [1, 1]
    said = {last_line(logs[rank]) for rank in (0, 2)}
    wanted = "error: rank 1 is gone: killed, or on a node that is lost; rank 1's last activity: step "
    assert len(said) == 1 and said.pop().startswith(wanted)


PIPELINE = ("--set", "parallel=pp=3,schedule=zb-h1,global_batch=4", "--set", "model.num_layers=3")
PLANTED = """
import os, signal, time

from parallel_ops.models import Transformer

forward, calls = Transformer.forward, []

def planted(self, *args, **options):
    calls.append(1)
    if os.environ.get("RANK") == "1" and len(calls) == 10:  # of four micro-batches a step
        {what}
    return forward(self, *args, **options)

Transformer.forward = planted
"""
RAISES = 'raise FloatingPointError("a planted error")'
# As soon as the record of this rank, which is written once a second, has the micro-batch.
DIES = """
        from parallel_ops.train.launch.watchdog import Watchdog
        write = Watchdog._write

        def last(self, *args, **options):
            text = self.activity.now[1]
            write(self, *args, **options)
            if "micro-batch 2" in text:
                os.kill(os.getpid(), signal.{name})

        Watchdog._write = last
        time.sleep(100)
"""


def planted(folder, what):
    """The environment of a pipeline whose rank 1 does this in the second micro-batch of step 3."""
    (folder / "sitecustomize.py").write_text(PLANTED.format(what=what))
    return {"PYTHONPATH": os.pathsep.join((str(folder), *sys.path))}


@pytest.mark.runs
def test_a_stage_of_a_pipeline_is_stopped_or_killed(folder):
    for number, said in ((signal.SIGSTOP, "rank 1 did not respond for"), (signal.SIGKILL, "rank 1")):
        log = folder / number.name
        options = (*STEPS, *PIPELINE, "--set", "checkpoint.dir=none")
        environment = planted(folder, DIES.format(name=number.name))
        with processes.running(folder, log, "run.toml", *options, **environment) as run:
            wait_for("step 2/", [log])
            workers = processes.ranks_of(run.pid)
            assert run.wait(240) == 1
        assert last_line(log).startswith(f"error: {said}"), log.read_text()
        assert "step 3, stage 1, micro-batch 2, forward" in last_line(log), log.read_text()
        assert not any(map(processes.alive, workers))


@pytest.mark.runs
def test_a_stage_of_a_pipeline_raises(folder):
    log = folder / "log"
    with processes.running(folder, log, "run.toml", *STEPS, *PIPELINE, **planted(folder, RAISES)) as run:
        assert run.wait(240) == 1
    assert "a planted error" in last_line(log) and "step 3, stage 1, micro-batch 2, forward" in last_line(log)
