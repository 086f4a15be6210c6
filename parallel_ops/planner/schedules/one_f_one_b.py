"""GPipe, 1F1B and interleaved 1F1B: the schedules without a split backward pass.

GPipe (Huang et al., arXiv:1811.06965)          all forward passes, then all backward passes.
1F1B (Narayanan et al., arXiv:2104.04473)       rank r runs p - 1 - r forward passes ahead, then one forward and one
                                                backward pass in turn: at most p - r micro-batches are in flight.
interleaved 1F1B (the same paper, section 2.2)  v stages per rank, each run for p micro-batches at a time; 1/v of
                                                the bubble, v times the messages.
"""

from parallel_ops.planner.schedules.action import Action, Schedule


def gpipe(pp: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes."""
    return [
        [Action("F", mb, rank) for mb in range(micro_batches)] + [Action("B", mb, rank) for mb in range(micro_batches)]
        for rank in range(pp)
    ]


def one_f_one_b(pp: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """1F1B (PipeDream-Flush), or interleaved 1F1B with ``virtual_stages`` stages on each rank.

    Then micro-batches come in rounds of ``pp``, which must be full: a short round would deadlock.
    """
    return [_order(pp, rank, micro_batches, virtual_stages) for rank in range(pp)]


def _order(pp: int, rank: int, micro_batches: int, chunks: int) -> list[Action]:
    rounds = [range(start, min(start + pp, micro_batches)) for start in range(0, micro_batches, pp)]
    forward = [Action("F", mb, c * pp + rank) for group in rounds for c in range(chunks) for mb in group]
    backward = [Action("B", mb, c * pp + rank) for group in rounds for c in reversed(range(chunks)) for mb in group]
    # Warm-up forward passes. With one chunk, until the first backward pass reaches the rank. With more, a whole round
    # of every chunk but the last, and twice the distance from the last rank.
    ahead = pp - 1 - rank if chunks == 1 else 2 * (pp - 1 - rank) + (chunks - 1) * pp
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for f, b in zip(forward[ahead:], backward, strict=False):
        order += (f, b)
    return order + backward[len(forward) - ahead :]
