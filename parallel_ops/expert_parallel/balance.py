"""How experts are kept evenly used: auxiliary losses, and the bias of the choice that needs none.

    aux = c n sum_e (load_e / T) (score_sums_e / T)                         Fedus et al., arXiv:2101.03961
    z   = c_z z_sum / T                                                     Zoph et al., arXiv:2202.08906
    bias_e += rate sign(mean load - load_e), once a step                    Wang et al., arXiv:2408.15664

T is the number of tokens of the micro-batch on all ranks that share it. The losses are of one layer, or with
``over_model`` aux is of the means of load and scores over all layers, as Hugging Face's models have it.

The losses are not added to anything: each layer attaches theirs to its output, and the backward gives the router the
gradient. So they work in any stage of a pipeline, with recomputation, and do not change the loss that is reported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.distributed.compat import in_backward
from parallel_ops.ops import Routing


@dataclass(frozen=True)
class StageExpertLoad:
    """The loads of the layers in other stages of a pipeline, for one stage and one micro-batch.

    Attributes:
        layers: Those that have experts, in all stages.
        add: Takes the load of a layer, int ``[experts]``, in the forward.
        mean: Returns the mean load over all layers with experts, fp32, in the backward.
    """

    layers: int
    add: Callable[[Tensor], None]
    mean: Callable[[], Tensor]


class AuxiliaryLosses:
    """The auxiliary losses of the layers in one forward.

    Args:
        aux, z: their coefficients.
        over_model: see above.
        scale: the factor of their gradients; ``None`` for that of the loss, which ``follow`` takes.
        ranks: context-parallel ranks, whose gradients are averaged.
        elsewhere: with ``over_model``, takes the loads of these layers, and has the mean over all in the backward;
            ``None`` where these are all layers.
    """

    def __init__(
        self, aux: float, z: float = 0.0, *, over_model: bool = False, scale: Tensor | float | None = None,
        ranks: int = 1, elsewhere: StageExpertLoad | None = None,
    ) -> None:  # fmt: skip
        self.elsewhere = elsewhere
        self.aux, self.z, self.over_model, self.scale, self.ranks = aux, z, over_model, scale, ranks
        self.loads: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._z_sums: list[Tensor] = []

    def attach(self, y: Tensor, routing: Routing, load: Tensor) -> Tensor:
        """``y``, whose backward also computes the gradients of this layer's losses.

        Args:
            load: int ``[n]``, over all ranks that share the micro-batch; ``routing`` is of this rank's tokens.
        """
        if not (self.aux or self.z) or not torch.is_grad_enabled():
            return y
        if not in_backward():  # otherwise this is a recomputation
            self.loads.append(load)
            if self.elsewhere is not None:
                self.elsewhere.add(load)
            self._scores.append(routing.score_sums.detach())
            self._z_sums.append(routing.z_sum.detach())
        attached: Tensor = _Attach.apply(y, routing.score_sums, routing.z_sum, self, load, routing.experts.shape[1])
        return attached

    def follow(self, loss: Tensor) -> Tensor:
        """``loss``, whose gradient becomes the scale of the auxiliary losses."""
        followed: Tensor = _Follow.apply(loss, self)
        return followed

    def value(self, top_k: int) -> Tensor:
        """This rank's part of the losses of all layers: their sum over the ranks that share the micro-batch."""
        if not self.loads:
            return torch.zeros(())
        loads, scores = torch.stack(self.loads).to(self._scores[0].dtype), torch.stack(self._scores)
        tokens, experts = loads[0].sum() / top_k, loads.shape[1]
        of_layers = (loads.mean(0) * scores.mean(0)) if self.over_model else loads * scores
        aux = experts * of_layers.sum()
        return self.aux * aux / tokens.clamp(min=1) ** 2 + self.z * sum(self._z_sums) / tokens.clamp(min=1)

    def gradients(self, load: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Of a layer's ``score_sums`` and ``z_sum``, in a backward."""
        if self.scale is None:
            raise RuntimeError("auxiliary losses need a scale, or the loss that they belong to (follow)")
        wanted = load.to(torch.float32)
        tokens, scale = wanted.sum() / top_k, self.scale * self.ranks
        tokens = tokens.clamp(min=1)
        if self.elsewhere is not None:
            wanted = self.elsewhere.mean() / self.elsewhere.layers
        elif self.over_model:
            wanted = torch.stack(self.loads).to(torch.float32).mean(0) / len(self.loads)
        return scale * self.aux * load.shape[0] / tokens**2 * wanted, scale * self.z / tokens


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, score_sums: Tensor, z_sum: Tensor, losses: AuxiliaryLosses, load: Tensor, top_k: int
    ) -> Tensor:
        ctx.losses, ctx.top_k, ctx.dtypes = losses, top_k, (score_sums.dtype, z_sum.dtype)
        ctx.save_for_backward(load)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (load,) = ctx.saved_tensors
        scores, z = ctx.losses.gradients(load, ctx.top_k)
        return grad, scores.to(ctx.dtypes[0]), z.to(ctx.dtypes[1]), None, None, None


class _Follow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, losses: AuxiliaryLosses) -> Tensor:
        ctx.losses = losses
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.losses.scale = grad.detach()
        return grad, None


@torch.no_grad()
def update_selection_bias(bias: Tensor, load: Tensor, rate: float | Tensor) -> None:
    """One step of the balancing without auxiliary losses, in place.

    Args:
        bias: fp32 ``[n]``. load: ``[n]``, tokens of each expert in a step, over all ranks.
    """
    wide = load.to(bias.dtype)
    bias += rate * torch.sign(wide.mean() - wide)
