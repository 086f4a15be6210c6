"""Checks that the sizes of a model fit its plan, before a rank is started."""

from collections.abc import Iterator

from parallel_ops.layers import RowParallelLinear
from parallel_ops.layers.linear_base import ParallelLinear
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.planner.plan import Plan

# The key that is wrong, and the reason.
Problems = Iterator[tuple[str, str]]


def float8_problems(config: TransformerConfig, tp: int, multiples: dict[str, int], at_the_ends: int) -> Problems:
    """Names a linear, and experts, whose part on a tensor-parallel rank has sizes that float8 does not take.

    Args:
        multiples: Of the recipes of ``"linears"`` and ``"experts"``. at_the_ends: Number of layers at the start, and
            at the end, that stay in 16 bits.
    """
    experts = config.experts
    if experts is not None and (multiple := multiples.get("experts")):
        for name, size in (("hidden_size", config.hidden_size), ("experts' ffn_hidden_size", experts.ffn_hidden_size)):
            if size % multiple:
                other = 'precision.experts = "bf16" keeps them in 16 bits'
                yield (
                    "precision.experts",
                    f"needs sizes of experts that {multiple} divides: {name} is {size}; {other}",
                )
    if not (multiple := multiples.get("linears")):
        return
    for name, linear in Transformer(config, device="meta").named_modules():
        if not isinstance(linear, ParallelLinear):
            continue
        if not at_the_ends <= int(name.split(".")[1]) < config.all_layers - at_the_ends:
            continue
        rows, columns = linear.out_features, linear.in_features
        if isinstance(linear, RowParallelLinear):
            columns //= tp
        else:
            # With fewer key heads than ranks, a rank uses one head.
            rows //= min(tp, config.resolved_num_kv_heads) if name.endswith((".k", ".v")) else tp
        if rows % multiple or columns % multiple:
            found = f"{name} has {columns} x {rows}"
            yield "precision.linears", f"needs sizes of linears that {multiple} divides on each rank of tp: {found}"
            return


def size_problems(config: TransformerConfig, plan: Plan, length: int, row: int) -> Problems:
    """Sizes that the ranks of tp and cp cannot split.

    Args:
        length: Tokens of a sequence. row: Of a row of a micro-batch, which may have several sequences.
    """
    kv_heads = config.resolved_num_kv_heads
    for name, size in (("num_heads", config.num_heads), ("ffn_hidden_size", config.resolved_ffn_hidden_size)):
        if size % plan.tp:
            yield f"model.{name}", f"is {size}, which tp={plan.tp} must divide"
    if kv_heads % plan.tp and plan.tp % kv_heads:
        yield "model.num_kv_heads", f"is {kv_heads}, which tp={plan.tp} must divide, or be a multiple of"
    if length > config.seq_length:
        longer = "; model.seq_length sets more" if config.positions == "rotary" else ""
        yield "data.seq_length", f"is {length}, but the model's sequences have at most {config.seq_length}{longer}"
    for name, rows in (("vocab_size", config.vocab_size), ("seq_length", config.seq_length)):
        has_table = name == "vocab_size" or config.positions == "learned"
        if has_table and (plan.tp - 1) * -(-rows // plan.tp) >= rows:
            yield f"model.{name}", f"is {rows}, of which one of the tp={plan.tp} ranks would have no row"
    if plan.tp > 1 and plan.sequence_parallel and row % (plan.tp * plan.cp):
        yield "data.seq_length", f"is {length}, which tp * cp ({plan.tp * plan.cp}) must divide"
    if plan.cp_kind == "all_to_all" and plan.cp > 1 and kv_heads % (plan.tp * plan.cp):
        yield "model.num_kv_heads", f"is {kv_heads}, which tp * cp ({plan.tp * plan.cp}) must divide"


def expert_problems(config: TransformerConfig, plan: Plan, length: int, row: int) -> Problems:
    """Experts that the ranks cannot share. Arguments: see ``size_problems``."""
    experts = config.experts
    if experts is None:
        if plan.ep > 1:
            yield "parallel.ep", f"must be 1 for a model without experts, got {plan.ep}"
        if plan.recompute == "experts":
            yield "recompute.kind", "must not be 'experts' for a model without experts"
        return
    if (shared := experts.shared_experts * experts.ffn_hidden_size) % plan.tp:
        yield "model.experts", f"have shared experts of width {shared} together, which tp={plan.tp} must divide"
    if experts.num_experts % plan.ep:
        yield "parallel.ep", f"must divide the model's {experts.num_experts} experts, got {plan.ep}"
    if experts.capacity_factor is not None and plan.ep > 1 and row % plan.cp:
        yield (
            "data.seq_length",
            f"is {length}, which cp={plan.cp} must divide with capacity_factor and ep: experts have one "
            "capacity on all ranks",
        )
