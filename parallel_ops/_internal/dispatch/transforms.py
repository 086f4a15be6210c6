"""Torch's ways of differentiating that kernels have no rule for: batched gradients, forward mode.

``torch.autograd.grad(..., is_grads_batched=True)`` and ``jacobian(..., vectorize=True)`` pass tensors with a hidden
batch dimension to a backward. The kernels read memory, so each sample runs by itself. A tangent of ``forward_ad`` does
not reach the kernel of a library's op, and torch drops it without an error where no input requires a gradient: an op
runs its reference in plain PyTorch instead, or raises.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch: Any = torch._C._functorch
_LEVELS = 64  # the most that torch nests


def has_tangent(args: Sequence[Any]) -> bool:
    """Whether a tensor of ``args`` has a tangent, of ``forward_ad`` or of ``torch.func.jvp``."""
    tensors = _flat([a for a in args if isinstance(a, Tensor | list | tuple)])
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def no_forward_mode(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: forward-mode differentiation (torch.autograd.forward_ad, torch.func.jvp) does not go through this "
        "op; use the op's reference in plain PyTorch, or .backward()"
    )


def is_batched(grad: Any) -> bool:
    """Whether ``grad``, a tensor or a list of some, has a hidden batch dimension."""
    if isinstance(grad, list | tuple):
        return any(map(is_batched, grad))
    return grad is not None and (_functorch.is_legacy_batchedtensor(grad) or _functorch.is_batchedtensor(grad))


def sample_by_sample(name: str, backward: Callable[..., Any], ctx: Any, grads: Sequence[Any]) -> Any:
    """The results of ``backward(ctx, *grads)`` for each sample of the batched ones among ``grads``, stacked again."""
    batched = next(g for g in _flat(grads) if is_batched(g))
    of_func = _functorch.is_batchedtensor(batched)  # of torch.func.vmap
    add, remove = (
        (_functorch if of_func else torch)._add_batch_dim,
        (_functorch if of_func else torch)._remove_batch_dim,
    )
    level = _functorch.maybe_get_level(batched) if of_func else _level(name, batched)
    count = remove(batched, level, 0, 0).shape[0]

    def samples(grad: Any) -> Any:
        if isinstance(grad, list | tuple):
            return list(zip(*map(samples, grad), strict=True))
        return remove(grad, level, count, 0).unbind() if is_batched(grad) else (grad,) * count

    def stacked(results: list[Any]) -> Any:
        first = results[0]
        if isinstance(first, list | tuple):
            return type(first)(stacked(list(each)) for each in zip(*results, strict=True))
        return first if first is None else add(torch.stack(results), 0, level)

    return stacked([backward(ctx, *each) for each in zip(*map(samples, grads), strict=True)])


def _flat(nested: Any) -> list[Tensor]:
    if isinstance(nested, list | tuple):
        return [t for each in nested for t in _flat(each)]
    return [nested] if isinstance(nested, Tensor) else []


def _level(name: str, batched: Tensor) -> int:
    """The number of a batch dimension of ``is_grads_batched=True``: its depth among nested ones, which torch hides."""
    for level in range(1, _LEVELS):
        if not is_batched(torch._remove_batch_dim(batched, level, 0, 0)):
            return level
    raise RuntimeError(f"{name}: gradients may have one batch dimension of is_grads_batched=True, not several")
