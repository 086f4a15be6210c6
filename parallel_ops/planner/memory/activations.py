"""Activations that one layer keeps for the backward pass, by term; see ``memory.py`` for the notation.

The terms are added up tensor by tensor, which covers grouped queries, gated MLPs, experts and FlashAttention, which
stores no scores (arXiv:2205.14135). With FlashAttention "selective" recomputes the outputs of norms and activation
functions, and the heads that latent attention expands (arXiv:2412.19437, section 3.2.3).
"""

from functools import lru_cache

from parallel_ops.planner.memory.recomputation import recomputed
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import recomputed_share
from parallel_ops.planner.plan import Plan


def _layer_bytes(
    model: Model, sparse: bool, tp: int, shard: int, flash: bool, load: float, recompute: str, dtype: str,
    kept_inputs: str,
) -> float:  # fmt: skip
    h, unsharded, sharded = model.hidden_size, 0.0, 0.0
    width, routed = 4 if dtype == "fp32" else 2, model.experts_per_token * load
    # Bytes of the input of a linear layer. That of the output projection stays, which attention keeps for itself too.
    inputs = 1 if kept_inputs == "fp8" else width
    # Hidden vector, embedding, and both normed, which the projection before a layer of multi-token prediction joins.
    unsharded += 2 * (width + inputs) * h * model.ahead
    if recompute == "operators":
        # The input, every second of the matmuls Q, K, V, output, gate, up, down, and what attention keeps.
        used = routed + model.shared_experts if sparse else model.has_mlp
        ffn = (model.expert_ffn if sparse else model.ffn_hidden_size) * used
        products, scores = ffn + _mixer_inputs(model) + model.value_width * bool(model.mixer), 0
        if model.scored:
            products -= model.key_value_width / 2
            scores = 4 * model.num_heads if flash else width * model.num_heads * model.seq_length
        unsharded += width * h * (model.residual_streams + model.gated)
        return unsharded / shard + (width * products + scores) / tp
    mask = 1 if model.dropout else 0
    again = recomputed(recompute, flash)
    norm = 0 if "layernorm" in again else inputs
    # Input of the norm, its output, mask after attention; the same of the MLP.
    unsharded += model.blocks * (model.residual_streams * width + norm + mask) * h
    sharded += width * model.value_width * bool(model.mixer)
    if not model.latent or "mla_up_proj" not in again:
        sharded += width * _mixer_inputs(model)
    if model.latent:
        unsharded += width * (model.latent.query_rank + model.latent.key_value_rank + model.latent.rope_head)
    if flash or not model.scored:
        sharded += 4 * model.num_heads * (model.mixer not in ("", "recurrent"))  # the logsumexp of each row
    elif "core_attn" not in again:
        sharded += model.num_heads * model.seq_length * (2 * width + 1 if model.dropout else width)
    # Before and after the activation function; a gated one has two inputs.
    per_ffn = width * (2 if model.gated else 1)
    per_ffn += inputs if ("moe_act" if sparse else "mlp_act") not in again else 0
    if not sparse:
        sharded += per_ffn * model.ffn_hidden_size if model.has_mlp and "mlp" not in again else 0
    else:
        used = model.shared_experts if not again & {"moe", "shared_experts"} else 0
        used += routed if not again & {"moe", "experts"} else 0
        sharded += per_ffn * model.expert_ffn * used + 4 * model.experts
        unsharded += inputs * h * routed if "moe" not in again else 0  # dispatched tokens
    return unsharded / shard + sharded / tp


def _mixer_inputs(model: Model) -> float:
    """Elements per token that the core of a mixer keeps beside its output, over all tensor-parallel ranks."""
    if model.mixer == "recurrent" and model.recurrent:
        return model.recurrent.kept
    if model.compressed is not None and model.mixer:
        # Queries, what every rank makes of the hidden vector, and groups of heads.
        return sum(each.outputs * each.number for each in model.mixer_linears[:-1])
    gate = model.value_width if model.attention_gate else 0
    return model.query_width + model.key_value_width + gate if model.mixer else 0


@lru_cache(maxsize=65536)
def _all_layers(
    model: Model, tp: int, shard: int, flash: bool, load: float, recompute: str, dtype: str, kept_inputs: str
) -> tuple[float, ...]:
    if recompute == "full":
        kept = (4 if dtype == "fp32" else 2) * model.residual_streams * model.hidden_size / shard
        return tuple(kept * (1 + kind.shape.ahead) for kind in model.kinds)
    return tuple(_layer_bytes(*kind, tp, shard, flash, load, recompute, dtype, kept_inputs) for kind in model.kinds)


def layer_activations(model: Model, plan: Plan, recompute: str) -> tuple[float, ...]:
    """Bytes per token that a layer of each of ``Model.kinds`` keeps for the backward pass on one GPU under
    ``recompute``, on average if some layers have it."""
    load = model.expert_load(plan.ep, plan.capacity_factor)
    form = plan.tp, plan.tp if plan.sequence_parallel else 1, plan.flash_attention, load
    found = _all_layers(model, *form, recompute, plan.dtype, plan.activation_dtype)
    share = recomputed_share(model, plan.recompute_layers)
    if recompute == "none" or share == 1:
        return found
    whole = _all_layers(model, *form, "none", plan.dtype, plan.activation_dtype)
    return tuple(share * one + (1 - share) * other for one, other in zip(found, whole, strict=True))
