"""A failing, killed or stuck rank: every other raises in time and says in which op, on which rank, and who is gone."""

import re
import subprocess
import sys
import textwrap
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel_ops.comm.call_messages import Gather
from parallel_ops.comm.errors import translate_backend_errors
from support.ranks import failures
from support.ranks.distributed import Raised, Ranks, ranks

TIMEOUT = 0.5


def check(outcomes, lost, limit):
    for rank, said in enumerate(outcomes):
        if rank == lost:
            continue
        assert set(said) | {"all_gather"} == set(failures.CALLS)
        for op, (message, seconds) in said.items():
            assert message.startswith(f"{op}: rank {rank} of 3 ")
            # On a busy machine a rank that is there may be slow to say so, and is then named too.
            (silent,) = re.findall(r"no report from ranks? ([\d, ]+) of the group", message)
            assert str(lost) in silent.split(", ")
            assert seconds < limit


def test_memory_that_runs_out_is_no_news_of_a_peer():
    with pytest.raises(torch.OutOfMemoryError), translate_backend_errors("op", None):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_stuck():
    outcomes = ranks(3).run(failures.call_without, 1, "stuck", TIMEOUT)
    # A margin for machines that are busy with other work.
    check(outcomes, 1, TIMEOUT + 10)


def test_killed():
    """Noticed at once: the timeout is much longer than the test waits."""
    lost, group = 0, Ranks(3)
    try:
        outcomes = group.outcomes(failures.call_without, lost, "killed", 60.0)
    finally:
        group.close()
    assert outcomes[lost].type == "Killed"
    reported = [said.pop("all_gather")[0] for rank, said in enumerate(outcomes) if rank != lost]
    assert all(
        "rank 0 failed in Layer: RuntimeError: no more memory" in m.replace("of the group ", "") for m in reported
    )
    check(outcomes, lost, 5)


def message_beside_a_lost_rank(rank, lost):
    """What a rank receives from one that has noticed the loss of a third, as it has itself."""
    world = dist.group.WORLD

    def send(tensors, peer, tag):
        if peer == lost:
            raise RuntimeError("Connection closed by peer")
        return world.send(tensors, peer, tag)

    if rank == lost:
        return None
    gather = Gather(mock.Mock(wraps=world, send=send), torch.tensor([rank]))
    with pytest.raises(RuntimeError, match="Connection closed"):
        gather.receive()
    for work in gather._receives:
        work.wait()
    return gather._received.flatten().tolist()[3 - lost - rank]


def test_a_lost_rank_does_not_keep_a_message_from_the_others():
    """They may not have noticed, and would wait for it until the timeout."""
    assert ranks(3).run(message_beside_a_lost_rank, 0) == [None, 2, 1]


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_an_error_is_its_own_ranks_at_once_and_the_others_when_they_come(guilty):
    for rank, said in enumerate(ranks(3).run(failures.fail_alone, guilty)):
        for name, (error, message, total) in zip(failures.ERRORS, said, strict=True):
            assert total == 6
            if rank == guilty:
                assert error == name and "as it happens" in message
            else:
                what = "rejected its arguments: as" if name == "TypeError" else f"failed in Layer: {name}: "
                assert error == "ValueError" and message.startswith(f"all_gather: rank {guilty} of the group {what}")


def test_what_the_others_know_is_not_announced_and_what_they_do_not_is():
    first, second = ranks(2).run(failures.fail_in_many_ways)
    assert first[1::2] == second[1::2] == ["[0, 1]"] * 3
    assert [first[0], second[0]] == ["wrapped"] * 2
    assert second[2] == "another" and "rank 1 of the group failed in Inner: RuntimeError: another" in first[2]
    assert second[4] == "nothing" and "rank 1 of the group rejected its arguments: all_gather: dim=7" in first[4]


def test_an_op_and_a_loss_are_compared():
    for outcome in ranks(2).outcomes(failures.different_ops):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert "make different calls: rank 0: vocab_parallel_cross_entropy (4 rows" in outcome.message
        assert "; rank 1: reduce_from_group (x of [4, 5]" in outcome.message


def test_a_backward_that_one_rank_leaves_out_is_named_on_all():
    """The others could take its next call for the rest of the backward: an abort of gloo, or data as a message."""
    for said in ranks(2).run(failures.leave_out_backwards):
        assert set(said) == {(op, other) for op in failures.FORWARDS for other in failures.FORWARDS}
        for (op, other), message in said.items():
            assert (
                message.startswith("ValueError") and "the ranks of the group make different calls: rank 0:" in message
            )
            assert f"rank 0: {failures.NAMES_BACKWARD.get(op, f'backward of {op}')} (" in message, message
            assert f"; rank 1: {failures.NAMES.get(other, other)} (" in message, message


@pytest.mark.parametrize("raw", ["all_reduce", "all_gather", "barrier", "all_to_all", "send"])
def test_an_op_that_meets_a_collective_of_torch_ends_in_the_timeout(raw):
    waited, _ = ranks(2).run(failures.meet_a_raw_collective, raw, TIMEOUT)
    assert waited.startswith("PeerError: all_gather_linear: rank 0 of 2 lost the other ranks")


def test_an_error_where_data_is_under_way_is_left_in_the_store():
    lost, own = ranks(2).run(failures.fail_while_data_is_under_way, TIMEOUT)
    assert own == "RuntimeError: no more memory"
    assert lost.startswith("PeerError: reduce_scatter: rank 0 of 2 lost the other ranks; no report from rank 1")
    assert "; rank 1 failed in Layer: RuntimeError: no more memory" in lost


@pytest.mark.runs
def test_a_process_that_has_ended_is_quoted(tmp_path):
    """It ends, though nobody fetched its message; a group would wait for that when it is destroyed.

    Worth two processes of its own: those of other tests end without Python's usual clean-up.
    """
    program = """
        import sys, time, torch, torch.distributed as dist
        from parallel_ops.comm import all_gather, PeerError
        from parallel_ops.comm.consistency import propagate_errors

        rank, x = int(sys.argv[1]), torch.ones(2)
        dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
        all_gather(x, dist.group.WORLD)
        try:
            if rank == 1:
                with propagate_errors("Layer", dist.group.WORLD, x):
                    raise RuntimeError("no more memory")
            sys.stdin.read()
            all_gather(x, dist.group.WORLD)
        except (PeerError, ValueError) as error:  # its message may have left before it ended
            print(error)
        finally:
            dist.destroy_process_group()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for line in iter(processes[1].stderr.readline, ""):
            if "no more memory" in line and "raise" not in line:
                break
        printed = time.monotonic()
        assert processes[1].wait(60) == 1
        assert time.monotonic() - printed < 15
        processes[0].stdin.close()
        said = processes[0].stdout.read().replace("of the group ", "")
        assert "rank 1 failed in Layer: RuntimeError: no more memory" in said
    finally:
        for process in processes:
            process.kill()
            process.wait()
