"""Time of attention, of recurrences and of compressed attention: what mixes tokens, without the linears."""

from functools import lru_cache

from parallel_ops.planner.cluster import GPU
from parallel_ops.planner.compute.documents import shares
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.linears import engine_of
from parallel_ops.planner.compute.matmuls import product
from parallel_ops.planner.compute.work import Work
from parallel_ops.planner.model import Model
from parallel_ops.planner.precision import stored

# 16-bit FLOPs and exponentials of an SM a clock, where FLOPs no longer take longer for heads of 64.
_SFU_BOUND = {"blackwell": (8192, 16)}
# Rows of scores in one block of FlashAttention.
_FLASH_BLOCK = 128


@lru_cache(maxsize=1024)
def _exponentials(model: Model, generation: str) -> tuple[float, float]:
    """Time of FlashAttention, forward and backward, relative to that of heads of 128 for the same FLOPs.

    A score takes 4 FLOPs for each column of a head forward and 10 backward, and one exponential. Tensor cores have
    doubled with every generation, exponentials have not.
    """
    if generation not in _SFU_BOUND:
        return 1.0, 1.0
    tensor, exponentials = _SFU_BOUND[generation]
    head = (model.query_width + model.value_width) / model.num_heads / 2

    def slower(flops: int) -> float:
        return (flops / tensor + 1 / (exponentials * head)) / (flops / tensor + 1 / (exponentials * 128))

    return slower(4), slower(10)


def attention_seconds(model: Model, gpu: GPU, efficiency: Efficiency, work: Work, keys: float) -> tuple[float, float]:
    """Seconds of attention (scores and their matmul with the values) of one micro-batch, forward and backward.

    The queries are those of one rank; ``keys``: keys per sequence, all or those of one block of ring attention.
    """
    tokens = model.seq_length * work.micro_batch / work.cp
    if not model.scored:
        # Assumed: the share of the peak that FlashAttention reaches. Documents bound the entries that a query sees.
        flops = tokens * model.mixed_flops(min(keys, model.documents or keys)) / work.tp
        peak = gpu.peak(stored(work.dtype))
        return flops / (peak * efficiency.flash_forward), 2.5 * flops / (peak * efficiency.flash_backward)
    if work.flash_attention:
        # A causal mask leaves half of the blocks and the diagonal; so does a zigzag ring on each rank.
        left = 0.5 * (1 + min(1.0, _FLASH_BLOCK / keys))
        flops = left * tokens * model.attention_flops * keys / model.seq_length / work.tp
        peak = gpu.peak(stored(work.dtype))
        flops *= model.attended(keys)
        if work.cp_kind == "ring" and (found := shares(model, work.cp)):
            flops *= found.uneven
        ahead, back = _exponentials(model, gpu.generation)
        # The backward pass recomputes the scores: five matmuls instead of two.
        return ahead * flops / (peak * efficiency.flash_forward), 2.5 * back * flops / (
            peak * efficiency.flash_backward
        )
    engine, rows = engine_of(gpu, efficiency, work.dtype), model.seq_length / work.cp
    count, heads = work.micro_batch * model.num_heads / work.tp, model.num_heads
    head, value = model.query_width / heads, model.value_width / heads
    width = 4 if work.dtype == "fp32" else 2
    forward = product(engine, rows, keys, head, count=count, width=width)
    forward += product(engine, rows, value, keys, count=count, width=width)
    return forward, 2 * forward
