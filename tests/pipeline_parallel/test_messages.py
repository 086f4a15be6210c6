"""Messages between stages: no order of ranks locks up, and each stage gets what it needs."""

import random

import pytest
import torch

from parallel_ops.comm.errors import PeerError
from parallel_ops.pipeline_parallel import Observer, link
from parallel_ops.pipeline_parallel.link import GroupLink, connected_link
from parallel_ops.pipeline_parallel.messages import Messages, pairs_of
from parallel_ops.pipeline_parallel.receives import Key
from parallel_ops.pipeline_parallel.reduction import add_between_ends
from parallel_ops.planner.schedules.schedule import KINDS, simulate
from support.parallelism import toy_stages
from support.ranks.interleaving import Group, World

CPU = torch.device("cpu")


class Standing(Observer):
    """A rank whose every part waits for all messages that it has posted."""

    def __init__(self, world):
        self.world = world

    def compute(self, action):
        self.world.synchronize()

    def input_gradient(self, action):
        if action.kind == "B":  # whose weight gradients are next
            self.world.synchronize()


def run(
    kind, pp, micro_batches, seed, *, eager=False, connect=None, tied=False, standing=False, one_by_one=False
):  # fmt: skip
    """A step, over the link that ``connect(world, group, pairs)`` makes."""
    schedule, stages = toy_stages.schedule_of(kind, pp, micro_batches)
    world = World(pp, seed, eager=eager, one_by_one=one_by_one)
    orders = [toy_stages.Order() for _ in range(pp)]
    ends = stages.rank_of(0), stages.rank_of(stages.count - 1)
    pairs = pairs_of(schedule, stages) | ({ends, ends[::-1]} if tied else set())

    def connected(world, group, pairs):
        return connected_link(group, [list(range(pp))], pairs, CPU)

    def step(rank):
        group = Group(world, "pipeline", range(pp))
        made = (connect or connected)(world, group, pairs)
        result = toy_stages.run(
            rank, made, schedule, stages, observers=(orders[rank], *([Standing(world)] if standing else ()))
        )
        if tied and rank in ends:
            add_between_ends(shared := torch.tensor([float(rank)]), made, rank, sum(ends) - rank)
            assert shared.item() == sum(ends)
        world.post(group, "gradient norm").wait()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "dist", world.dist)
        return schedule, stages, world.run(step), orders, world


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
        assert world.most_posted <= 4 * pp


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits_in_vain_where_every_part_waits_for_the_device(kind, pytestconfig):
    """Kernels are loaded at their first launch, and loading may wait for all that is posted."""
    for seed in range(pytestconfig.getoption("trials") or 8):
        pp = (2, 3, 4, 6, 8)[seed % 5]
        run(kind, pp, pp * (2 + seed % 2), seed, standing=True)


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_every_schedule_takes_its_first_steps_on_nccl(pp, eager):
    """Communicators block who makes them, and are as torch makes them; the tables of the ends are tied."""
    for seed, kind in enumerate(KINDS):
        run(kind, pp, 2 * pp, seed, eager=eager, tied=kind not in ("zb-v", "dualpipe-v"))


def one_for_both_directions(world, group, pairs):
    """A link over groups of two, whose first message has been sent."""
    own = [pair for pair in sorted(pairs) if group.rank() in pair]
    made = GroupLink(group, {pair: Group(world, str(sorted(pair)), sorted(pair)) for pair in own})
    for sender, receiver in own:
        one = torch.zeros(1)
        send = group.rank() == sender
        (made.send(one, receiver, "one") if send else made.receive(one, sender, "one")).wait()
    return made


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize(
    "connect",
    [lambda world, group, pairs: GroupLink(group), one_for_both_directions],
    ids=["one group", "a channel for both directions"],
)
def test_what_locks_up_on_nccl(connect, eager):
    with pytest.raises(PeerError, match=r"^irecv from 1 .*: rank 0 waits .*, in vain: rank 1 waits"):
        run("1f1b", 4, 8, 0, eager=eager, connect=connect)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gpipe"])
def test_an_order_of_nccl_that_locks_up_is_refused(kind, monkeypatch):
    with pytest.raises(PeerError, match="in vain"):
        run(kind, 4, 8, 0, one_by_one=True)
    monkeypatch.setattr(link, "_driver", lambda: 12020)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with pytest.raises(ValueError, match=r"one by one with drivers before CUDA 12\.3"):
        connected_link(None, [], [], CPU)
    monkeypatch.setattr(link, "_driver", lambda: 12030)
    assert not link.one_by_one()


def test_a_message_of_another_shape_is_refused():
    schedule, stages = toy_stages.schedule_of("1f1b", 2, 2)
    messages = Messages(schedule, stages, 0, link=None)
    messages._order = {}
    messages.begin((3,), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"activations of micro-batch 1 for stage 1 must be \[3\] torch.float32, got"):
        messages.send(Key("F", 1, 1), torch.zeros(4))
    with pytest.raises(ValueError, match="float64"):
        messages.send(Key("F", 1, 1), torch.zeros(3, dtype=torch.float64))


def test_a_list_that_waits_for_itself_is_refused():
    schedule, stages = toy_stages.schedule_of("1f1b", 2, 2)
    circle = [list(reversed(schedule[0])), schedule[1]]
    with pytest.raises(ValueError, match="the actions of the schedule wait for each other in a circle"):
        Messages(circle, stages, 0, link=None)
