"""Random signals to random ranks at random moments: each run ends in time, says why, and goes on when it is resumed."""

import random
import re
import signal
import subprocess
import time

import pytest

from parallel_ops.train.checkpoint.checkpoints import steps_in
from parallel_ops.train.launch.heartbeats import SLOW
from support.ranks import processes

TIMEOUT = 20
# What a run may take to end after a signal: the longest timeout, and what a busy machine adds.
END = SLOW * TIMEOUT + 60
START = 900


class Trial:
    """One run, and the signal that one of its ranks gets."""

    def __init__(self, seed, folder):
        draw = random.Random(seed)
        self.folder, self.log = folder, folder / f"log-{seed}"
        self.ranks = draw.choice((2, 3, 4))
        self.rank = draw.randrange(self.ranks)
        self.signal = draw.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM))
        # Before the first step in a third of the trials; up to its last step in the others.
        self.after = draw.choice((None, *[draw.randrange(1, 25)] * 2))
        self.delay = draw.uniform(0, 8 if self.after is None else 0.5)
        self.steps = max(steps_in(folder / "checkpoints"), default=0) + 24
        self.options = ("--set", f"checkpoint.asynchronous={draw.choice(('true', 'false'))}")

    def __str__(self):
        when = "the start" if self.after is None else f"{self.after} steps"
        return f"{self.signal.name} to rank {self.rank} of {self.ranks}, {self.delay:.2f} s after {when}"

    def start(self):
        return processes.start(
            self.folder, self.log, "run.toml", "--resume", "--processes", str(self.ranks), "--steps", str(self.steps),
            "--set", f"run.timeout={TIMEOUT}", "--set", "checkpoint.interval=3", "--set", "parallel.global_batch=12",
            *self.options,
        )  # fmt: skip

    def said(self):
        return self.log.read_text()

    def signalled(self, run):
        """The ranks, once one of them has the signal; none if the run has ended before."""
        end = time.monotonic() + START
        while len(workers := processes.ranks_of(run.pid)) < self.ranks or not self._due():
            assert time.monotonic() < end, f"{self}: {self.said()}"
            if run.poll() is not None:
                return []
            time.sleep(0.02)
        time.sleep(self.delay)
        return workers if processes.send(workers[self.rank], self.signal) else []

    def _due(self):
        return self.after is None or len(re.findall(r"^step \d+/", self.said(), re.M)) >= self.after

    def check(self, code, sent):
        """What the run said at its end, of the signal if it was sent before."""
        last = self.said().splitlines()[-1]
        if code == 0:
            saved = max(steps_in(self.folder / "checkpoints"))
            stopped = re.match(r"stopped by SIGTERM after step (\d+); checkpoints/step-(\d+) has it", last)
            assert int(stopped[1]) == saved if stopped else saved == self.steps, f"{self}: {self.said()}"
        else:
            why = "(did not respond|did not start)" if self.signal == signal.SIGSTOP else "was ended by"
            named = re.match(rf"error: .*\brank {self.rank} {why}", last)
            assert sent and code == 1 and named, f"{self}: {self.said()}"
            assert self.signal == signal.SIGSTOP or f"ended by {self.signal.name}" in last, f"{self}: {self.said()}"


@pytest.mark.runs
def test_signals_at_random(folder, trials):
    for seed in range(1 if trials is None else trials):
        trial = Trial(seed, folder)
        saved = max(steps_in(folder / "checkpoints"), default=None)
        run, begin = trial.start(), time.monotonic()
        try:
            workers = trial.signalled(run)
            begin = time.monotonic()
            code = run.wait(END)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{trial}: no end within {END} s: {trial.said()}")
        finally:
            run.kill()
        print(
            f"{seed}: {trial}: exit code {code} after {time.monotonic() - begin:.0f} s: {trial.said().splitlines()[-1]}"
        )
        trial.check(code, bool(workers))
        assert not any(map(processes.alive, workers)), trial
        went_on = re.search(r"^resumes from checkpoints/step-(\d+)$", trial.said(), re.M)
        assert not went_on or int(went_on[1]) == saved, f"{trial}: {trial.said()}"
    last = Trial(-1, folder)
    assert last.start().wait(START) == 0, last.said()
