"""ZB-H1 and ZB-H2: 1F1B with the weight gradients put off (Qi et al., arXiv:2401.10241, section 2).

Only I is on the way from the last rank to the first, so W can wait for a moment when its rank would be idle. Rank r of
p keeps a number of W back and works them off at the end, where 1F1B waits for gradients. Activations are held until W,
and both schedules bound them:

    ZB-H1  p micro-batches, as 1F1B does: rank r runs p - r forward passes ahead and keeps r W back.
    ZB-H2  2p - 1 micro-batches: rank r runs 2(p - r) - 1 ahead and keeps 2r W back.
"""

from parallel_ops.planner.schedules.action import Action, Schedule


def zb_h1(pp: int, micro_batches: int) -> Schedule:
    """ZB-H1: the memory of 1F1B, about a third of its bubble."""
    return [_order(rank, micro_batches, ahead=pp - rank, kept_back=rank) for rank in range(pp)]


def zb_h2(pp: int, micro_batches: int) -> Schedule:
    """ZB-H2: no bubble where F, I and W take equal times, for about twice the memory."""
    return [_order(rank, micro_batches, ahead=2 * (pp - rank) - 1, kept_back=2 * rank) for rank in range(pp)]


def _order(rank: int, micro_batches: int, *, ahead: int, kept_back: int) -> list[Action]:
    ahead = min(ahead, micro_batches)
    order = [Action("F", mb, rank) for mb in range(ahead)]
    done = 0
    for mb in range(micro_batches):
        order.append(Action("I", mb, rank))
        # In the steady state I - W - F keeps the bound; while F last, W that may wait do.
        if mb - done >= kept_back or ahead + mb >= micro_batches:
            order.append(Action("W", done, rank))
            done += 1
        if ahead + mb < micro_batches:
            order.append(Action("F", ahead + mb, rank))
    return order + [Action("W", mb, rank) for mb in range(done, micro_batches)]
