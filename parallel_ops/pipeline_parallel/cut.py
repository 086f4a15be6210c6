"""How a model is cut into pipeline stages, and where the stages are.

A stage is a run of consecutive layers; the first also has the embeddings, the last the final norm, the output embedding
and the loss. A rank holds the stages of its place in the schedule: one, several in rounds (interleaved 1F1B), or two in
the shape of a V (ZB-V and DualPipe-V). Layers keep their numbers in the whole model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallel_ops.planner.placement import chunk_rank, chunk_sizes
from parallel_ops.planner.plan import V_SHAPED, Plan


@dataclass(frozen=True)
class Stages:
    """The stages of a model over the ranks of a pipeline.

    Args:
        sizes: Layers of each stage.
        pp: Pipeline ranks.
        v_shaped: Rank r has the stages r and ``2 * pp - 1 - r``; otherwise r, r + pp, ...

    Raises:
        ValueError: There are not as many stages on every rank, or a size is negative.
    """

    sizes: tuple[int, ...]
    pp: int
    v_shaped: bool = False

    def __post_init__(self) -> None:
        if self.pp < 1 or not self.sizes or len(self.sizes) % self.pp or min(self.sizes) < 0:
            raise ValueError(f"Stages: sizes must be 0 or more for a multiple of {self.pp} stages, got {self.sizes}")
        if self.v_shaped and len(self.sizes) != 2 * self.pp:
            raise ValueError(
                f"Stages: a V-shaped pipeline of {self.pp} ranks has {2 * self.pp} stages, got {len(self.sizes)}"
            )

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.sizes)

    @cached_property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage, by their numbers in the whole model."""
        ends = [sum(self.sizes[: number + 1]) for number in range(self.count)]
        return tuple(range(end - size, end) for end, size in zip(ends, self.sizes, strict=True))

    def rank_of(self, stage: int) -> int:
        """The pipeline rank of a stage."""
        return chunk_rank(stage, self.pp, self.v_shaped)

    def on(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in the order of the model."""
        return tuple(stage for stage in range(self.count) if self.rank_of(stage) == rank)

    def layers_on(self, rank: int) -> tuple[int, ...]:
        """The layers of a pipeline rank, in the order of the model."""
        return tuple(layer for stage in self.on(rank) for layer in self.layers[stage])


def cut(num_layers: int, plan: Plan, *, costs: Sequence[float] = ()) -> Stages:
    """The stages of a model under a plan.

    Args:
        num_layers: Layers of the model.
        plan: Its ``layers_per_chunk`` are the sizes of the stages; empty for an even cut, in which stages in the middle
            take what does not divide, since the ends have the embeddings.
        costs: Cost of each layer, in any unit, for stages of equal cost in place of an even cut. The first also has the
            costs of the embedding, the last those of the output embedding and the loss.

    Raises:
        ValueError: There are fewer layers than stages, ``layers_per_chunk`` has another number of layers, or leaves a
            rank without one.
    """
    count, v_shaped = plan.pp * plan.virtual_stages, plan.schedule in V_SHAPED
    if plan.layers_per_chunk:
        if sum(plan.layers_per_chunk) != num_layers:
            raise ValueError(
                f"layers_per_chunk has {sum(plan.layers_per_chunk)} layers, but the model has num_layers={num_layers}"
            )
        given = Stages(plan.layers_per_chunk, plan.pp, v_shaped)
        if empty := [rank for rank in range(plan.pp) if not given.layers_on(rank)]:
            raise ValueError(f"layers_per_chunk leaves pipeline rank {empty[0]} without a layer")
        return given
    if num_layers < count:
        most = num_layers // plan.virtual_stages
        nearest = f"; the largest pp that fits is {most}" if most else f"; virtual_stages must be at most {num_layers}"
        each = f" * virtual_stages={plan.virtual_stages}" if plan.virtual_stages > 1 else ""
        raise ValueError(
            f"pp={plan.pp}{each} needs {count} layers, one for each stage, but the model has {num_layers}{nearest}"
        )
    if costs and len(costs) != num_layers:
        raise ValueError(f"costs must have a value for each of the {num_layers} layers, got {len(costs)}")
    return Stages(_equal_costs(costs, count) if costs else chunk_sizes(num_layers, count), plan.pp, v_shaped)


def _equal_costs(costs: Sequence[float], count: int) -> tuple[int, ...]:
    """Sizes of ``count`` stages of at least one layer whose most expensive one is as cheap as it can be."""
    layers = len(costs)
    until = [0.0]
    for cost in costs:
        until.append(until[-1] + cost)
    # best[k][n]: the most expensive of k stages over the first n layers, and the start of the last of them.
    best: list[list[tuple[float, int]]] = [[(0.0 if n == 0 else float("inf"), 0) for n in range(layers + 1)]]
    for stages in range(1, count + 1):
        row = [(float("inf"), 0)] * (layers + 1)
        for n in range(stages, layers - (count - stages) + 1):
            row[n] = min((max(best[-1][start][0], until[n] - until[start]), start) for start in range(stages - 1, n))
        best.append(row)
    sizes, end = [], layers
    for stages in range(count, 0, -1):
        start = best[stages][end][1]
        sizes.append(end - start)
        end = start
    return tuple(reversed(sizes))
