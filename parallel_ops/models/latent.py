"""The configuration of multi-head latent attention."""

from dataclasses import dataclass

from parallel_ops.models.checked import Checked


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(Checked):
    """Queries, keys and values that are made of narrow vectors; see ``layers.latent_attention``.

    Attributes:
        q_lora_rank, kv_lora_rank: widths of these vectors; without ``q_lora_rank`` queries are made of the token.
        qk_nope_head_dim, qk_rope_head_dim: widths of the parts of a query and key head without position, and rotary.
        v_head_dim: width of a value head.
        interleaved: pairs of the rotary part are neighbours; otherwise ``i`` and ``i + qk_rope_head_dim / 2``.

    Raises:
        ValueError: naming the field that is wrong.

    Examples:
        >>> from parallel_ops.models import LatentAttentionConfig
        >>> deepseek = LatentAttentionConfig(
        ...     q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ... )
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    interleaved: bool = True

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            self._check_count(name)
        self._check_count("q_lora_rank", optional=True)
        if self.qk_rope_head_dim % 2:
            self._fail(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
