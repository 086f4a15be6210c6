"""Tensor-parallel communication of a layer. Formulas: ``traffic.py``."""

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.communication.network import all_reduce_transfer, group_link, ring_transfer, start_seconds
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.work import Work
from parallel_ops.planner.memory.states import state_bytes
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.precision import FORMATS
from parallel_ops.planner.results import Transfer

Transfers = list[tuple[Transfer, float]]


class TensorParallelGroup:
    """The collectives of the tensor-parallel ranks of a plan."""

    def __init__(self, cluster: Cluster, plan: Plan, efficiency: Efficiency) -> None:
        self._ranks, self._gathered = plan.tp, efficiency.gathered_sums
        self._link, self._start = group_link(cluster, plan, "tp", efficiency), start_seconds(efficiency, plan.tp)

    def parted(self, kind: str, size: float) -> Transfer:
        """An all-gather or a reduce-scatter of ``size`` bytes."""
        return ring_transfer("tp", kind, self._ranks, size, self._link, start=self._start)

    def summed(self, size: float, *, gathers: bool = True) -> Transfer:
        """The sum of ``size`` bytes over the ranks. ``gathers``: small ones may be all-gathers; else what runs beside
        matmuls."""
        gathered = self._gathered if gathers else 0.0
        return all_reduce_transfer("tp", self._ranks, size, self._link, start=self._start, gathered=gathered)


def gradient_width(work: Work) -> int:
    """Bytes of a parameter's gradient before it is reduced. FSDP2 and ``replicate`` cast parameters; a rank that shares
    its parameters with no other has them in fp32, and casts them op by op."""
    return 4 if work.dtype == "fp32" or (work.fsdp and work.alone) else 2


def tensor_parallel(
    model: Model, cluster: Cluster, plan: Plan, work: Work, efficiency: Efficiency, column: float, sparse: bool,
    again: float,
) -> tuple[Transfers, float, float, float]:  # fmt: skip
    """Tensor-parallel transfers of a layer with their counts, the seconds exposed forward and backward, and those of
    the forward that recomputation leaves out.

    PyTorch's recomputation ends with the last tensor that the backward needs: without sequence parallelism the sum at
    the end of a layer, or the gathering of what experts computed, comes after it.

    Args:
        column: bytes of one number per token.
        again: share of the forward that is computed a second time.
    """
    # Operands of low-precision matmuls are converted, then gathered: Transformer Engine's layernorm_linear.py,
    # torchao's Float8ColwiseParallel, which has no scales of rows; linear/float8.py here does it for inputs alone.
    narrow = FORMATS[work.dtype].width / 2 if work.dtype in FORMATS and work.dtype != "fp8_rowwise" else 1.0
    group, width, m = TensorParallelGroup(cluster, plan, efficiency), gradient_width(work), model.latent
    whole = column * model.hidden_size
    stops = plan.fsdp and again > 0
    skipped = 0.0
    # Experts that are not split over the group have no tensor-parallel communication of their own.
    routed = sparse and plan.expert_shards == 1
    blocks = int(model.has_mlp and (not routed or model.shared_experts > 0)) + int(m is None and model.mixer != "")
    # Latent attention sends its compressed vectors, of which the rotary part of the keys is in no matmul.
    latent = (m.query_rank or model.hidden_size) + m.key_value_rank if m is not None else 0
    entering = latent + m.rope_head if m is not None else 0
    found: Transfers
    if plan.sequence_parallel:
        gather = group.parted("all-gather", whole * narrow)
        scatter = group.parted("reduce-scatter", whole)
        found = [(gather, blocks * (3 + again)), (scatter, blocks * (2 + again))]
        forward = backward = blocks * (gather.seconds + scatter.seconds)
        if latent:
            ahead = group.parted("all-gather", column * entering * narrow)
            back = group.parted("reduce-scatter", column * entering)
            found += [(ahead, 1 + again), (scatter, 1 + again), (gather, 1), (back, 1)]
            # Again, for the gradients of weights.
            found.append((group.parted("all-gather", column * latent * narrow), 1))
            forward, backward = forward + ahead.seconds + scatter.seconds, backward + gather.seconds + back.seconds
        # The last norm of a layer of multi-token prediction is that of an end of the model.
        found.append((group.summed(model.norm_width * width), model.norms - model.ahead))
        # The gradients of biases are sums over the gathered gradients of all tokens.
        biases = model.hidden_size * (1 if sparse else 2) if model.bias == "all" else 0
        replicated = model.whole_in_layer(sparse, plan.tp) - biases - model.norms * model.norm_width
    else:
        after = group.summed(whole)
        back = group.summed(whole, gathers=False)
        found = [(after, blocks * (1 + again) - (again if stops and not routed else 0)), (back, blocks)]
        forward, backward = blocks * after.seconds, blocks * back.seconds
        skipped = after.seconds if stops else 0.0
        if latent:
            assert m is not None
            back = group.summed(column * latent, gathers=False)
            rotary = group.summed(column * m.rope_head)
            found += [(after, 1 + again), (back, 1), (rotary, 1)]
            forward, backward = forward + after.seconds, backward + back.seconds + rotary.seconds
        replicated = model.whole_keys(plan.tp)
        if routed:  # each rank routes its share of the tokens, and all have the results
            gather = group.parted("all-gather", whole)
            # The gradient of the tokens is in their dtype, which is that of the parameters.
            back = group.parted("all-gather", column * (model.hidden_size * width / state_bytes(plan)[0]))
            found += [(gather, 1 if stops else 1 + again), (back, 1)]
            skipped = gather.seconds if stops else 0.0
            forward, backward = forward + gather.seconds, backward + back.seconds
            replicated += model.hidden_size * model.experts
    return found + [(group.summed(replicated * width), 1)] * (replicated > 0), forward, backward, skipped
