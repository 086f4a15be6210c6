"""A killed or stuck rank: every other raises in time and says in which op, on which rank, and who is gone."""

import re

import pytest
import torch

from parallel_ops.comm._failure import naming_peers
from support import failures
from support.distributed import Ranks, ranks

TIMEOUT = 0.5


def check(outcomes, lost, limit):
    for rank, said in enumerate(outcomes):
        if rank == lost:
            continue
        assert set(said) == set(failures.CALLS)
        for op, (message, seconds) in said.items():
            assert message.startswith(f"{op}: rank {rank} of 3 ")
            # On a busy machine a rank that is there may be slow to say so, and is then named too.
            (silent,) = re.findall(r"no word from ranks? ([\d, ]+) of the group", message)
            assert str(lost) in silent.split(", ")
            assert seconds < limit


def test_memory_that_runs_out_is_no_news_of_a_peer():
    with pytest.raises(torch.OutOfMemoryError), naming_peers("op", None):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_stuck():
    outcomes = ranks(3).run(failures.call_without, 1, "stuck", TIMEOUT)
    # A margin for machines that are busy with other work.
    check(outcomes, 1, TIMEOUT + 5)


def test_killed():
    """Noticed at once: the timeout is much longer than the test waits."""
    lost, group = 0, Ranks(3)
    try:
        outcomes = group.outcomes(failures.call_without, lost, "killed", 60.0)
    finally:
        group.close()
    assert outcomes[lost].type == "Killed"
    check(outcomes, lost, 5)
