"""The feed-forward block of a transformer, its hidden features sharded over a mesh.

y = W_down gelu(W_up x + b_up) + b_down
y = W_down (silu(W_gate x + b_gate) * (W_up x + b_up)) + b_down             SwiGLU, Shazeer, arXiv:2002.05202
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from parallel_ops.layers.initialization import InitFn
from parallel_ops.layers.linear import ColumnParallelLinear, RowParallelLinear, joined_linears
from parallel_ops.layers.linear_base import LinearArguments
from parallel_ops.layers.parameters import ShardedModule, propagates_errors
from parallel_ops.ops import bias_gelu, silu_mul

ACTIVATIONS = ("gelu", "gelu_exact", "swiglu")


class ParallelMLP(ShardedModule):
    """Two or three linears around a fused activation.

    Args:
        hidden_size: width of input and output.
        ffn_hidden_size: width after the activation; a multiple of the mesh's size. ``None`` for ``4 * hidden_size``.
        tp_mesh: the ranks that share the weights; ``None`` for one.
        activation: ``"gelu"`` (tanh approximation), ``"gelu_exact"`` or ``"swiglu"`` (with a third linear, ``gate``).
        bias: whether the linears have biases.
        init_method, output_init_method: fill tiles of ``up`` and ``gate``, and of ``down``, in place; ``None`` for what
            ``nn.Linear`` does.
        linear: ``sequence_parallel`` (shard input and output by tokens over the mesh), ``overlap``, ``grad_reduce``,
            ``device`` and ``dtype`` of ``ColumnParallelLinear`` and ``RowParallelLinear``.

    Raises:
        TypeError, ValueError: an unknown activation, sizes that do not fit the mesh.

    Examples:
        >>> import torch
        >>> from parallel_ops.layers import ParallelMLP
        >>> mlp = ParallelMLP(64, 256, tp_mesh=None, activation="swiglu")  # ParallelMesh(tp=4)["tp"] under torchrun
        >>> mlp(torch.randn(16, 2, 64)).shape
        torch.Size([16, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int | None = None,
        *,
        tp_mesh: DeviceMesh | None,
        activation: str = "gelu",
        bias: bool = True,
        init_method: InitFn | None = None,
        output_init_method: InitFn | None = None,
        **linear: Unpack[LinearArguments],
    ) -> None:
        super().__init__(tp_mesh)
        if activation not in ACTIVATIONS:
            raise ValueError(f"ParallelMLP: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation, width = activation, 4 * hidden_size if ffn_hidden_size is None else ffn_hidden_size
        common: dict[str, Any] = {"bias": bias, "tp_mesh": self.mesh, **linear}
        self.gate = None
        if activation == "swiglu":
            self.gate = ColumnParallelLinear(hidden_size, width, init_method=init_method, **common)
        self.up = ColumnParallelLinear(hidden_size, width, init_method=init_method, **common)
        self.down = RowParallelLinear(width, hidden_size, init_method=output_init_method, **common)

    @propagates_errors
    def forward(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        dropout: float = 0.0,
        row_positions: Tensor | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """``[s, ..., hidden_size]`` to the same shape; see ``RowParallelLinear.forward`` for the other arguments.

        Raises:
            TypeError, ValueError: x of another shape, dtype or device than the weights need.

        Sharding: x and the result replicated, or both S(0) with ``sequence_parallel``.
        """
        if self.gate is not None:
            (gate, up), _ = joined_linears("ParallelMLP", x, [self.gate, self.up], sizes=sizes)
            y = silu_mul(gate, up)
        else:
            (up,), (bias,) = joined_linears("ParallelMLP", x, [self.up], add_bias=False, sizes=sizes)
            y = bias_gelu(up, bias, approximate="none" if self.activation == "gelu_exact" else "tanh")
        out: Tensor = self.down(y, residual=residual, dropout=dropout, row_positions=row_positions, sizes=sizes)
        return out
