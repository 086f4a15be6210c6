"""Self-attention with its heads sharded over a mesh.

    q, k, v = W_q x + b_q, W_k x + b_k, W_v x + b_v      one gather for the three
    q, k    normed by head with ``qk_norm``; rotated with rotary positions
    y       = W_o core_attention(q, k, v) + b_o             with ``sink`` one more logit of each head

The core attention is a callable (``core_attention.py``). If there are fewer key and value heads than ranks, their
weights are whole on every rank, each rank computes the one head that its queries use, and gradients are summed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from typing_extensions import Unpack

from parallel_ops._internal.distributed.groups import group_rank
from parallel_ops.comm import copy_to_group, reduce_from_group
from parallel_ops.layers.core_attention import AttentionHeads, CoreAttention
from parallel_ops.layers.initialization import InitFn, fill_, init_sharded_
from parallel_ops.layers.linear import ColumnParallelLinear, RowParallelLinear, joined_linears
from parallel_ops.layers.linear_base import LinearArguments
from parallel_ops.layers.norm import Norm
from parallel_ops.layers.parameters import empty_parameter, is_plain, propagates_errors, to_local
from parallel_ops.ops import rms_norm, rotary_embedding

Angles = tuple[Tensor, Tensor]


class ParallelSelfAttention(AttentionHeads):
    """Multi-head self-attention, causal by default.

    Args:
        hidden_size: width of input and output.
        num_heads: query heads; a multiple of the mesh's size.
        tp_mesh: the ranks that share the heads; ``None`` for one.
        num_kv_heads: key and value heads; divides ``num_heads``, and is a multiple or a divisor of the mesh's size.
            ``None`` for ``num_heads``.
        head_dim: size of a head; ``None`` for ``hidden_size / num_heads``.
        qk_norm: an RMS norm of each head of queries and keys (Dehghani et al., arXiv:2302.05442), with ``norm_eps``.
        qk_norm_over: ``"head"``, or ``"all_heads"`` for one norm over all heads of the queries, and one of the keys.
        sink: a learned logit of each head, which takes part in its softmax without a value (OpenAI, arXiv:2508.10925).
        causal: no token attends to a later one.
        window_size: ``(left, 0)``: a token attends to at most ``left`` tokens before it, as FlashAttention counts;
            causal only. Hugging Face's ``sliding_window`` of n is ``(n - 1, 0)``.
        core_attention: see ``parallel_ops.layers.core_attention``; ``None`` for ``flash``.
        attention_dropout: probability, on the attention weights.
        bias: whether the linears have biases; qkv_bias: the same for ``q``, ``k`` and ``v``, ``None`` for ``bias``.
        init_method, output_init_method: fill tiles of ``q``, ``k``, ``v`` and ``sink``, and of ``out``, in place;
            ``None`` for what ``nn.Linear`` does, and zeros of ``sink``.
        linear: ``sequence_parallel`` (shard input and output by tokens over the mesh), ``overlap``, ``grad_reduce``,
            ``device`` and ``dtype`` of ``ColumnParallelLinear`` and ``RowParallelLinear``.

    Attributes:
        sink: ``[num_heads]``, a DTensor S(0), or ``None``.

    Raises:
        TypeError, ValueError: sizes that do not fit each other or the mesh, a core attention that does not take
            ``sink``.

    Examples:
        >>> import torch
        >>> from parallel_ops.layers import ParallelSelfAttention
        >>> attention = ParallelSelfAttention(64, 8, num_kv_heads=2, tp_mesh=None)  # tp_mesh=ParallelMesh(tp=2)["tp"]
        >>> attention(torch.randn(32, 2, 64)).shape
        torch.Size([32, 2, 64])
    """

    sink: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        tp_mesh: DeviceMesh | None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        qk_norm_over: str = "head",
        norm_eps: float = 1e-5,
        sink: bool = False,
        causal: bool = True,
        window_size: tuple[int, int] | None = None,
        core_attention: CoreAttention | None = None,
        attention_dropout: float = 0.0,
        bias: bool = True,
        qkv_bias: bool | None = None,
        init_method: InitFn | None = None,
        output_init_method: InitFn | None = None,
        **linear: Unpack[LinearArguments],
    ) -> None:
        super().__init__(
            num_heads,
            tp_mesh,
            causal=causal,
            window_size=window_size,
            core_attention=core_attention,
            attention_dropout=attention_dropout,
        )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and (num_heads < 1 or hidden_size % num_heads):
            raise ValueError(
                f"ParallelSelfAttention: hidden_size ({hidden_size}) must be a multiple of num_heads ({num_heads}), "
                "or give head_dim"
            )
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if self.head_dim < 1:
            raise ValueError(f"ParallelSelfAttention: head_dim must be positive, got {head_dim}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"ParallelSelfAttention: num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
            )
        self.local_kv_heads, rows = self._split_kv_heads(num_kv_heads)
        if sink and "sink" not in self._core_takes:
            raise ValueError(
                "ParallelSelfAttention: sink needs a core_attention that takes one, such as "
                "parallel_ops.layers.core_attention.flash"
            )
        self.init_method = init_method
        device, dtype = linear.get("device"), linear.get("dtype")
        self.sink = empty_parameter((num_heads,), Shard(0), self.mesh, device, dtype) if sink else None
        self.reset_parameters()
        qkv_bias = bias if qkv_bias is None else qkv_bias
        d, keys = self.head_dim, num_kv_heads * self.head_dim
        common: dict[str, Any] = {"tp_mesh": self.mesh, **linear}
        self.q = ColumnParallelLinear(hidden_size, num_heads * d, bias=qkv_bias, init_method=init_method, **common)
        self.k, self.v = (
            ColumnParallelLinear(hidden_size, keys, bias=qkv_bias, rows=rows, init_method=init_method, **common)
            for _ in range(2)
        )
        if qk_norm_over not in ("head", "all_heads"):
            raise ValueError(f"ParallelSelfAttention: qk_norm_over must be 'head' or 'all_heads', got {qk_norm_over!r}")
        self.norm_all_heads = qk_norm_over == "all_heads"
        self.q_norm, self.k_norm = (
            self._qk_norm(width if self.norm_all_heads else d, norm_eps, device, dtype) if qk_norm else None
            for width in (num_heads * d, num_kv_heads * d)
        )
        self.out = RowParallelLinear(num_heads * d, hidden_size, bias=bias, init_method=output_init_method, **common)

    def reset_parameters(self) -> None:
        """Initialises ``sink``, independently of the mesh; the linears and norms have their own."""
        if self.sink is not None and self.init_method is not None:
            init_sharded_(self.sink, self.init_method)
        elif self.sink is not None:
            fill_(self.sink, 0.0)

    def _qk_norm(self, width: int, eps: float, device: Any, dtype: torch.dtype | None) -> Norm:
        # Sequence-parallel in that its gradients are partial, where it is called: a rank norms its own heads.
        return Norm(width, "rms_norm", eps, tp_mesh=self.mesh, sequence_parallel=True, device=device, dtype=dtype)

    def _split_kv_heads(self, num_kv_heads: int) -> tuple[int, slice | None]:
        """Key heads of this rank, and its rows of the weight if that is whole on every rank."""
        if num_kv_heads % self.ranks == 0:
            return num_kv_heads // self.ranks, None
        if self.ranks % num_kv_heads:
            raise ValueError(
                "ParallelSelfAttention: num_kv_heads must be a multiple or a divisor of the size of the mesh, got "
                f"{num_kv_heads} for {self.ranks} ranks"
            )
        first = group_rank(self.group) * num_kv_heads // self.ranks * self.head_dim
        return 1, slice(first, first + self.head_dim)

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
        """``[s, b, hidden_size]`` to the same shape.

        Args:
            x: whole, or with ``sequence_parallel`` this rank's rows ``[s_r, b, hidden_size]``.
            angles: cosines and sines, ``[positions, R / 2]`` each, for rotary positions.
            mask: for a core attention that takes one, such as ``unfused``. core_options: its further keywords, such as
                ``cu_seqlens``.
            positions: row of each token in ``angles``, ``[s]`` or ``[s, b]``; ``None`` for 0 to ``s - 1``.
            residual, dropout, row_positions, sizes: see ``RowParallelLinear.forward``.

        Raises:
            TypeError, ValueError: x that is not ``[s, b, hidden_size]`` in the dtype of the weights, a mask or an
                option that the core attention does not take, angles, positions or a mask that do not fit.

        Sharding: x and the result replicated, or both S(0) with ``sequence_parallel``; angles, positions and mask
        replicated (a mask that differs by heads: this rank's).
        """
        given = self._options_of(core_options, mask)
        (q, k, v), _ = joined_linears(
            "ParallelSelfAttention", x, [self.q, self.k, self.v], form="[s, b, {}]", sizes=sizes
        )
        # Not -1 for the heads: a rank may have no tokens.
        heads = self.local_heads, self.local_kv_heads, self.local_kv_heads
        q, k, v = (t.view(*t.shape[:2], n, self.head_dim) for t, n in zip((q, k, v), heads, strict=True))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(self.q_norm, self.k_norm, q, k)
        if angles is not None:
            q, k = (rotary_embedding(t, *angles, positions=positions) for t in (q, k))
        if self.sink is not None:
            (given["sink"],) = to_local(self, self.sink)
        y = self._attend(q, k, v, None, given)
        out: Tensor = self.out(y, residual=residual, dropout=dropout, row_positions=row_positions, sizes=sizes)
        return out

    def _normed(self, q_norm: Norm, k_norm: Norm, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, ``[s, b, heads, head_dim]``, after their norms, which are called if they do more."""
        if is_plain(q_norm, Norm) and is_plain(k_norm, Norm):
            # Each rank norms its own heads only, so these gradients are partial.
            q_weight, k_weight = to_local(self, q_norm.weight, k_norm.weight, partial=(True, True))
            assert q_weight is not None and k_weight is not None
            norm = self._norm_all_heads if self.norm_all_heads else rms_norm
            return norm(q, q_weight, q_norm.eps), norm(k, k_weight, k_norm.eps)
        if self.norm_all_heads and self.group is not None:
            raise ValueError(
                "ParallelSelfAttention: over several ranks q_norm and k_norm of all heads cannot have hooks or be "
                "replaced, since no rank has what they would see"
            )
        if self.norm_all_heads:
            return q_norm(q.flatten(2)).view(q.shape), k_norm(k.flatten(2)).view(k.shape)
        return q_norm(q), k_norm(k)

    def _norm_all_heads(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMS norm of ``x``, this rank's heads ``[s, b, heads, head_dim]``, over the heads of all ranks."""
        flat = x.flatten(2)
        if self.group is None:
            return rms_norm(flat, weight, eps).view(x.shape)
        wide = flat.to(torch.promote_types(x.dtype, torch.float32))
        # Several ranks may have the same head of the keys: as many times as the weight has too few.
        copies = self.ranks * flat.shape[-1] // weight.numel()
        own = weight.view(self.ranks // copies, -1)[group_rank(self.group) // copies]
        squares = reduce_from_group(wide.square().sum(-1, keepdim=True), self.group)
        mean = copy_to_group(squares, self.group) / (copies * weight.numel())
        return (wide * torch.rsqrt(mean + eps) * own).to(x.dtype).view(x.shape)
