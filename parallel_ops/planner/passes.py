"""Compute and exposed communication of one micro-batch, by layer, by chunk of layers and by pipeline rank.

They do not depend on ZeRO, offload or the batch size, and on the schedule only by the placement of layers. A search
needs the same ones many times, so they are cached.
"""

from functools import lru_cache
from typing import NamedTuple

from parallel_ops.planner.cluster import GPU, Cluster
from parallel_ops.planner.communication.traffic import end_traffic, layer_traffic
from parallel_ops.planner.compute.compute import head_passes, layer_passes
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.work import PassTimes, Work
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import StageLayout, head_rank, layer_counts, recomputed_share


class RankPassTimes(NamedTuple):
    """Passes of one micro-batch on the pipeline ranks, all their chunks together.

    Attributes:
        slowest: the rank that takes longest.
        passes: compute and exposed communication of the slowest rank.
        busy: seconds of the slowest rank.
        others: seconds of each of the other ranks on average: a pipeline fills and drains through them.
    """

    slowest: int
    passes: tuple[PassTimes, PassTimes]
    busy: float
    others: float


@lru_cache(maxsize=65536)
def rank_passes(
    model: Model, cluster: Cluster, constants: Efficiency, work: Work, layout: StageLayout, paired: bool
) -> RankPassTimes:
    """Passes of the ranks of a pipeline. ``paired``: see ``layer_costs``."""
    kinds, kind_of = _kinds_of_rank(model, cluster, layout)
    costs = {gpu: costs_of(model, cluster, gpu, constants, work, paired) for gpu in {gpu for *_, gpu in kinds}}
    found = [costs[gpu].of_chunk(layers, ends) for layers, ends, gpu in kinds]
    each = [compute.total + waits.total for compute, waits in found]
    totals = [each[kind] for kind in kind_of]
    busy = max(totals)
    slowest = totals.index(busy)
    others = (sum(totals) - busy) / max(1, layout.pp - 1)
    return RankPassTimes(slowest, found[kind_of[slowest]], busy, others)


Kind = tuple[tuple[int, ...], tuple[bool, bool], GPU]


@lru_cache(maxsize=65536)
def _kinds_of_rank(model: Model, cluster: Cluster, layout: StageLayout) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """The kinds of rank that differ in layers, ends of the model or GPU, and the index of the kind of each rank."""
    gpus, head = cluster.stage_gpus(layout.pp), head_rank(layout)
    kinds: dict[Kind, int] = {}
    kind_of = [
        kinds.setdefault((layers, (rank == 0, rank == head), gpus[rank]), len(kinds))
        for rank, layers in enumerate(layer_counts(model, layout))
    ]
    return tuple(kinds), tuple(kind_of)


class Costs(NamedTuple):
    """Compute and exposed communication of one micro-batch, of the parts of a model on one GPU.

    Attributes:
        model: the model.
        layers: of one layer of each of ``Model.kinds``.
        embedding: communication of the input embedding.
        head: compute and communication of the output embedding and the loss.
        serial: see ``Efficiency``.
    """

    model: Model
    layers: tuple[tuple[PassTimes, PassTimes], ...]
    embedding: PassTimes
    head: tuple[PassTimes, PassTimes]
    serial: PassTimes

    def of_chunk(self, layers: tuple[int, ...], ends: tuple[bool, bool]) -> tuple[PassTimes, PassTimes]:
        """Compute and exposed communication of one chunk of layers.

        Args:
            layers: numbers of layers of each of ``Model.kinds``.
            ends: whether the chunk has the input embedding, and whether it has the output embedding and the loss.
        """
        compute = [(layer, count) for count, (layer, _) in zip(layers, self.layers, strict=True) if count]
        waits = [(exposed, count) for count, (_, exposed) in zip(layers, self.layers, strict=True) if count]
        if True in ends:
            first, last = ends_read(self.model, ends)
            waits.append((self.embedding, first))
            if last:
                compute += (self.head[0], last), (self.serial, last)
                waits.append((self.head[1], last))
        return _total(compute), _total(waits)


def _total(parts: list[tuple[PassTimes, int]]) -> PassTimes:
    forward = input_grad = weight_grad = 0.0
    for each, count in parts:
        forward += each.forward * count
        input_grad += each.input_grad * count
        weight_grad += each.weight_grad * count
    return PassTimes(forward, input_grad, weight_grad)


@lru_cache(maxsize=65536)
def costs_of(model: Model, cluster: Cluster, gpu: GPU, constants: Efficiency, work: Work, paired: bool) -> Costs:
    """The costs of the parts of a model. ``paired``: see ``layer_costs``."""
    exposed = end_traffic(model, cluster, work, constants, last=True).exposed
    host = constants.host if work.cuda_graph == "none" else 0.0
    return Costs(
        model,
        tuple(layer_costs(shape, cluster, gpu, constants, work, sparse, paired) for shape, sparse in model.kinds),
        end_traffic(model, cluster, work, constants, last=False).exposed,
        (launched(head_passes(model, gpu, constants, work), exposed, host, 1), exposed),
        PassTimes(constants.serial, constants.serial, 0.0),
    )


def ends_read(model: Model, ends: tuple[bool, bool]) -> tuple[int, int]:
    """How often a micro-batch reads the input and the output embedding in a chunk that has the ``ends`` of the model:
    for each further token that is predicted both, beside the loss."""
    first, last = ends
    return first + last * model.prediction_layers, last * (1 + model.prediction_layers)


@lru_cache(maxsize=65536)
def layer_costs(
    model: Model, cluster: Cluster, gpu: GPU, constants: Efficiency, work: Work, sparse: bool, paired: bool = False
) -> tuple[PassTimes, PassTimes]:
    """Compute and exposed communication of one layer, per micro-batch.

    Time that the GPU waits for the host to launch a pass counts as compute. ``paired``: DualPipe's pairs hide the
    all-to-alls of one pass behind the other.
    """
    backward = 1 + (recomputed_share(model, work.recompute_layers) if work.recompute == "full" else 0)
    passes = layer_passes(model, gpu, constants, work, sparse)
    traffic = layer_traffic(model, cluster, work, constants, sparse)
    exposed = _less(traffic.exposed, traffic.beside_products, passes, constants.tp_overlap)
    routed = sum(transfer.seconds * count for transfer, count in traffic.transfers if transfer.group == "ep")
    if paired and routed:
        total = exposed.total
        exposed = exposed.times((total - routed + beside(constants, routed, passes.total)) / total)
    host = constants.host if work.cuda_graph == "none" else 0.0
    host += constants.expert_host if sparse and work.cuda_graph != "full" else 0.0
    host *= 1 + _SOFTMAX_LAUNCHES if softmax_falls_back(model, work) else 1
    late = constants.expert_sync * host if sparse and not work.capacity_factor else 0.0
    if waits := constants.serial + late:
        passes += PassTimes(waits, backward * waits, 0.0)
    return launched(passes, exposed, host - late, backward), exposed


def softmax_falls_back(model: Model, work: Work) -> bool:
    """Whether Megatron-LM's fused softmax refuses a layer and several kernels replace it: it takes sequences and heads
    by fours (megatron/core/fusions/fused_softmax.py, ``is_kernel_available``)."""
    return (
        model.scored
        and not work.flash_attention
        and work.fused_ops
        and work.micro_batch * model.num_heads // work.tp % 4 != 0
    )


def _less(exposed: PassTimes, beside_products: PassTimes, compute: PassTimes, share: float) -> PassTimes:
    """``exposed`` without the share of tensor-parallel communication that matmuls hide, at most their time."""
    if not share or not beside_products.forward:
        return exposed
    forward = min(share * beside_products.forward, compute.forward)
    backward = min(share * beside_products.input_grad, compute.input_grad + compute.weight_grad)
    return exposed + PassTimes(-forward, -backward, 0.0)


# Launches that replace the fused softmax (conversions, scale, mask, softmax), as a share of those of a layer. Chosen
# with vTrain's rows in view.
_SOFTMAX_LAUNCHES = 0.6


def launched(compute: PassTimes, waits: PassTimes, host: float, backward: float) -> PassTimes:
    """``compute`` plus the time that the GPU waits for launches: ``host`` seconds for the forward pass, ``backward``
    times that for the backward pass.

    Launches are queued, so the host works beside the GPU: the slower of the two sets the time of a pass. In vTrain's
    runs a layer takes as long with one sequence as with four where the host limits it, and then follows the GPU.
    """
    back = compute.input_grad + compute.weight_grad + waits.input_grad + waits.weight_grad
    forward = max(0.0, host - compute.forward - waits.forward)
    return compute + PassTimes(forward, max(0.0, backward * host - back), 0.0)


def beside(constants: Efficiency, communication: float, computation: float) -> float:
    """Seconds that ``communication`` adds to ``computation`` if the two overlap."""
    shorter = min(communication, computation)
    return max(0.0, communication - computation) + constants.interference * shorter
