"""One transformer layer, norm first, over a group of tensor-parallel ranks.

    x = dropout(attention(norm_1(x)) + b_o) + x
    x = dropout(W_2 act(W_1 norm_2(x) + b_1) + b_2) + x

With ``sequence_parallel`` norms, dropout and the residual stream are sharded by tokens too. Their parameters are whole
on every rank but see some tokens only, so their gradients are summed over the ranks, all of a layer in one message, as
part of the backward: there is nothing to remember before the optimiser's step.

Dropout draws by global element index (see ``bias_dropout_add``): ranks whose default generators are in the same state
drop the same elements as a single process would, whatever the group's size.
"""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_ops.comm import copy_to_group
from parallel_ops.comm._arguments import check_sizes
from parallel_ops.comm._group import group_rank, group_size
from parallel_ops.layers._checks import before, check_input, first_collective
from parallel_ops.layers._sharding import Init
from parallel_ops.layers.attention import Angles, ParallelSelfAttention
from parallel_ops.layers.linear import LinearOptions
from parallel_ops.layers.mlp import ParallelMLP
from parallel_ops.ops import bias_dropout_add, layer_norm, rms_norm
from parallel_ops.tensor_parallel._overlap_plan import Overlap


class Norm(nn.Module):
    """Layer norm or RMS norm of the last dimension; ones and zeros at first. Its parameters are whole on every rank."""

    def __init__(
        self,
        hidden: int,
        kind: str = "layer_norm",
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in ("layer_norm", "rms_norm"):
            raise ValueError(f"Norm: kind must be 'layer_norm' or 'rms_norm', got {kind!r}")
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden, device=device, dtype=dtype)) if kind == "layer_norm" else None

    def forward(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """The norm of ``x``, by its parameters or by what stands for them."""
        weight = self.weight if weight is None else weight
        if self.bias is None:
            return rms_norm(x, weight, self.eps)
        return layer_norm(x, weight, self.bias if bias is None else bias, self.eps)


def whole_gradients(parameters: Sequence[Tensor | None], group: ProcessGroup | None) -> list[Tensor | None]:
    """The parameters, with gradients that are summed over the ranks, all of a dtype in one message.

    For parameters that are whole on every rank but see only this rank's tokens. Those that want no gradient, which must
    be the same on every rank, come back as they are.
    """
    out = list(parameters)
    if group_size(group) == 1 or not torch.is_grad_enabled():
        return out
    learned = {i: p for i, p in enumerate(parameters) if p is not None and p.requires_grad}
    for dtype in {p.dtype: None for p in learned.values()}:
        some = {i: p for i, p in learned.items() if p.dtype is dtype}
        flat = copy_to_group(torch.cat([p.reshape(-1) for p in some.values()]), group)
        for (i, p), part in zip(some.items(), flat.split([p.numel() for p in some.values()]), strict=True):
            out[i] = part.view(p.shape)
    return out


class _Inits(TypedDict):
    init_method: Init | None
    output_init_method: Init | None


class ParallelTransformerLayer(nn.Module):
    """Attention and MLP around a residual stream.

    Args:
        hidden, heads, kv_heads, ffn_hidden, activation: as of ``ParallelSelfAttention`` and ``ParallelMLP``.
        norm: ``"layer_norm"`` or ``"rms_norm"``. norm_eps: added to the variance or the mean square.
        dropout: probability, on both projections into the residual stream.
        group: the ranks that share the weights; ``None`` for one.
        sequence_parallel: the residual stream is sharded by tokens over the group.
        overlap: see ``all_gather_linear``.
        init_method, output_init_method: fill the whole weights of ``qkv`` and ``up``, and of the two ``out``, in place.

    Raises:
        ValueError: an unknown norm or activation, dropout outside 0 to 1, sizes that do not fit the group.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        group: ProcessGroup | None,
        kv_heads: int | None = None,
        ffn_hidden: int | None = None,
        activation: str = "gelu",
        norm: str = "layer_norm",
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
        bias: bool = True,
        sequence_parallel: bool = False,
        overlap: Overlap = "auto",
        init_method: Init | None = None,
        output_init_method: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"ParallelTransformerLayer: dropout must be from 0 to 1, got {dropout}")
        self.group, self.sequence_parallel, self.dropout = group, sequence_parallel, dropout
        common = LinearOptions(
            group=group, bias=bias, sequence_parallel=sequence_parallel, overlap=overlap, device=device, dtype=dtype
        )
        inits: _Inits = {"init_method": init_method, "output_init_method": output_init_method}
        self.norm_attention = Norm(hidden, norm, norm_eps, device=device, dtype=dtype)
        self.attention = ParallelSelfAttention(hidden, heads, kv_heads=kv_heads, **inits, **common)
        self.norm_mlp = Norm(hidden, norm, norm_eps, device=device, dtype=dtype)
        self.mlp = ParallelMLP(hidden, ffn_hidden, activation=activation, **inits, **common)

    def forward(
        self,
        x: Tensor,
        angles: Angles | None = None,
        *,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """``[s, b, hidden]`` to the same shape.

        Args:
            x: whole, or with ``sequence_parallel`` this rank's rows ``[s_r, b, hidden]``.
            angles: cosines and sines of all positions, ``[s, R / 2]`` each, for rotary positions.
            sizes: ``s_r`` of every rank, where they differ.

        Raises:
            TypeError, ValueError: x that is not ``[s, b, hidden]`` in the dtype of the norm, angles that do not fit: on
            every rank.

        Sharding: x and the result replicated, or both S(0) with ``sequence_parallel``. Gradients of all parameters are
        complete.
        """
        collective = first_collective(self.sequence_parallel)
        with before(collective, self.group, x):
            check_input("ParallelTransformerLayer", x, self.norm_attention.weight, "[s, b, {}]")
            weight_1, bias_1, weight_2, bias_2, bias_attention, bias_mlp = self._replicated()
            offset = self._first_row(x, sizes) * x.shape[1:].numel()
            h = self.norm_attention(x, weight_1, bias_1)
        y = self.attention(h, angles, add_bias=False, sizes=sizes)
        with before(collective, self.group, x):
            x = self._add(y, bias_attention, x, offset)
            h = self.norm_mlp(x, weight_2, bias_2)
        y = self.mlp(h, add_bias=False, sizes=sizes)
        return self._add(y, bias_mlp, x, offset)

    def _first_row(self, x: Tensor, sizes: Sequence[int] | None) -> int:
        """Where this rank's rows start in the whole sequence."""
        if not self.sequence_parallel:
            return 0
        rows = check_sizes("ParallelTransformerLayer", "sizes", sizes, self.group, 0, shard=x)
        return sum(rows[: group_rank(self.group)])

    def _replicated(self) -> list[Tensor | None]:
        """The parameters that are whole on every rank: of the norms, then the biases of the two projections."""
        norms = (self.norm_attention.weight, self.norm_attention.bias, self.norm_mlp.weight, self.norm_mlp.bias)
        parameters: list[Tensor | None] = [*norms, self.attention.out.bias, self.mlp.out.bias]
        return whole_gradients(parameters, self.group) if self.sequence_parallel else parameters

    def _add(self, y: Tensor, bias: Tensor | None, x: Tensor, offset: int) -> Tensor:
        return bias_dropout_add(y, bias, x, self.dropout, training=self.training, index_offset=offset)
