"""The feed-forward block of a transformer, its hidden features split over a group.

y = W_2 act(W_1 x + b_1) + b_2          act: GeLU, or SwiGLU over the two halves of W_1 x + b_1
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_ops.layers._checks import before, check_input, first_collective
from parallel_ops.layers._sharding import Init
from parallel_ops.layers.linear import ColumnParallelLinear, LinearOptions, RowParallelLinear
from parallel_ops.ops import bias_gelu, bias_swiglu
from parallel_ops.tensor_parallel._overlap_plan import Overlap

_ACTIVATIONS = {"gelu": bias_gelu, "swiglu": bias_swiglu}


class ParallelMLP(nn.Module):
    """Two linears around a fused bias and activation.

    Args:
        hidden: width of input and output.
        ffn_hidden: width after the activation; divides evenly by the group's size. ``None`` for ``4 * hidden``.
        activation: ``"gelu"`` (tanh approximation) or ``"swiglu"`` (the first linear is twice as wide, gate
            half first).
        group: the ranks that share the weights; ``None`` for one.
        sequence_parallel, overlap, bias: as of ``ColumnParallelLinear`` and ``RowParallelLinear``.
        init_method, output_init_method: fill the whole weights of ``up`` and ``out`` in place.

    Raises:
        ValueError: an unknown activation, sizes that do not fit the group.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int | None = None,
        *,
        group: ProcessGroup | None,
        activation: str = "gelu",
        bias: bool = True,
        sequence_parallel: bool = False,
        overlap: Overlap = "auto",
        init_method: Init | None = None,
        output_init_method: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"ParallelMLP: activation must be 'gelu' or 'swiglu', got {activation!r}")
        width, parts = 4 * hidden if ffn_hidden is None else ffn_hidden, 2 if activation == "swiglu" else 1
        self.activation = activation
        common = LinearOptions(
            group=group, bias=bias, sequence_parallel=sequence_parallel, overlap=overlap, device=device, dtype=dtype
        )
        self.up = ColumnParallelLinear(hidden, parts * width, parts=parts, init_method=init_method, **common)
        self.out = RowParallelLinear(width, hidden, init_method=output_init_method, **common)

    def forward(self, x: Tensor, *, add_bias: bool = True, sizes: Sequence[int] | None = None) -> Tensor:
        """``[s, ..., hidden]`` to the same shape; arguments as of ``RowParallelLinear.forward``.

        Raises:
            TypeError, ValueError: x of another shape, dtype or device than the weights need: on every rank.

        Sharding: x and the result replicated, or both S(0) with ``sequence_parallel``.
        """
        with before(first_collective(self.up.sequence_parallel), self.up.group, x):
            check_input("ParallelMLP", x, self.up.weight)
        y = _ACTIVATIONS[self.activation](self.up(x, add_bias=False, sizes=sizes), self.up.bias)
        out: Tensor = self.out(y, add_bias=add_bias, sizes=sizes)
        return out

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
