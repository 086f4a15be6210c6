"""Shapes of models from the ``config.json`` of Hugging Face folders."""

from collections.abc import Iterator, Mapping
from typing import Any

from parallel_ops.planner.cli.huggingface_hybrids import FAMILIES, LAYERS, MIXERS, hybrid, integer, kinds_of
from parallel_ops.planner.model import LatentAttention, Model
from parallel_ops.planner.model.mixers import ATTENTION

# Fields with n where each n-th layer alone has experts.
_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "moe_layer_interval")
# Fields with a list of which layers have experts.
_BY_LAYER = frozenset(["mlp_layer_types", "moe_layer_freq"])
# Fields of families with layers of other kinds, which the planner has no times for.
_OTHER_LAYERS = ("linear_attn", "mamba", "recurrent", "conv", "hybrid_override_pattern", "index_topk", "ssm")


def is_config(data: Mapping[str, Any]) -> bool:
    """Whether a JSON object is such a file."""
    return "model_type" in data or "architectures" in data


def model_of(data: Mapping[str, Any], name: str, sequence: int | None) -> tuple[Model, tuple[str, ...]]:
    """The shape that a ``config.json`` describes, and what was assumed about it.

    Args:
        data: content of the file. The language model of a multimodal one is in ``text_config``.
        name: of the model.
        sequence: tokens of a training sequence; ``None`` for 4,096 or the longest that the model takes.

    Raises:
        ValueError: a size that every transformer has is missing, or layers are of a kind without times here.
    """
    text: Mapping[str, Any] = data.get("text_config") or data
    if not isinstance(text, dict):
        raise ValueError(f"{name}: text_config must be an object, got {text!r}")
    if not isinstance(types := text.get("layer_types") or [], list):
        raise ValueError(f"{name}: layer_types must be a list, got {types!r}")
    family = str(text.get("model_type") or data.get("model_type") or "")
    usual = FAMILIES.get(family, {})
    tied, biased = usual.get("tied_embeddings", False), text.get("attention_bias") or text.get("use_qkv_bias")
    try:
        own = hybrid(text, family)
    except KeyError as error:
        raise ValueError(f"{name}: no {error.args[0]}, or a value of it that the planner has no times for") from None
    other = {kind for kind in map(str, types) if LAYERS.get(kind) not in ATTENTION}
    other |= {kind for kind in _OTHER_LAYERS if any(kind in field for field in text)}
    if other and own is None:
        raise ValueError(f"{name}: the planner has no times for layers of the kind {', '.join(sorted(other))}")

    def size(*names: str) -> int:
        if (found := integer(text, *names)) is None:
            raise ValueError(f"{name}: no {' or '.join(names)}, which the shape of a model needs")
        return found

    def optional(default: int, *names: str) -> int:
        return default if (found := integer(text, *names)) is None else found

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "num_heads")
    longest = optional(4096, "max_position_embeddings", "n_positions", "n_ctx")
    experts = optional(0, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = (own or {}).get("experts", experts)
    ffn = optional(4 * hidden, "intermediate_size", "n_inner", "ffn_hidden_size")
    layers = (own or {}).get("num_layers") or size("num_hidden_layers", "n_layer", "num_layers")
    # Falcon: one head of keys and values, whatever their number is said to be.
    multi_query = text.get("multi_query") and not text.get("new_decoder_architecture")
    keys = 1 if multi_query else optional(0, "num_key_value_heads", "num_kv_heads")
    assumed = [] if family in FAMILIES else list(_assumptions(text, family, experts))
    further = optional(0, "num_nextn_predict_layers", "mtp_num_hidden_layers")
    if further and "compressed" not in (own or {}):
        assumed.append(f"no multi-token prediction (--workload prediction_layers={further})")
    if sequence is None:
        assumed.append(f"sequences of {min(4096, longest):,} tokens (--seq)")
    fields: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": 0 if "kv_lora_rank" in text else keys,
        "head_dim": 0 if "kv_lora_rank" in text else optional(0, "head_dim"),
        "ffn_hidden_size": ffn,
        "vocab_size": size("vocab_size"),
        "seq_length": sequence or min(4096, longest),
        "gated": usual.get("gated", True),
        "bias": usual.get("bias", "qkv" if biased else "none"),
        "norm": "layer"
        if any(each in text for each in ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"))
        else "rms",
        "positions": usual.get("positions", "rotary"),
        "tied_embeddings": bool(text.get("tie_word_embeddings", data.get("tie_word_embeddings", tied))),
        "dropout": False,
        "window": (integer(text, "sliding_window") or 0) if text.get("use_sliding_window", True) else 0,
        "layers": kinds_of(text, layers),
    }
    if own is not None:
        fields |= own
    elif fields["window"] == 0 or fields["window"] >= fields["seq_length"]:
        fields |= {"window": 0, "layers": ()}
    if experts:
        expert = optional(ffn, "moe_intermediate_size", "expert_intermediate_size")
        shared = optional(0, "n_shared_experts", "num_shared_experts")
        width = optional(0, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
        shared = round(width / expert) or shared
        fields |= {
            "experts": experts,
            "experts_per_token": size("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k"),
            "shared_experts": shared,
            "expert_ffn": expert,
            "dense_layers": min(layers, _dense_layers(text, name)),
        }
    if "kv_lora_rank" in text:
        sizes = {field: size(name) for field, name in MIXERS["latent"].items()}
        fields["latent"] = LatentAttention(query_rank=text.get("q_lora_rank") or 0, **sizes)
    return Model(name=name, **fields), tuple(assumed)


def _dense_layers(text: Mapping[str, Any], name: str) -> int:
    """The layers without experts, which come first."""
    count = integer(text, "first_k_dense_replace", "num_dense_layers") or 0
    between = [each for each in _EVERY if isinstance(text.get(each), int) and text[each] > 1]
    between += ["mlp_only_layers"] * bool(text.get("mlp_only_layers"))
    for each in _BY_LAYER & text.keys():
        if isinstance(kinds := text[each], list):
            sparse = [kind not in ("dense", 0) for kind in kinds]
            count = sparse.index(True) if any(sparse) else len(kinds)
            between += [each] * (not all(sparse[count:]))
    if between:
        raise ValueError(
            f"{name}: {between[0]} leaves layers between others without experts, for which there are no times"
        )
    return count


def _assumptions(text: Mapping[str, Any], family: str, experts: int) -> Iterator[str]:
    yield f"{family or 'a model without model_type'} is read as a Llama: gated MLP, RMSNorm, rotary positions"
    if "num_key_value_heads" not in text and "kv_lora_rank" not in text:
        yield "as many heads of keys and values as of queries"
    if experts and "moe_intermediate_size" not in text:
        yield "experts as wide as intermediate_size"
    if "intermediate_size" not in text:
        yield "an MLP of four times the hidden size"
