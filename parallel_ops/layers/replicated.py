"""Linears that are whole on every rank: narrow projections, and the router that chooses among experts."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from parallel_ops.layers.initialization import InitFn, init_sharded_, uniform
from parallel_ops.layers.lora import LoraAdapter, whole_adapter
from parallel_ops.layers.parameters import ShardedModule, empty_parameter, to_local
from parallel_ops.ops import Routing, route


class Replicated(ShardedModule):
    """The parameters of a linear that is whole on every rank.

    Args:
        in_features, out_features: of the weight.
        tp_mesh: the ranks; ``None`` for one.
        bias: whether there is one.
        sequence_parallel: each rank has its own tokens, so the parameters' gradients are summed over the ranks.
        init_method: fills tiles of the weight in place; ``None`` for what ``nn.Linear`` does.
        device, dtype: of the parameters; ``None`` for torch's defaults.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_mesh: DeviceMesh | None = None,
        bias: bool = False,
        sequence_parallel: bool = False,
        init_method: InitFn | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp_mesh)
        self.sequence_parallel, self.init_method = sequence_parallel, init_method
        self.weight = empty_parameter((out_features, in_features), Replicate(), self.mesh, device, dtype)
        self.bias = empty_parameter((out_features,), Replicate(), self.mesh, device, dtype) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises weight and bias, independently of the mesh."""
        init_sharded_(self.weight, self.init_method or uniform(self.weight.shape[1]))
        if self.bias is not None:
            init_sharded_(self.bias, uniform(self.weight.shape[1]))

    def _local(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = to_local(self, self.weight, self.bias, partial=(self.sequence_parallel,) * 2)
        assert weight is not None
        return weight, bias


class ReplicatedLinear(Replicated):
    """``nn.Linear``, by default without a bias; its arguments are those of ``Replicated``.

    Attributes:
        lora: a low-rank adapter, or ``None``; see ``add_lora``.
    """

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.lora: LoraAdapter | None = None

    def add_lora(self, *, rank: int, alpha: float, dropout: float = 0.0) -> None:
        """Adds a low-rank adapter, as ``ParallelLinear.add_lora`` does."""
        out_features, in_features = self.weight.shape
        self.lora = LoraAdapter(
            in_features, out_features, (Replicate(), Replicate()), rank=rank, alpha=alpha, dropout=dropout,
            tp_mesh=self.mesh, device=self.weight.device, dtype=self.weight.dtype,
        )  # fmt: skip

    def forward(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``; ``sizes``: rows of every rank, where they differ."""
        y = F.linear(x, *self._local())
        if self.lora is None:
            return y
        parallel = self.sequence_parallel and self.ranks > 1
        return y + whole_adapter(x, self.lora, sequence_parallel=parallel, sizes=sizes).to(y.dtype)


class Router(Replicated):
    """A linear whose outputs choose the experts of each token, in fp32 (fp64 for fp64).

    Args:
        hidden_size: width of a token. num_experts: number of outputs. top_k: experts of each token.
        score, top_k_first, normalize, scale, groups, top_groups: see ``parallel_ops.route``.
        selection_bias: has a buffer ``selection_bias`` ``[num_experts]`` fp32, zeros at first, that the choice adds to
            the scores.
        linear: further options of ``Replicated``; with ``bias`` the logits have one, which is trained.

    Attributes:
        weight: ``[num_experts, hidden_size]``, whole on every rank. bias: ``[num_experts]``, too, or ``None``.
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        top_k_first: bool = False,
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        selection_bias: bool = False,
        **linear: Any,
    ) -> None:
        super().__init__(hidden_size, num_experts, **linear)
        self.num_experts, self.top_k = num_experts, top_k
        self._options: dict[str, Any] = {
            "score": score, "top_k_first": top_k_first, "normalize": normalize, "scale": scale, "groups": groups,
            "top_groups": top_groups,
        }  # fmt: skip
        zeros = torch.zeros(num_experts, device=self.weight.device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", zeros)

    def reset_parameters(self) -> None:
        """Initialises weight and bias, independently of the mesh, and sets the selection bias to 0."""
        super().reset_parameters()
        if (bias := self._buffers.get("selection_bias")) is not None:  # which is made after the parameters
            bias.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """Moves and casts, but no selection bias to 16 bits: they would lose the steps that change it."""
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if bias is not None and self.selection_bias is not None and self.selection_bias.itemsize < 4:
            self.selection_bias = bias.to(self.selection_bias.device)
        return self

    def forward(self, x: Tensor) -> Routing:
        """The routing of ``x``, ``[t, hidden_size]``.

        Sharding: x replicated, or sharded by tokens with ``sequence_parallel``.
        """
        weight, bias = self._local()
        wide = torch.promote_types(x.dtype, torch.float32)
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):  # raises for meta
            logits = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        return route(logits, self.top_k, bias=self.selection_bias, **self._options)
