"""The time of a pipeline, from the simulation of a smaller one.

A schedule fills, repeats and drains. Its time is linear in the number of micro-batches once these are several times the
ranks, with unequal stages many times: a rank that is a little slower delays the others for long before it holds them
all. With equal stages, the idle time is linear in the number of ranks at a constant number of micro-batches per rank.
"""

from functools import lru_cache

from parallel_ops.planner.schedules.schedule import WHOLE_BACKWARD, Program, Times, actions

# Largest simulation. It is linear in the passes; this many take about 0.1 s.
MOST_PASSES = 50_000
# Micro-batches per rank after which the schedules repeat with equal stages, and after which they have been seen to with
# the stages of models: of 1,300 plans of searches, simulated whole, steps differ by 0.03 % at most (12: 1 %; 3: 5 %).
ROUNDS, SETTLED = 3, 16
# Ranks that are simulated. Eight instead of up to 24 change the step by at most 1.5 %, 0.1 % on average; four by 5 %.
RANKS = 8
# Resolution of the shares of I, W and a message in F + I + W: a search then simulates a few hundred pipelines.
RESOLUTION = (0.02, 0.02, 0.005)


def step_time(kind: str, pp: int, micro_batches: int, virtual_stages: int, times: Times, *, barrier: bool) -> float:
    """Time of a step, with many micro-batches extrapolated from fewer.

    Args:
        kind, pp, micro_batches, virtual_stages: see ``parallel_ops.planner.schedules.schedule.actions``.
        times: times of the passes and links; the result has their unit.
        barrier: all ranks wait for each other at the end, see ``Simulation.step_time_without_barrier``.
    """

    def simulated(count: int) -> float:
        if kind == "zb-2p":  # its order depends on the times
            program = Program(actions(kind, pp, count, virtual_stages, times=times))
        else:
            program = _program(kind, pp, count, virtual_stages)
        return program.step_time(times, barrier=barrier)

    # Building a ZB-2p schedule takes ten times as long as running it.
    most = MOST_PASSES // 10 if kind == "zb-2p" else MOST_PASSES
    enough = pp * max(ROUNDS, min(SETTLED, most // (2 * pp * pp * virtual_stages)))
    if micro_batches <= enough:
        return simulated(micro_batches)
    long, short = simulated(enough), simulated(enough - pp)
    return long + (micro_batches - enough) * (long - short) / pp


def idle_time(
    kind: str,
    pp: int,
    micro_batches: int,
    virtual_stages: int,
    passes: tuple[float, float, float],
    link: float,
    *,
    barrier: bool,
    input_grad_first: bool = False,
) -> float:
    """Idle seconds per rank in a step with equal stages, from a simulation of at most ``RANKS`` ranks.

    Args:
        kind, pp, micro_batches, virtual_stages, barrier: see ``step_time``.
        passes: seconds of F, I and W of one stage.
        link: seconds of a message between ranks.
        input_grad_first: see ``Times``.
    """
    whole = sum(passes)
    if not whole or pp == 1:
        return 0.0
    parts = zip((passes[1], passes[2], link), RESOLUTION, strict=True)
    shares = tuple(round(part / whole / step) for part, step in parts)
    ranks = min(pp, RANKS)
    # The same number of micro-batches per rank, rounded.
    count = micro_batches if pp == ranks else max(1, round(micro_batches * ranks / pp))
    if kind == "dualpipe-v":
        count = max(count, 2 * ranks)
    first = input_grad_first and kind in WHOLE_BACKWARD
    fixed, each = _idle(kind, ranks, min(count, ROUNDS * ranks), virtual_stages, shares, barrier, first)
    more = max(0, count - ROUNDS * ranks)
    return whole * (fixed + more * each) * (pp - 1) / (ranks - 1)


@lru_cache(maxsize=256)
def _program(kind: str, pp: int, micro_batches: int, virtual_stages: int) -> Program:
    return Program(actions(kind, pp, micro_batches, virtual_stages))


@lru_cache(maxsize=65536)
def _idle(
    kind: str, pp: int, micro_batches: int, virtual_stages: int, shares: tuple[int, ...], barrier: bool, first: bool
) -> tuple[float, float]:
    """Idle time in units of F + I + W of a stage, and its growth per micro-batch in the steady state."""
    input_grad, weight_grad, link = (share * step for share, step in zip(shares, RESOLUTION, strict=True))
    times = Times(
        forward=max(0.0, 1 - input_grad - weight_grad),
        input_grad=input_grad,
        weight_grad=weight_grad,
        link=link,
        input_grad_first=first,
    )

    def idle(count: int) -> float:
        return step_time(kind, pp, count, virtual_stages, times, barrier=barrier) - count * virtual_stages

    found = idle(micro_batches)
    if micro_batches < ROUNDS * pp:
        return found, 0.0
    return found, max(0.0, found - idle(micro_batches - pp)) / pp
