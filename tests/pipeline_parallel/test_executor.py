"""The executor on real ranks: its times are those of the simulation."""

import weakref

import pytest
import torch

from parallel_ops.pipeline_parallel import Executor, Stages, link
from parallel_ops.pipeline_parallel.messages import Messages
from parallel_ops.pipeline_parallel.trace import Timed, times_of
from parallel_ops.planner.plan import SCHEDULES
from parallel_ops.planner.schedules.action import Action
from support.parallelism import toy_stages
from support.ranks.distributed import ranks
from support.ranks.interleaving import Group, World

SECONDS = (0.03, 0.03, 0.06, 0.12)


@pytest.mark.runs
def test_bubbles_are_those_of_the_simulation():
    """Stages sleep; a machine in use wakes them late, so the best run counts, and the last ones sleep longer."""
    best = dict.fromkeys(SCHEDULES, 1.0)
    for seconds in SECONDS:
        for kind, (ran, planned) in ranks(4).run(toy_stages.paced, seconds, 8)[0].items():
            best[kind] = min(best[kind], ran - planned)
        if max(best.values()) < 0.03:
            return
    raise AssertionError(f"measured bubbles less the simulated ones: {best}")


def test_times_of_passes():
    b, f = Action("B", 0, 0), Action("F", 0, 0)
    timed = [
        [Timed(f, 0.0, 2.0, 2.0), Timed(b, 5.0, 8.0, 12.0)],
        [
            Timed(f._replace(stage=1), 2.0, 3.0, 3.0),
            Timed(Action("I", 0, 1), 3.0, 4.0, 5.0),
            Timed(Action("W", 0, 1), 5, 9, 9),
        ],
    ]
    times = times_of(timed)
    assert (times.forward, times.input_grad, times.weight_grad) == ([2.0, 1.0], [3.0, 2.0], [4.0, 4.0])
    assert times.input_grad_first


def test_a_schedule_with_w_needs_a_queue():
    schedule, stages = toy_stages.schedule_of("zb-h1", 2, 2)
    with pytest.raises(ValueError, match="a schedule with W needs a queue of weight gradients"):
        Executor(schedule, stages, 0, Messages(schedule, stages, 0, link=None))


def test_without_a_queue_b_computes_everything_first():
    stages = Stages((1,), 1)
    schedule = [[Action("F", 0, 0), Action("B", 0, 0)]]
    weight = torch.tensor(3.0, requires_grad=True)
    executor = Executor(schedule, stages, 0, Messages(schedule, stages, 0, link=None))
    losses = executor.step(
        lambda stage, micro_batch, x: weight * 2.0, lambda _: 0.5, shape=(1,), dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert losses[0].item() == 6.0 and not losses[0].requires_grad
    assert weight.grad.item() == 1.0


def test_an_output_that_is_sent_is_not_held(monkeypatch):
    """On the first rank, of all micro-batches that wait for their backward."""
    schedule, stages = toy_stages.schedule_of("gpipe", 2, 4)
    outputs: dict[int, list[weakref.ref[torch.Tensor]]] = {0: [], 1: []}
    alive: list[int] = []

    world = World(2, 0)

    def work(rank: int) -> None:
        group = Group(world, "pipeline", range(2))
        made = link.connected_link(group, [[0, 1]], [(0, 1), (1, 0)], torch.device("cpu"))
        executor = Executor(schedule, stages, rank, Messages(schedule, stages, rank, made))

        def forward(stage: int, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
            y = (torch.ones(3, requires_grad=True) if x is None else x) * 2.0
            outputs[stage].append(weakref.ref(y))
            if stage == 1:
                alive.append(sum(ref() is not None for ref in outputs[0]))
                return y.sum()
            return y

        executor.step(forward, lambda _: 1.0, shape=(3,), dtype=torch.float32, device=torch.device("cpu"))

    monkeypatch.setattr(link, "dist", world.dist)
    world.run(work)
    assert max(alive) <= 1
