"""ZB-H1 and ZB-H2: 1F1B with deferred weight gradients (Qi et al., arXiv:2401.10241, section 2).

Only I is on the critical path from the last rank to the first, so W can be deferred until its rank would be idle. Rank
r of p defers a number of W to the end, where 1F1B waits for gradients. Activations are held until W, and both schedules
bound them:

    ZB-H1  p micro-batches, as in 1F1B: rank r runs p - r forward passes ahead and defers r W.
    ZB-H2  2p - 1 micro-batches: rank r runs 2(p - r) - 1 forward passes ahead and defers 2r W.
"""

from parallel_ops.planner.schedules.action import Action, Schedule


def zb_h1(pp: int, micro_batches: int) -> Schedule:
    """ZB-H1: the memory of 1F1B, about a third of its bubble."""
    return [_order(rank, micro_batches, ahead=pp - rank, deferred=rank) for rank in range(pp)]


def zb_h2(pp: int, micro_batches: int) -> Schedule:
    """ZB-H2: no bubble if F, I and W take equal times, for about twice the memory."""
    return [_order(rank, micro_batches, ahead=2 * (pp - rank) - 1, deferred=2 * rank) for rank in range(pp)]


def _order(rank: int, micro_batches: int, *, ahead: int, deferred: int) -> list[Action]:
    ahead = min(ahead, micro_batches)
    order = [Action("F", mb, rank) for mb in range(ahead)]
    done = 0
    for mb in range(micro_batches):
        order.append(Action("I", mb, rank))
        # In the steady state I - W - F keeps the bound; the first W are deferred.
        if mb - done >= deferred or ahead + mb >= micro_batches:
            order.append(Action("W", done, rank))
            done += 1
        if ahead + mb < micro_batches:
            order.append(Action("F", ahead + mb, rank))
    return order + [Action("W", mb, rank) for mb in range(done, micro_batches)]
