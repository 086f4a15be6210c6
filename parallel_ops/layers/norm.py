"""Layer norm and RMS norm as modules."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from parallel_ops.layers.initialization import fill_
from parallel_ops.layers.parameters import ShardedModule, empty_parameter, to_local
from parallel_ops.ops import layer_norm, rms_norm


class Norm(ShardedModule):
    """Layer norm or RMS norm of the last dimension; ones and zeros at first. Its parameters are whole on every rank.

    Args:
        hidden_size: the last dimension.
        kind: ``"layer_norm"`` or ``"rms_norm"`` (which has no bias). eps: added to the variance or the mean square.
        tp_mesh: the ranks; ``None`` for one.
        sequence_parallel: each rank norms its own tokens, so the gradients are summed over the ranks, weight and bias
            in one message.

    Raises:
        ValueError: an unknown kind.

    Examples:
        >>> import torch
        >>> from parallel_ops.layers import Norm
        >>> Norm(64, "rms_norm")(torch.randn(16, 2, 64)).shape
        torch.Size([16, 2, 64])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        kind: str = "layer_norm",
        eps: float = 1e-5,
        *,
        tp_mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp_mesh)
        if kind not in ("layer_norm", "rms_norm"):
            raise ValueError(f"Norm: kind must be 'layer_norm' or 'rms_norm', got {kind!r}")
        self.eps, self.sequence_parallel = eps, sequence_parallel
        self.weight = empty_parameter((hidden_size,), Replicate(), self.mesh, device, dtype)
        self.bias = (
            empty_parameter((hidden_size,), Replicate(), self.mesh, device, dtype) if kind == "layer_norm" else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones, and zeros for the bias."""
        fill_(self.weight, 1.0)
        if self.bias is not None:
            fill_(self.bias, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of ``x``, ``[..., hidden_size]``.

        Raises:
            TypeError, ValueError: x of another width, dtype or device than the weight.

        Sharding: x and the result replicated, or sharded by tokens with ``sequence_parallel``.
        """
        weight, bias = to_local(self, self.weight, self.bias, partial=(self.sequence_parallel,) * 2)
        assert weight is not None
        if self.bias is None:
            return rms_norm(x, weight, self.eps)
        return layer_norm(x, weight, bias, self.eps)
