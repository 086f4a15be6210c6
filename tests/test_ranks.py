"""The processes that the other tests run their ranks in: what ends them, and that the next call has others."""

import pytest

from support.ranks import distributed, failures
from support.ranks.distributed import NotFormed, Ranks


@pytest.fixture
def group():
    found = Ranks(2)
    yield found
    found.close()


def test_a_group_that_is_not_formed_is_tried_once_more(group, tmp_path):
    """The other rank waits for the one that failed."""
    assert group.run(failures.connect_at_attempt, 2, str(tmp_path)) == [2, 2]
    with pytest.raises(NotFormed, match=distributed.NOT_FORMED):
        group.run(failures.connect_at_attempt, 5, str(tmp_path))


def test_ranks_that_are_silent_or_gone_are_replaced(group, monkeypatch):
    first = group.run(failures.process)
    assert group.run(failures.process) == first
    assert [outcome.type for outcome in group.outcomes(failures.kill_itself)] == ["Killed"] * 2
    second = group.run(failures.process)
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*alone"):
        group.run(failures.fail_alone_at_once)
    third = group.run(failures.process)
    monkeypatch.setattr(distributed, "ANSWER_SECONDS", 0.5)
    with pytest.raises(TimeoutError, match=r"ranks \[0\] did not answer within 0.5 s"):
        group.run(failures.stay_silent)
    monkeypatch.undo()
    assert not set(first) & set(second) & set(third) & set(group.run(failures.process))
