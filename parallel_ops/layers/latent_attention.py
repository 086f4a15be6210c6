"""Multi-head latent attention: queries, keys and values pass through narrow projections that all heads share.

    c_q       = norm(W_qa x)        q   = W_qb c_q              by head: a part without position, and a rotary one
    c_kv, k_r = W_kva x             k, v = W_kvb norm(c_kv)     by head; the rotary part k_r is that of all heads
    y         = W_o core_attention([q, rotated], [k, k_r rotated], v)

The narrow projections are whole on every rank, and computed for this rank's tokens; the wide ones are sharded by heads.
With sequence parallelism the narrow vectors are gathered, not the residual stream. Source: DeepSeek-AI,
arXiv:2405.04434, section 2.1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from parallel_ops.comm import all_gather, copy_to_group
from parallel_ops.layers.attention import Angles
from parallel_ops.layers.core_attention import AttentionHeads, CoreAttention
from parallel_ops.layers.initialization import InitFn
from parallel_ops.layers.linear import ColumnParallelLinear, RowParallelLinear, joined_linears
from parallel_ops.layers.linear_base import LinearArguments
from parallel_ops.layers.norm import Norm
from parallel_ops.layers.parameters import check_input, propagates_errors
from parallel_ops.layers.replicated import ReplicatedLinear
from parallel_ops.ops import rotary_embedding

# DeepSeek fixes eps=1e-6 for the q and kv latent norms, independent of the model's norm_eps.
_NORM_EPS = 1e-6


class ParallelLatentAttention(AttentionHeads):
    """Causal multi-head latent attention, in the place of ``ParallelSelfAttention``.

    Args:
        hidden_size: width of input and output.
        num_heads: heads; a multiple of the mesh's size.
        kv_lora_rank: width of the vector that keys and values are made of.
        qk_nope_head_dim, qk_rope_head_dim: widths of the parts of a query and key head without position, and rotary.
        v_head_dim: width of a value head.
        tp_mesh: the ranks that share the heads; ``None`` for one.
        q_lora_rank: the same for queries; ``None`` for one projection.
        scale: of the scores; ``None`` for 1 / sqrt of the width of a query head.
        interleaved: which dimensions of the rotary parts are a pair; see ``rotary_embedding``.
        window_size, core_attention, attention_dropout, linear: see ``ParallelSelfAttention``.
        init_method, output_init_method: fill tiles of the projections, and of ``out``, in place; ``None`` for what
            ``nn.Linear`` does.

    Raises:
        TypeError, ValueError: sizes that do not fit each other or the mesh.

    Examples:
        >>> import torch
        >>> from parallel_ops.layers import ParallelLatentAttention
        >>> attention = ParallelLatentAttention(
        ...     64, 4, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, tp_mesh=None
        ... )
        >>> angles = torch.arange(32)[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
        >>> attention(torch.randn(32, 2, 64), (angles.cos(), angles.sin())).shape
        torch.Size([32, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        tp_mesh: DeviceMesh | None,
        q_lora_rank: int | None = None,
        scale: float | None = None,
        interleaved: bool = True,
        window_size: tuple[int, int] | None = None,
        core_attention: CoreAttention | None = None,
        attention_dropout: float = 0.0,
        init_method: InitFn | None = None,
        output_init_method: InitFn | None = None,
        **linear: Unpack[LinearArguments],
    ) -> None:
        super().__init__(
            num_heads,
            tp_mesh,
            causal=True,
            window_size=window_size,
            core_attention=core_attention,
            attention_dropout=attention_dropout,
        )
        if qk_rope_head_dim % 2:
            raise ValueError(f"ParallelLatentAttention: qk_rope_head_dim must be even, got {qk_rope_head_dim}")
        self.nope, self.rope, self.v_head_dim, self.kv_lora_rank = (
            qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank,
        )  # fmt: skip
        self.scale = (self.nope + self.rope) ** -0.5 if scale is None else scale
        self.interleaved = interleaved
        self.sequence_parallel = linear.get("sequence_parallel", False) and self.ranks > 1
        where: dict[str, Any] = {name: linear.get(name) for name in ("device", "dtype")}
        where |= {"tp_mesh": self.mesh, "sequence_parallel": self.sequence_parallel}

        def narrow(width: int) -> ReplicatedLinear:
            return ReplicatedLinear(hidden_size, width, init_method=init_method, **where)

        def wide(rank: int, width: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                rank, num_heads * width, bias=False, init_method=init_method, tp_mesh=self.mesh, **linear
            )

        self.q_down = None if q_lora_rank is None else narrow(q_lora_rank)
        self.q_norm = None if q_lora_rank is None else Norm(q_lora_rank, "rms_norm", _NORM_EPS, **where)
        self.q = wide(hidden_size if q_lora_rank is None else q_lora_rank, self.nope + self.rope)
        self.kv_down = narrow(kv_lora_rank + self.rope)
        self.kv_norm = Norm(kv_lora_rank, "rms_norm", _NORM_EPS, **where)
        self.kv = wide(kv_lora_rank, self.nope + v_head_dim)
        self.out = RowParallelLinear(
            num_heads * v_head_dim, hidden_size, bias=False, init_method=output_init_method, tp_mesh=self.mesh, **linear
        )

    @propagates_errors
    def forward(
        self,
        x: Tensor,
        angles: Angles | None = None,
        mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        residual: Tensor | None = None,
        dropout: float = 0.0,
        row_positions: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        core_options: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """``[s, b, hidden_size]`` to the same shape; see ``ParallelSelfAttention.forward``.

        Args:
            angles: cosines and sines, ``[positions, qk_rope_head_dim / 2]`` each.
            mask: for a core attention that takes one.

        Raises:
            TypeError, ValueError: x that is not ``[s, b, hidden_size]`` in the dtype of the weights, options
                that the core attention does not take, angles or positions that do not fit.

        Sharding: x and the result replicated, or both S(0) with ``sequence_parallel``.
        """
        check_input("ParallelLatentAttention", x, self.kv_down.weight, "[s, b, {}]")
        given = self._options_of(core_options, mask)
        latent = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x, sizes))
        (q,), _ = joined_linears("ParallelLatentAttention", latent, [self.q], sizes=sizes)
        latent, k_rope = self.kv_down(x, sizes).split([self.kv_lora_rank, self.rope], dim=-1)
        (kv,), _ = joined_linears("ParallelLatentAttention", self.kv_norm(latent), [self.kv], sizes=sizes)
        q, kv = (t.unflatten(-1, (self.local_heads, -1)) for t in (q, kv))
        k_rope = self._of_all_tokens(k_rope, sizes).unsqueeze(2)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        k_nope, v = kv.split([self.nope, self.v_head_dim], dim=-1)
        if angles is not None:
            q_rope, k_rope = (
                rotary_embedding(t, *angles, positions=positions, interleaved=self.interleaved)
                for t in (q_rope, k_rope)
            )
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, -1, self.local_heads, -1)], dim=-1)
        y = self._attend(q, k, v, self.scale, given)
        out: Tensor = self.out(y, residual=residual, dropout=dropout, row_positions=row_positions, sizes=sizes)
        return out

    def _of_all_tokens(self, k_rope: Tensor, sizes: Sequence[int] | None) -> Tensor:
        """The rotary part of the keys of all tokens. Each rank's heads give it a part of its gradient."""
        if self.sequence_parallel:
            return all_gather(k_rope, self.group, sizes=sizes)
        return copy_to_group(k_rope, self.group)
