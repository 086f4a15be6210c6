"""A cluster from what was measured: rates as shares of a peak, and one line through the times of collectives.

A collective of L hops and V bytes takes ``L alpha + V / B`` seconds (``planner/communication/network.py``). Latency
alpha and bandwidth B are the least squares of relative errors over all sizes of all collectives but reduce-scatters,
which have a B of their own: gloo's is a third of that of the others. The rate of elementwise ops is what is left of a
layer's time beyond its matmuls and attention; what each collective takes besides, of a layer that ranks share.

Between passes of a layer, collectives take longer: FSDP2 copies, and where ranks share cores, each message waits for a
core. So what gathers and reductions add to a layer that is sharded counts, beyond what the planner expects of them.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from parallel_ops.planner.cluster import GPU, Cluster, Interconnect
from parallel_ops.planner.communication.network import all_gather_seconds
from parallel_ops.planner.compute.attention import attention_seconds
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.linears import engine_of
from parallel_ops.planner.compute.matmuls import product
from parallel_ops.planner.compute.software import constants_of
from parallel_ops.planner.compute.work import Work, work_of
from parallel_ops.planner.export.trainer import TRAINER
from parallel_ops.planner.model import Model
from parallel_ops.planner.passes import layer_costs
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.step import StepTime

# Bytes that AdamW with fp32 states moves for each fp32 parameter (``planner.step.StepTime.optimizer``).
OPTIMIZER_BYTES = 2 * 4 + 24 + 4
# Ranks of ``Measured.layer_over_ranks``: the smallest group, since the start of a collective counts by doublings.
SHARED = 2
# Times the sequences of ``Measured.layer`` that ``Measured.layer_of_more`` has.
MORE = 4
# The least elementwise traffic relative to the planner's count, where noise leaves less for it.
_LEAST = 0.05
# Seconds of a start of a collective with which its share of a layer is looked up; any would do.
_START = 1e-4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds, each of the slowest of all ranks, which measure at the same time.

    Attributes:
        matmuls: rows, columns, inner size and seconds of matmuls.
        attention: seconds of causal attention of ``model``, forward and backward, of ``sequences`` sequences.
        layer: seconds of one layer of ``model``, forward and backward together, of ``sequences`` sequences.
        layer_of_more: the same of ``MORE`` times as many.
        layer_over_ranks: the same as ``layer`` where ``SHARED`` ranks share layer and sequences; 0 where they cannot.
        sharded: the same as ``layer`` where FSDP2 shards it over all ranks, which have sequences of their own: whole,
            with a reduction, and with two gathers and a reduction; zeros for one rank.
        sharded_over_ranks: the first and the last of these where ``SHARED`` ranks share a layer that the others shard;
            zeros where they cannot.
        update: parameters, and seconds of their norm, clipping and AdamW.
        collectives: kind, bytes of the whole tensor, and seconds.
        product_beside, collective_beside, both: seconds of some matmuls, of a collective, and of the two together.
        launch: seconds of the host for the forward pass of a layer; 0 on CPUs, where it is part of ``layer``.
        model, sequences, dtype: what ``attention`` and ``layer`` are of.
    """

    products: tuple[tuple[int, int, int, float], ...]
    attention: tuple[float, float]
    layer: float
    layer_of_more: float
    layer_over_ranks: float = 0.0
    sharded: tuple[float, float, float] = (0.0, 0.0, 0.0)
    sharded_over_ranks: tuple[float, float] = (0.0, 0.0)
    update: tuple[int, float]
    collectives: tuple[tuple[str, int, float], ...] = ()
    product_beside: float = 0.0
    collective_beside: float = 0.0
    both: float = 0.0
    launch: float
    model: Model
    sequences: int
    dtype: str


def link(collectives: Iterable[tuple[str, int, float]], ranks: int, name: str) -> Interconnect:
    """Latency and bandwidth of the link of ``ranks`` ranks, from kind, bytes and seconds of collectives.

    Raises:
        ValueError: a kind is unknown, or larger collectives take no longer than small ones.
    """
    rows = []  # of expected seconds over measured ones, by latency and inverse bandwidth
    for kind, size, seconds in collectives:
        if kind == "reduce-scatter":
            continue
        rounds = {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}.get(kind)
        if rounds is None:
            raise ValueError(f"link: unknown collective {kind!r}")
        hops = 1 if kind == "all-to-all" else rounds * (ranks - 1)
        rows.append((hops / seconds, rounds * (ranks - 1) / ranks * size / seconds))
    both = np.array(rows)
    latency, inverse = np.linalg.lstsq(both, np.ones(len(rows)), rcond=None)[0]
    if latency < 0:
        latency, inverse = 0.0, both[:, 1].sum() / (both[:, 1] ** 2).sum()
    if inverse <= 0:
        raise ValueError("calibrate: large collectives took no longer than small ones; measure longer")
    return Interconnect(name=name, latency=float(latency), bandwidth=float(1 / inverse))


def scatter_share(collectives: Iterable[tuple[str, int, float]], ranks: int, link: Interconnect) -> float:
    """Bandwidth of reduce-scatters over that of ``link``, from the largest; at most 1."""
    size, seconds = max((size, seconds) for kind, size, seconds in collectives if kind == "reduce-scatter")
    sent = all_gather_seconds(ranks, size, replace(link, latency=0.0))
    return min(1.0, sent / max(sent, seconds - (ranks - 1) * link.latency))


def cluster_of(measured: Measured, gpu: GPU, ranks: int, link_name: str) -> Cluster:
    """The cluster of ``ranks`` devices in one node.

    Args:
        gpu: what is known of the device. Figures that are 0 or infinite are measured ones: the peak in ``dtype``, the
            bandwidth of its memory.
    """
    flops = sum(2.0 * m * n * k for m, n, k, _ in measured.products)
    rate = flops / sum(seconds for *_, seconds in measured.products)
    parameters, seconds = measured.update
    moved = OPTIMIZER_BYTES * parameters / seconds
    if not getattr(gpu, measured.dtype):
        figures: dict[str, Any] = {"bandwidth": moved, measured.dtype: rate}
        gpu = replace(gpu, **figures)
    intra = Interconnect(name="none", latency=0.0, bandwidth=gpu.bandwidth)
    if ranks > 1:
        intra = link(measured.collectives, ranks, link_name)
    bare = Cluster(name="measured", gpu=gpu, gpus=ranks, gpus_per_node=ranks, intra=intra, inter=intra)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a generation without constants
        known = constants_of(bare, TRAINER.software)
    constants = _shares(measured, bare, known, moved)
    return replace(bare, constants=tuple(sorted(constants.items())))


def _shares(measured: Measured, cluster: Cluster, known: Efficiency, moved: float) -> dict[str, float]:
    gpu, model = cluster.gpu, measured.model
    plan = Plan(micro_batch=measured.sequences, global_batch=measured.sequences, dtype=measured.dtype, fused_loss=True)
    work = work_of(plan)
    whole = replace(known, matmul=1.0, flash_forward=1.0, flash_backward=1.0, memory=min(1.0, moved / gpu.bandwidth))
    engine = engine_of(gpu, whole, measured.dtype)
    width = 4 if measured.dtype == "fp32" else 2
    best = sum(product(engine, m, n, k, width=width) for m, n, k, _ in measured.products)
    forward, backward = attention_seconds(model, gpu, whole, work, model.seq_length)
    found = {
        "matmul": min(1.0, best / sum(seconds for *_, seconds in measured.products)),
        "flash_forward": min(1.0, forward / measured.attention[0]),
        "flash_backward": min(1.0, backward / measured.attention[1]),
        "memory": whole.memory,
        "links": 1.0,
        "network": 1.0,
        "host": measured.launch,
        "collective": 0.0,
    }
    if cluster.gpus > 1:
        found["reduce_scatter"] = scatter_share(measured.collectives, cluster.gpus, cluster.intra)
        beside = measured.both - max(measured.product_beside, measured.collective_beside)
        shorter = min(measured.product_beside, measured.collective_beside)
        found["interference"] = min(1.0, max(0.01, beside / shorter))
        # Overlap hides nothing here.
        found["tp_overlap"] = min(known.tp_overlap, 1 - found["interference"])
    constants = replace(known, **found)

    def layer(work: Work, **changed: float) -> float:
        costs = layer_costs(model, cluster, gpu, replace(constants, **changed), work, False)
        return sum(each.total for each in costs)

    # Seconds without elementwise traffic, and those of it, which are linear in it.
    both = work, work._replace(micro_batch=MORE * work.micro_batch)
    least = [layer(each, elementwise=1.0) for each in both]
    moves = [layer(each, elementwise=2.0) - one for each, one in zip(both, least, strict=True)]
    rest = [measured.layer - least[0] + moves[0], measured.layer_of_more - least[1] + moves[1]]
    elementwise = rest[0] / moves[0]
    if not measured.launch:
        # On CPUs a layer takes some time however few tokens it has, half of it in each pass.
        steep = max(_LEAST, (rest[1] - rest[0]) / (moves[1] - moves[0]))
        elementwise = min(elementwise, steep)
        found["serial"] = max(0.0, rest[0] - elementwise * moves[0]) / 2
    found["elementwise"] = max(_LEAST, elementwise)
    if measured.layer_over_ranks:
        constants, shared = replace(known, **found), work_of(replace(plan, tp=SHARED, sequence_parallel=True))
        none, some = (layer(shared, collective=start) for start in (0.0, _START))
        found["collective"] = max(0.0, _START * (measured.layer_over_ranks - none) / (some - none))
    return found | _copies(measured, cluster, replace(known, **found), plan)


def _copies(measured: Measured, cluster: Cluster, constants: Efficiency, plan: Plan) -> dict[str, float]:
    """The constants of copies with which gathers and reductions make a layer as much longer as they did."""

    def exposed(constants: Efficiency, tp: int, zero: int, micro_batches: int) -> float:
        """Data-parallel seconds of one layer in a step: what two more layers add."""
        dp = cluster.gpus // tp
        batch = micro_batches * dp * plan.micro_batch
        step = replace(plan, dp=dp, tp=tp, sequence_parallel=tp > 1, zero=zero, global_batch=batch)
        some, more = (
            StepTime(replace(measured.model, num_layers=layers), cluster, step, constants).data_parallel()
            for layers in (1, 3)
        )
        return (more - some) / 2

    def reduction(constants: Efficiency) -> float:
        # One micro-batch more: parameters stay whole from one to the next.
        return exposed(constants, 1, 2, 3) - exposed(constants, 1, 2, 2)

    def solved(name: str, seconds: float, of: Callable[[Efficiency], float]) -> float:
        none, one = (of(replace(constants, **{name: value})) for value in (0.0, 1.0))
        return max(0.0, (seconds - none) / (one - none)) if one > none else 0.0

    found: dict[str, float] = {}
    whole, reduced, gathered = measured.sharded
    if whole:
        found["reduce_copies"] = solved("reduce_copies", reduced - whole, reduction)
        constants = replace(constants, **found)
        found["gather_copies"] = solved("gather_copies", gathered - whole, lambda c: exposed(c, 1, 3, 1))
        constants = replace(constants, **found)
    whole, gathered = measured.sharded_over_ranks
    if whole:
        found["tp_copies"] = max(1.0, solved("tp_copies", gathered - whole, lambda c: exposed(c, SHARED, 3, 1)))
    return found


def as_json(cluster: Cluster, measured: Measured) -> dict[str, Any]:
    """The file of a cluster, for ``--cluster``, with what was measured."""
    found = asdict(cluster)
    for name in ("parts", "oversubscription", "pod", "rails", "price", "topology"):
        del found[name]
    constants: Mapping[str, float] = dict(cluster.constants)
    return {**found, "constants": constants, "measured": asdict(measured)}
