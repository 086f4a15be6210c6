"""One transformer layer, norm first, over a mesh of tensor-parallel ranks.

    x = dropout(attention(norm_attention(x))) + x
    x = dropout(mlp(norm_mlp(x))) + x

With ``sequence_parallel`` norms, dropout and the residual stream are sharded by tokens too. The norms' parameters are
whole on every rank but see some tokens only, so each norm sums its gradients over the ranks as part of the backward:
there is nothing to remember before the optimizer's step. One message for both norms would tie them in the graph, and a
backward split into input and weight gradients would walk all that lies between them twice.

Dropout draws by global element index (see ``bias_dropout_add``): ranks whose default generators are in the same state
drop the same elements as a single process would, whatever the mesh.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from parallel_ops.expert_parallel import AuxiliaryLosses
from parallel_ops.layers.attention import Angles, ParallelSelfAttention
from parallel_ops.layers.core_attention import CoreAttention
from parallel_ops.layers.initialization import InitFn
from parallel_ops.layers.latent_attention import ParallelLatentAttention
from parallel_ops.layers.linear_base import LinearArguments
from parallel_ops.layers.mlp import ParallelMLP
from parallel_ops.layers.moe import ParallelMoE
from parallel_ops.layers.norm import Norm
from parallel_ops.layers.parameters import ShardedModule, check_input, propagates_errors


class ParallelTransformerLayer(ShardedModule):
    """Attention and MLP around a residual stream.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, qk_norm, qk_norm_over, sink, window_size: see
            ``ParallelSelfAttention``.
        core_attention, attention_dropout: see ``ParallelSelfAttention``.
        attention: in the place of ``ParallelSelfAttention``, such as ``ParallelLatentAttention`` over the same mesh.
        ffn_hidden_size, activation: see ``ParallelMLP``. mlp: in its place, such as a ``ParallelMoE`` over the same
            mesh.
        tp_mesh: the ranks that share the weights; ``None`` for one.
        norm: ``"layer_norm"`` or ``"rms_norm"``. norm_eps: added to the variance or the mean square.
        dropout: probability, on both projections into the residual stream.
        bias: whether the linears have biases. attention_bias: the same for those of attention, ``None`` for ``bias``.
        qkv_bias: the same for queries, keys and values; ``None`` for ``attention_bias``.
        init_method: fills tiles of the weights in place; ``None`` for what ``nn.Linear`` does.
        output_init_method: the same for the two projections into the residual stream.
        linear: ``sequence_parallel`` (shard the residual stream by tokens over the mesh), ``overlap``,
            ``grad_reduce``, ``device`` and ``dtype`` of ``ColumnParallelLinear`` and ``RowParallelLinear``.

    Raises:
        TypeError, ValueError: an unknown norm or activation, dropout outside 0 to 1, sizes that do not fit the mesh.

    Examples:
        >>> import torch
        >>> from parallel_ops.layers import ParallelTransformerLayer
        >>> layer = ParallelTransformerLayer(64, 8, tp_mesh=None, activation="swiglu", norm="rms_norm", bias=False)
        >>> layer(torch.randn(32, 2, 64)).shape
        torch.Size([32, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        tp_mesh: DeviceMesh | None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn_hidden_size: int | None = None,
        activation: str = "gelu",
        attention: ParallelSelfAttention | ParallelLatentAttention | None = None,
        mlp: ParallelMLP | ParallelMoE | None = None,
        norm: str = "layer_norm",
        norm_eps: float = 1e-5,
        qk_norm: bool = False,
        qk_norm_over: str = "head",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        bias: bool = True,
        attention_bias: bool | None = None,
        qkv_bias: bool | None = None,
        sink: bool = False,
        window_size: tuple[int, int] | None = None,
        core_attention: CoreAttention | None = None,
        init_method: InitFn | None = None,
        output_init_method: InitFn | None = None,
        **linear: Unpack[LinearArguments],
    ) -> None:
        super().__init__(tp_mesh)
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"ParallelTransformerLayer: dropout must be from 0 to 1, got {dropout}")
        self.dropout = dropout
        linear["sequence_parallel"] = linear.get("sequence_parallel", False) and self.ranks > 1
        where: dict[str, Any] = {name: linear.get(name) for name in ("sequence_parallel", "device", "dtype")}
        init: dict[str, Any] = {"init_method": init_method, "output_init_method": output_init_method}
        self.norm_attention = Norm(hidden_size, norm, norm_eps, tp_mesh=self.mesh, **where)
        self.attention = attention or ParallelSelfAttention(
            hidden_size,
            num_heads,
            tp_mesh=self.mesh,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            qk_norm_over=qk_norm_over,
            norm_eps=norm_eps,
            sink=sink,
            window_size=window_size,
            core_attention=core_attention,
            attention_dropout=attention_dropout,
            bias=bias if attention_bias is None else attention_bias,
            qkv_bias=qkv_bias,
            **init,
            **linear,
        )
        self.norm_mlp = Norm(hidden_size, norm, norm_eps, tp_mesh=self.mesh, **where)
        self.mlp = mlp or ParallelMLP(
            hidden_size, ffn_hidden_size, tp_mesh=self.mesh, activation=activation, bias=bias, **init, **linear
        )

    @propagates_errors
    def forward(
        self,
        x: Tensor,
        angles: Angles | None = None,
        mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        row_positions: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        core_options: Mapping[str, Any] | None = None,
        losses: AuxiliaryLosses | None = None,
    ) -> Tensor:
        """``[s, b, hidden_size]`` to the same shape.

        Args:
            x: whole, or with ``sequence_parallel`` this rank's rows ``[s_r, b, hidden_size]``.
            angles, mask, positions, row_positions, core_options: see ``ParallelSelfAttention.forward``.
            sizes: ``s_r`` of every rank, where they differ.
            losses: see ``ParallelMoE.forward``; without experts it has no effect.

        Raises:
            TypeError, ValueError: x that is not ``[s, b, hidden_size]`` in the dtype of the norm, angles that do not
                fit: on every rank.

        Sharding: x and the result replicated, or both S(0) with ``sequence_parallel``. Gradients of all parameters are
        complete.
        """
        check_input("ParallelTransformerLayer", x, self.norm_attention.weight, "[s, b, {}]")
        rows: dict[str, Any] = {"row_positions": row_positions, "sizes": sizes}
        x = self.forward_attention(x, angles, mask, positions=positions, core_options=core_options, **rows)
        if isinstance(self.mlp, ParallelMoE):
            rows["losses"] = losses
        return self.forward_mlp(x, **rows)

    def forward_attention(self, x: Tensor, angles: Angles | None, mask: Tensor | None, **options: Any) -> Tensor:
        """The first line of the formula; ``options`` are those of ``ParallelSelfAttention.forward``."""
        h = self.norm_attention(x)
        out: Tensor = self.attention(h, angles, mask, residual=x, dropout=self.dropout, **options)
        return out

    def forward_mlp(self, x: Tensor, **options: Any) -> Tensor:
        """The second line of the formula; ``options`` are those of ``ParallelMLP`` or ``ParallelMoE``."""
        out: Tensor = self.mlp(self.norm_mlp(x), residual=x, dropout=self.dropout, **options)
        return out
