"""Evaluation: forward passes alone, each rank with the deepest stage that can go on.

Nothing is kept for a backward, so the order only decides how little the ranks wait. The deepest stage first keeps
messages few; a rank runs its first stage for a new micro-batch while the later ones wait for other ranks.
"""

from collections.abc import Callable

from parallel_ops.planner.schedules.action import Action, Schedule


def forward_only(pp: int, stages: int, rank_of: Callable[[int], int], micro_batches: int) -> Schedule:
    """The F of every stage and micro-batch, for any number of micro-batches.

    Args:
        stages: Of the whole model. rank_of: The pipeline rank of a stage.
    """
    own = [[stage for stage in range(stages) if rank_of(stage) == rank] for rank in range(pp)]
    schedule: Schedule = [[] for _ in range(pp)]
    done = [0] * stages  # micro-batches that each stage has computed
    while done[-1] < micro_batches:
        before = [micro_batches, *done]  # what each stage could start on, as of the last tick
        for rank in range(pp):
            ready = [stage for stage in own[rank] if done[stage] < before[stage]]
            if ready:
                schedule[rank].append(Action("F", done[ready[-1]], ready[-1]))
                done[ready[-1]] += 1
    return schedule
