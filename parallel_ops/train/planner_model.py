"""The planner's model of a transformer."""

from typing import Any

from parallel_ops.models import TransformerConfig
from parallel_ops.planner.model import LatentAttention, Model


def planner_model(config: TransformerConfig, sequence: int, name: str = "model") -> Model:
    """The planner's model for sequences of ``sequence`` tokens. It does not include windows, norms of queries and keys,
    sinks, biases of experts and of attention's output alone, and learned positions beyond the sequence."""
    experts: dict[str, Any] = {}
    if config.experts is not None:
        experts = {
            "experts": config.experts.num_experts,
            "experts_per_token": config.experts.top_k,
            "shared_experts": config.experts.shared_experts,
            "expert_ffn": config.experts.ffn_hidden_size,
            "dense_layers": config.experts.dense_layers,
        }
    latent = None
    if config.latent is not None:
        latent = LatentAttention(
            query_rank=config.latent.q_lora_rank or 0,
            key_value_rank=config.latent.kv_lora_rank,
            head=config.latent.qk_nope_head_dim,
            rope_head=config.latent.qk_rope_head_dim,
            value_head=config.latent.v_head_dim,
        )
    return Model(
        name=name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        vocab_size=config.vocab_size,
        seq_length=sequence,
        num_kv_heads=config.resolved_num_kv_heads,
        head_dim=config.resolved_head_dim if latent is None else config.latent.v_head_dim,  # type: ignore[union-attr]
        latent=latent,
        ffn_hidden_size=config.resolved_ffn_hidden_size,
        gated=config.activation == "swiglu",
        bias="all" if config.bias else "qkv" if config.resolved_qkv_bias else "none",
        norm="rms" if config.norm == "rms_norm" else "layer",
        positions=config.positions,
        tied_embeddings=config.tied_embeddings,
        prediction_layers=config.prediction_layers,
        dropout=config.dropout > 0 or config.attention_dropout > 0,
        **experts,
    )
