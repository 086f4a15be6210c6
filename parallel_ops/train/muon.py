"""Muon for the matrices of the layers, AdamW for everything else, as one optimizer.

    m <- beta m + (1 - beta) g,   u = (1 - beta) g + beta m          momentum, Nesterov's
    o = NS(u)                                                        about U V^T of u = U S V^T
    w <- (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) o        the size of an update of AdamW

Sources: Jordan et al., https://kellerjordan.github.io/posts/muon/; the last factor, with which the rate and decay of
AdamW are taken over, Liu et al., arXiv:2502.16982. The values are those of ``torch.optim.Muon`` with
``adjust_lr_fn="match_rms_adamw"``, bit by bit.

NS needs a whole matrix, and ranks hold shards: the momentum is sharded as the parameter is, the update is gathered in
bfloat16, in which NS computes, and each rank takes its part of the result. All ranks compute NS of all matrices.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel_ops._internal.compat import local_box

_COEFFICIENTS, _STEPS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7


class MuonAndAdamW(torch.optim.AdamW):
    """AdamW, fused, but for groups with ``momentum``, which Muon updates; those have matrices alone.

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
        rows, columns = parameter.shape
        new = weight * (1 - lr * group["weight_decay"])
        new.add_(_orthogonal(parameter, update), alpha=-lr * 0.2 * max(rows, columns) ** 0.5)
        if self.found_inf is None:
            momentum.copy_(moved)
            weight.copy_(new)
            return
        bad = self.found_inf.to(weight.device) != 0
        momentum.copy_(torch.where(bad, momentum, moved))
        weight.copy_(torch.where(bad, weight, new))


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _orthogonal(parameter: Tensor, update: Tensor) -> Tensor:
    """NS of the whole update, of which each rank has its part of ``parameter``; returns this rank's part."""
    if not isinstance(parameter, DTensor):
        return newton_schulz(update)
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    whole = DTensor.from_local(update, mesh, placements, shape=shape, stride=(shape[1], 1), run_check=False)
    starts, sizes = local_box(parameter)
    found = newton_schulz(whole.full_tensor())
    return found[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def newton_schulz(update: Tensor) -> Tensor:
    """Five steps of a quintic Newton-Schulz iteration, in bfloat16: singular values become about 1."""
    a, b, c = _COEFFICIENTS
    x = update.bfloat16()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
