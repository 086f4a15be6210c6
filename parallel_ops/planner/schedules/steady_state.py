"""The time of a pipeline from the simulation of a part of it.

A schedule fills, repeats itself and drains. So what it takes grows evenly with the number of micro-batches once these
are some times as many as the ranks, and, with stages that take equal times, the idle time grows evenly with the number
of ranks as long as the micro-batches of each rank stay the same.
"""

from functools import lru_cache

from parallel_ops.planner.schedules.schedule import Program, Times, actions

# The simulation is linear in the passes: this many take about a tenth of a second.
MOST_PASSES = 50_000
# Micro-batches a rank after which the schedules repeat themselves.
ROUNDS = 3
# With eight ranks in place of up to 24 the step comes out within 1.5 %, 0.1 % on average; with four, within 5 %.
RANKS = 8
# Shares of I, W and a message in F + I + W that are told apart: a search then simulates some hundred pipelines.
RESOLUTION = (0.02, 0.02, 0.005)


def step_time(kind: str, pp: int, micro_batches: int, virtual_stages: int, times: Times, *, barrier: bool) -> float:
    """Seconds of a step: all of it is simulated up to ``MOST_PASSES`` passes, then as many micro-batches as repeat.

    Args:
        kind, pp, micro_batches, virtual_stages: as in ``parallel_ops.planner.schedules.schedule.actions``.
        times: of the passes and links.
        barrier: whether all ranks wait for each other at the end: see ``Simulation.step_time_without_barrier``.
    """

    def simulated(count: int) -> float:
        if kind == "zb-2p":  # made for its times
            program = Program(actions(kind, pp, count, virtual_stages, times=times))
        else:
            program = _program(kind, pp, count, virtual_stages)
        return program.step_time(times, barrier=barrier)

    enough = ROUNDS * pp
    # Making a ZB-2p schedule takes ten times as long as running it.
    most = MOST_PASSES // 10 if kind == "zb-2p" else MOST_PASSES
    if micro_batches <= enough or 2 * pp * virtual_stages * micro_batches <= most:
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
) -> float:
    """Seconds that a rank waits in a step in which all stages take equal times, from a simulation of eight ranks.

    Args:
        passes: seconds of F, I and W of one stage. ``link``: of a message between ranks.
    """
    whole = sum(passes)
    if not whole or pp == 1:
        return 0.0
    parts = zip((passes[1], passes[2], link), RESOLUTION, strict=True)
    shares = tuple(round(part / whole / step) for part, step in parts)
    ranks = min(pp, RANKS)
    # The same number of micro-batches a rank, as far as that is a whole number.
    count = micro_batches if pp == ranks else max(1, round(micro_batches * ranks / pp))
    if kind == "dualpipe-v":
        count = max(count, 2 * ranks)
    fixed, each = _idle(kind, ranks, min(count, ROUNDS * ranks), virtual_stages, shares, barrier)
    more = max(0, count - ROUNDS * ranks)
    return whole * (fixed + more * each) * (pp - 1) / (ranks - 1)


@lru_cache(maxsize=256)
def _program(kind: str, pp: int, micro_batches: int, virtual_stages: int) -> Program:
    return Program(actions(kind, pp, micro_batches, virtual_stages))


@lru_cache(maxsize=65536)
def _idle(
    kind: str, pp: int, micro_batches: int, virtual_stages: int, shares: tuple[int, ...], barrier: bool
) -> tuple[float, float]:
    """Idle time in units of F + I + W of a stage, and, in the steady state, by how much a micro-batch adds to it."""
    input_grad, weight_grad, link = (share * step for share, step in zip(shares, RESOLUTION, strict=True))
    times = Times(
        forward=max(0.0, 1 - input_grad - weight_grad), input_grad=input_grad, weight_grad=weight_grad, link=link
    )

    def idle(count: int) -> float:
        return step_time(kind, pp, count, virtual_stages, times, barrier=barrier) - count * virtual_stages

    found = idle(micro_batches)
    if micro_batches < ROUNDS * pp:
        return found, 0.0
    return found, max(0.0, found - idle(micro_batches - pp)) / pp
