"""Muon for the matrices of the layers, AdamW for everything else, as one optimizer.

    m <- beta m + (1 - beta) g,   u = (1 - beta) g + beta m          momentum, Nesterov's
    o = NS(u)                                                        about U V^T of u = U S V^T
    w <- (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) o        the size of an update of AdamW

Sources: Jordan et al., https://kellerjordan.github.io/posts/muon/; the last factor, with which the rate and decay of
AdamW are taken over, Liu et al., arXiv:2502.16982. The values are those of ``torch.optim.Muon`` with
``adjust_lr_fn="match_rms_adamw"``, bit by bit.

NS needs a whole matrix, and ranks hold shards: the momentum is sharded as the parameter is. Each matrix has an owner
among the ranks that share it, which computes NS; updates travel in bfloat16, in which NS computes (``muon_owners``).

Experts are stacked, ``[experts, rows, columns]``: each expert's gate, up and down is a matrix of its own. Experts stay
on the ranks that hold them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel_ops.train.step.muon_owners import Matrix, Round, exchange, interleaved, rounds_of

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
    _rounds: tuple[list[Tensor], list[Round]] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        every = self.param_groups
        try:
            self.param_groups = [group for group in every if group.get("momentum") is None]
            result = super().step(closure)
        finally:
            self.param_groups = every
        of = {p: group for group in every if group.get("momentum") is not None for p in group["params"]}
        of = {parameter: group for parameter, group in of.items() if parameter.grad is not None}
        for parameter in of:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
                state["step"] = torch.zeros((), device=parameter.device)  # AdamW's load_state_dict wants one of each

        def orthogonal(matrices: list[Matrix], updates: list[Tensor]) -> list[Tensor]:
            return _orthogonal(updates, [(m.index is None, of[m.parameter].get("joined", 1)) for m in matrices])

        interleaved(
            exchange(
                part, lambda m: self._momentum(m, of[m.parameter]), orthogonal,
                lambda m, found: self._update(m, found, of[m.parameter]),
            )
            for part in self._rounds_of(of)
        )  # fmt: skip
        return result

    def _rounds_of(self, of: dict[Tensor, dict[str, Any]]) -> list[Round]:
        """Owners of the matrices; decided anew where other parameters have gradients."""
        if self._rounds is None or [id(p) for p in self._rounds[0]] != [id(p) for p in of]:
            self._rounds = list(of), rounds_of(list(of), lambda p: _cost(p, of[p].get("joined", 1)))
        return self._rounds[1]

    def _momentum(self, matrix: Matrix, group: dict[str, Any]) -> Tensor:
        """Moves this rank's part of the momentum; returns that of the update, in bfloat16."""
        assert matrix.parameter.grad is not None
        beta, momentum = group["momentum"], _part(matrix, self.state[matrix.parameter]["momentum_buffer"])
        gradient = _part(matrix, matrix.parameter.grad)
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        moved = momentum.lerp(gradient, 1 - beta)
        self._set(momentum, moved)
        return gradient.lerp(moved, beta).bfloat16()

    def _update(self, matrix: Matrix, orthogonal: Tensor, group: dict[str, Any]) -> None:
        weight, lr = _part(matrix, matrix.parameter), group["lr"]
        rows, columns = matrix.shape[0] // group.get("joined", 1), matrix.shape[1]
        new, rate = weight * (1 - lr * group["weight_decay"]), lr * 0.2 * max(rows, columns) ** 0.5
        if isinstance(rate, Tensor):  # on the device, as a CUDA graph needs it
            new = new.addcmul_(orthogonal.to(new.dtype), rate, value=-1)
        else:
            new = new.add_(orthogonal, alpha=-rate)
        self._set(weight, new)

    def _set(self, t: Tensor, new: Tensor) -> None:
        """Replaces values, but where gradients are not finite."""
        if self.found_inf is None:
            t.copy_(new)
        else:
            torch.where(self.found_inf.to(t.device) != 0, t, new, out=t)


def _part(matrix: Matrix, t: Tensor) -> Tensor:
    """This rank's part of a matrix, in its parameter or a tensor that is sharded alike."""
    own = t.to_local() if isinstance(t, DTensor) else t
    return own if matrix.index is None else own[matrix.index]


def _cost(parameter: Tensor, joined: int) -> float:
    """Operations of NS for a matrix of a parameter, without a factor."""
    rows, columns = parameter.shape[-2] // joined, parameter.shape[-1]
    return float(joined * min(rows, columns) ** 2 * (2 * max(rows, columns) + min(rows, columns)))


def _orthogonal(updates: list[Tensor], kinds: list[tuple[bool, int]]) -> list[Tensor]:
    """NS of whole matrices. ``kinds``: if it is no part of a stack, and how many matrices lie one below the other."""
    found = [newton_schulz(update) if kind == (True, 1) else None for update, kind in zip(updates, kinds, strict=True)]
    stacks: dict[Any, list[int]] = {}
    for at, (update, (_, joined)) in enumerate(zip(updates, kinds, strict=True)):
        if found[at] is None:
            stacks.setdefault((update.shape, joined), []).append(at)
    for (_, joined), places in stacks.items():
        for at, result in zip(places, _each(torch.stack([updates[at] for at in places]), joined), strict=True):
            found[at] = result
    return [result for result in found if result is not None]


def _each(stack: Tensor, joined: int) -> Tensor:
    """NS of each matrix of a stack, some at a time."""
    matrices = stack.unflatten(1, (joined, -1)).flatten(0, 1)
    some = max(1, _ELEMENTS // max(1, matrices[0].numel()))
    return torch.cat([newton_schulz(part) for part in matrices.split(some)]).view(stack.shape)


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
