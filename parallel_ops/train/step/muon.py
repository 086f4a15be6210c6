"""Muon for the matrices of the layers, AdamW for everything else, as one optimizer.

    m <- beta m + (1 - beta) g,   u = (1 - beta) g + beta m          momentum, Nesterov's
    o = NS(u)                                                        about U V^T of u = U S V^T
    w <- (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) o        the size of an update of AdamW

Sources: Jordan et al., https://kellerjordan.github.io/posts/muon/; the last factor, with which the rate and decay of
AdamW are taken over, Liu et al., arXiv:2502.16982. The values are those of ``torch.optim.Muon`` with
``adjust_lr_fn="match_rms_adamw"``, bit by bit.

NS needs a whole matrix, and ranks hold shards: the momentum is sharded as the parameter is, the update is gathered in
bfloat16, in which NS computes, and each rank takes its part of the result. All ranks compute NS of all matrices.

Experts are stacked, ``[experts, rows, columns]``: each expert's gate, up and down is a matrix of its own. A rank
computes NS of the experts that it holds, and gathers only what shards their rows or columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from parallel_ops._internal.distributed.shards import local_box

_COEFFICIENTS, _STEPS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
# Elements of a stack at a time: NS has four tensors of that size, 128 MiB each.
_ELEMENTS = 1 << 26


class MuonAndAdamW(torch.optim.AdamW):
    """AdamW, fused, but for groups with ``momentum``, which Muon updates; those have matrices alone, or stacks of them.

    A group's ``joined`` is the number of matrices that lie one below the other in each of a stack; 1 if left out.

    Takes ``found_inf`` and ``grad_scale`` as torch's fused optimizers do.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        every = self.param_groups
        try:
            self.param_groups = [group for group in every if group.get("momentum") is None]
            result = super().step(closure)
        finally:
            self.param_groups = every
        for group in every:
            if group.get("momentum") is not None:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        return result

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, beta, lr = self.state[parameter], group["momentum"], group["lr"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
            state["step"] = torch.zeros((), device=parameter.device)  # AdamW's load_state_dict wants one of each
        assert parameter.grad is not None
        gradient, momentum, weight = (_local(t) for t in (parameter.grad, state["momentum_buffer"], parameter))
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        moved = momentum.lerp(gradient, 1 - beta)
        update = gradient.lerp(moved, beta).bfloat16()
        joined = group.get("joined", 1)
        rows, columns = parameter.shape[-2] // joined, parameter.shape[-1]
        new = weight * (1 - lr * group["weight_decay"])
        new.add_(_orthogonal(parameter, update, joined), alpha=-lr * 0.2 * max(rows, columns) ** 0.5)
        if self.found_inf is None:
            momentum.copy_(moved)
            weight.copy_(new)
            return
        bad = self.found_inf.to(weight.device) != 0
        momentum.copy_(torch.where(bad, momentum, moved))
        weight.copy_(torch.where(bad, weight, new))


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _orthogonal(parameter: Tensor, update: Tensor, joined: int) -> Tensor:
    """NS of the whole update, of which each rank has its part of ``parameter``; returns this rank's part."""
    if not isinstance(parameter, DTensor):
        return _each(update, joined)
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    stacked = parameter.dim() > 2
    # Experts stay where they are.
    whole = [p if stacked and getattr(p, "dim", None) == 0 else Replicate() for p in placements]
    if whole != list(placements):
        given = DTensor.from_local(
            update, mesh, placements, shape=shape, stride=torch.empty(shape, device="meta").stride(), run_check=False
        )
        update = given.redistribute(mesh, whole).to_local()
    found = _each(update, joined)
    starts, sizes = local_box(parameter)
    own = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return found[(slice(None), *own[1:]) if stacked else tuple(own)]


def _each(update: Tensor, joined: int) -> Tensor:
    """NS of a matrix, or of each of a stack, some at a time."""
    if update.dim() == 2:
        return newton_schulz(update)
    matrices = update.unflatten(1, (joined, -1)).flatten(0, 1)
    some = max(1, _ELEMENTS // matrices[0].numel()) if len(matrices) else 1
    return torch.cat([newton_schulz(part) for part in matrices.split(some)]).view(update.shape)


def newton_schulz(update: Tensor) -> Tensor:
    """Five steps of a quintic Newton-Schulz iteration, in bfloat16: singular values become about 1.

    Args:
        update: ``[rows, columns]``, or a stack of them.
    """
    a, b, c = _COEFFICIENTS
    add = torch.addmm if update.dim() == 2 else torch.baddbmm
    x = update.bfloat16()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
