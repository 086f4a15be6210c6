"""Whether the linears of a model have sizes that float8 products need, before a rank is started."""

from parallel_ops.layers import RowParallelLinear
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.models.lora import linears_of
from parallel_ops.ops.float8_linear import MULTIPLE


def size_problem(config: TransformerConfig, tp: int, at_the_ends: int) -> str | None:
    """Names a linear whose part on a tensor-parallel rank has other sizes; ``None`` if there is none.

    Args:
        at_the_ends: As many layers at the start, and at the end, that stay in 16 bits.
    """
    for name, linear in linears_of(Transformer(config, device="meta")).items():
        if not at_the_ends <= int(name.split(".")[1]) < config.num_layers - at_the_ends:
            continue
        rows, columns = linear.out_features, linear.in_features
        if isinstance(linear, RowParallelLinear):
            columns //= tp
        else:
            # With fewer key heads than ranks, a rank uses one head.
            rows //= min(tp, config.resolved_num_kv_heads) if name.endswith((".k", ".v")) else tp
        if rows % MULTIPLE or columns % MULTIPLE:
            return f"needs sizes of linears that {MULTIPLE} divides on each rank of tp: {name} has {columns} x {rows}"
    return None
