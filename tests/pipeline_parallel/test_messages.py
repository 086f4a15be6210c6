"""Messages between stages: no order of ranks locks up, and each stage gets what it needs."""

import random

import pytest
import torch

from parallel_ops.pipeline_parallel.messages import AHEAD, Key, Messages
from parallel_ops.planner.schedules.schedule import KINDS, simulate
from support import toy_stages
from support.interleaving import Deadlock, World


def by_direction(rank, peer, receives):
    """A communicator for each ordered pair, as ``GroupLink`` has on GPUs."""
    return (peer, rank) if receives else (rank, peer)


def by_pair(rank, peer, receives):
    return frozenset((rank, peer))


def run(kind, pp, micro_batches, seed, communicator=by_direction):
    schedule, stages = toy_stages.schedule_of(kind, pp, micro_batches)
    world = World(pp, seed, communicator)
    orders = [toy_stages.Order() for _ in range(pp)]
    results = world.run(lambda rank, link: toy_stages.run(rank, link, schedule, stages, observers=(orders[rank],)))
    return schedule, stages, results, orders, world


def cases(count):
    draw = random.Random(0)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        pp = draw.choice([1, 2, 3, 4])
        m = pp * draw.randint(1, 3) if kind == "interleaved" else draw.randint(1, 12)
        yield kind, pp, max(m, 2 * pp) if kind == "dualpipe-v" else m, number
    yield from [("1f1b", 16, 5, 0), ("zb-h1", 16, 20, 1), ("zb-v", 8, 9, 2), ("interleaved", 8, 8, 3)]


def test_any_interleaving_gives_the_gradients(pytestconfig):
    trials = pytestconfig.getoption("trials")
    for kind, pp, m, seed in cases(trials or 40):
        schedule, stages, results, orders, world = run(kind, pp, m, seed)
        losses, grads = toy_stages.expected(stages.count, m)
        simulation = simulate(schedule)
        for rank, (own_losses, own_grads, executor, messages) in enumerate(results):
            assert orders[rank].ran == schedule[rank]
            if stages.count - 1 in stages.on(rank):
                assert {n: loss.item() for n, loss in own_losses.items()} == pytest.approx(losses)
            else:
                assert own_losses == {}
            assert own_grads == pytest.approx({stage: grads[stage] for stage in stages.on(rank)})
            assert executor.peak_live / len(stages.on(rank)) == simulation.peak_activations[rank]
            # Every boundary between ranks is crossed by one message of each micro-batch in each direction.
            ends = [(s, s + 1) for s in range(stages.count - 1) if stages.rank_of(s) != stages.rank_of(s + 1)]
            sent = sum((stages.rank_of(a) == rank) + (stages.rank_of(b) == rank) for a, b in ends)
            assert messages.sent == m * sent
            assert messages.bytes_sent == messages.sent * torch.Size(toy_stages.SHAPE).numel() * 4
        assert world.most_posted <= pp * 4 * (AHEAD + 1)


def test_one_communicator_for_both_directions_locks_up():
    """Why there is one for each: receives that are posted ahead hold back the sends behind them."""
    with pytest.raises(Deadlock, match="wait for each other"):
        run("1f1b", 4, 8, 0, by_pair)


def test_a_message_of_another_shape_is_refused():
    schedule, stages = toy_stages.schedule_of("1f1b", 2, 2)
    messages = Messages(schedule, stages, 0, link=None)
    messages._order = {}
    messages.begin((3,), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"activations of micro-batch 1 for stage 1 must be \[3\] torch.float32, got"):
        messages.send(Key("F", 1, 1), torch.zeros(4))
    with pytest.raises(ValueError, match="float64"):
        messages.send(Key("F", 1, 1), torch.zeros(3, dtype=torch.float64))
