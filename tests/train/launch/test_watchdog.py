"""A rank that does not go on is found by the records of the ranks."""

import math
import threading
import time

import pytest

from parallel_ops.train.launch.heartbeats import SLOW, Clock, Heartbeat, Heartbeats
from parallel_ops.train.launch.settings import RunSettings
from parallel_ops.train.launch.watchdog import group_timeout, in_debugger, longest

# Seconds: the shortest in which a thread of a busy machine surely gets its turn.
TIMEOUT = 10


class Ranks:
    """Records of three ranks by a clock of one second a turn; ``timeout`` is 10 s."""

    def __init__(self):
        self.ledger, self.clock = Heartbeats(range(3), 10.0), 0.0
        self.at = {rank: Heartbeat() for rank in range(3)}

    def turn(self, seconds, stopped=(), **changes):
        for _ in range(seconds):
            self.clock += 1
            for rank, old in self.at.items():
                if rank not in stopped:
                    self.at[rank] = Heartbeat(**{**vars(old), "beat": old.beat + 1, **changes.get(f"of_{rank}", {})})
                    self.ledger.update(rank, self.at[rank], self.clock)

    def reason(self):
        return self.ledger.silent(self.clock) or self.ledger.stuck(self.clock)


STEP = {"count": 7, "text": "step 2, micro-batch 1 of 4, backward", "allowance": 1}
AHEAD = {"count": 8, "text": "step 2, update", "allowance": 1}


def everyone(what):
    return {f"of_{rank}": what for rank in range(3)}


def test_a_process_that_is_stopped():
    found = Ranks()
    found.turn(1, **everyone(STEP))
    found.turn(9, stopped=(1,), of_0=AHEAD, of_2=AHEAD)
    assert found.reason() is None
    found.turn(2, stopped=(1,))
    assert found.reason() == (
        "rank 1 did not respond for 11 s: stopped, or on a node that is lost; rank 1's last activity, 11 s ago: "
        "step 2, micro-batch 1 of 4, backward"
    )


def test_a_process_that_lives_and_does_not_go_on():
    """The others, which wait for it, are as old; the one that is furthest behind is named."""
    found = Ranks()
    found.turn(1, **everyone(STEP))
    found.turn(10, of_0=AHEAD, of_2=AHEAD)
    assert found.reason() is None
    found.turn(1)
    assert found.reason() == (
        "rank 1 stalled for 11 s in: step 2, micro-batch 1 of 4, backward; ranks 0, 2: step 2, update"
    )
    found.turn(1, of_1=AHEAD)
    assert found.reason() is None
    found.turn(10)
    assert found.reason() is None  # all in the same activity, of which rank 1 has not had the time
    found.turn(1)
    assert found.reason() == "ranks 0-2 stalled for 11 s in: step 2, update"


def test_a_stage_that_waits_is_not_blamed():
    """Stages have different activities: a rank at the end of a pipeline has fewer before the first message arrives."""
    waiting = {"count": 3, "text": "step 1, stage 2, micro-batch 1, waiting for it", "allowance": 1, "waits": True}
    computing = {"count": 5, "text": "step 1, stage 1, micro-batch 1, forward", "allowance": 1}
    found = Ranks()
    found.turn(1, of_0={**waiting, "count": 12}, of_1=computing, of_2=waiting)
    found.turn(11)
    assert found.reason() == (
        "rank 1 stalled for 11 s in: step 1, stage 1, micro-batch 1, forward; rank 0, 2: step 1, stage 2, "
        "micro-batch 1, waiting for it"
    ).replace("rank 0, 2", "ranks 0, 2")
    found.turn(1, of_1={**waiting, "count": 6})
    found.turn(11)
    assert found.reason().startswith("rank 2 stalled")  # all wait: messages are lost


@pytest.mark.parametrize("allowance", [SLOW, math.inf])
def test_what_may_take_long(allowance):
    """A save, or a debugger, of one rank: the others wait in activities that may not."""
    found, saving = Ranks(), {"count": 7, "text": "saving step 2", "allowance": allowance}
    found.turn(1, of_0=AHEAD, of_1=saving, of_2=AHEAD)
    found.turn(10 * SLOW)
    assert found.reason() is None
    found.turn(1)
    assert (found.reason() is None) == (allowance == math.inf)
    found.turn(11, stopped=(1,))
    assert "rank 1 did not respond for 11 s" in found.reason()  # slow or not, a process lives


def test_ranks_that_have_finished_are_not_waited_for():
    found = Ranks()
    found.turn(1, of_0=AHEAD, of_1={"finished": True}, of_2=AHEAD)
    found.turn(10, stopped=(1,))
    assert found.reason() is None and not found.ledger.finished()
    found.turn(1, stopped=(1,))
    assert found.reason() == "ranks 0, 2 stalled for 11 s in: step 2, update"


def test_the_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock, read = Clock(2.0), []
    for seconds in (1.0, 1.5, 3600.0, 1.0):
        now += seconds
        read.append(clock())
    assert read == [1.0, 2.5, 4.5, 5.5]


def test_a_thread_at_the_prompt_of_a_debugger():
    assert not in_debugger(threading.get_ident())
    prompt = {"__name__": "bdb", "call": in_debugger}
    exec("def trace_dispatch(thread): return call(thread)", prompt)
    assert prompt["trace_dispatch"](threading.get_ident())


def test_timeouts_of_process_groups_come_after_the_watch():
    timeout = RunSettings().timeout
    assert longest(timeout) == 1800 and group_timeout(timeout).total_seconds() > longest(timeout)
    assert group_timeout(None).total_seconds() > 86400
