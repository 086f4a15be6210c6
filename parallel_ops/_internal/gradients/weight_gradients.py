"""Where the weight gradients of a linear go, and when they are computed.

    dW   = dy^T x                 returned to autograd, in the dtype of W
    M   += dy^T x                 with ``main_grad=M``: accumulated without rounding the matmul, none for autograd
    later                         with ``deferred=queue``: as above, but when the queue is computed

The last is for zero-bubble pipeline schedules (Qi et al., arXiv:2401.10241): the backward that other stages wait for
computes input gradients only, and the schedule computes weight gradients where it would otherwise idle.
"""

import abc
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from parallel_ops._internal.distributed.compat import new_dtensor
from parallel_ops._internal.gradients.grouped_matmul import add_outer_products, outer_products

# CPUs have no matmul of 16-bit matrices with a 32-bit result, so the factors are made wider there, so many bytes of
# each at a time: large enough for a matmul to run at full speed, small next to weights and activations.
_WIDE_BYTES = 16 << 20
_COLS = 8192


class DeferredWeightGradients:
    """A queue of weight gradients that a backward left undone.

    Each entry holds what this rank had in its backward, its shards of the input and of the output's gradient; what
    other ranks hold is gathered when the entry is computed, unless ``keep_gathered`` is set. So all ranks of a group
    must compute as many, in the same order. Memory is freed as the queue is computed.

    Args:
        fsdp: accept parameters that FSDP2 or ``replicate`` manages. They reduce a gradient in the backward, so whoever
            computes the queue must disable that (``set_requires_gradient_sync``) and reduce afterwards, as
            ``parallel_ops.pipeline_parallel`` does.

    Attributes:
        keep_gathered: whether entries keep what the backward has gathered anyway, instead of gathering it once more:
            as many times the memory of a shard as there are ranks, for entries that are soon computed.

    Examples:
        >>> import torch
        >>> from parallel_ops import DeferredWeightGradients, grouped_linear
        >>> deferred, offs = DeferredWeightGradients(), torch.tensor([3, 5], dtype=torch.int32)
        >>> x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(2, 4, 8, requires_grad=True)
        >>> grouped_linear(x, weight, offs, deferred=deferred).sum().backward()
        >>> weight.grad is None, len(deferred)
        (True, 1)
        >>> deferred.compute()
        >>> weight.grad.shape
        torch.Size([2, 4, 8])
    """

    def __init__(self, *, fsdp: bool = False) -> None:
        self.fsdp, self.keep_gathered = fsdp, False
        self._pending: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, compute: Callable[[], None]) -> None:
        """Called in a backward: ``compute`` will add one linear's gradients to where they belong."""
        self._pending.append(compute)

    def compute(self, count: int | None = None) -> None:
        """Computes the oldest ``count`` (all of them without it), in the order of the backward.

        Gradients of weights without a ``main_grad`` are added to their ``.grad``; hooks on the weights are not called.
        On CUDA, on the current stream, which is made to wait for the stream of the backward.

        Raises: ValueError for a ``count`` that is negative or more than there are.
        """
        count = len(self) if count is None else count
        if not 0 <= count <= len(self):
            raise ValueError(
                f"DeferredWeightGradients: count must be from 0 to {len(self)}, which are pending, got {count}"
            )
        with torch.no_grad():
            for _ in range(count):
                self._pending.popleft()()

    def dw_builder(self) -> Callable[[], None]:
        """Takes what the queue holds and returns what computes it.

        For ``torch.distributed.pipelining.PipelineStage(..., dw_builder=queue.dw_builder)``: the stage calls it after
        the backward of each micro-batch and runs the collected entries where the schedule places them.
        """
        taken = DeferredWeightGradients(fsdp=self.fsdp)
        taken._pending, self._pending = self._pending, taken._pending
        return taken.compute


def after_backward(compute: Callable[[], object], *factors: Tensor) -> Callable[[], None]:
    """``compute``, for a queue: the stream that runs it waits for the current one, which makes ``factors``."""
    device = factors[0].device
    backward = torch.cuda.current_stream(device) if factors[0].is_cuda else None

    def run() -> None:
        if backward is not None and (now := torch.cuda.current_stream(device)) != backward:
            now.wait_stream(backward)
            for t in factors:  # else their memory could be reused on their own stream
                t.record_stream(now)
        compute()

    return run


class Accumulator(abc.ABC):
    """What a weight gradient is added to, where that is more than a tensor."""

    @abc.abstractmethod
    def add(self, dz: Tensor, h: Tensor, offs: Tensor | None = None) -> Tensor | None:
        """Adds ``dz^T h``, ``[N, K]``, of ``[rows, N]`` and ``[rows, K]``; returns what autograd gets.

        Args:
            offs: ``[groups]``, int32 or int64: where each group of rows offs. The gradient is then ``[groups, N, K]``,
                a matmul for each group.
        """


class ParameterGrad(Accumulator):
    """The ``.grad`` of a parameter as what a weight gradient is added to: as autograd does, but without its hooks.

    Args:
        parameter: plain, or a DTensor, whose local part the gradient is of; of the weight's dtype and, in any shape, as
            many elements.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    @torch.no_grad()
    def add(self, dz: Tensor, h: Tensor, offs: Tensor | None = None) -> None:
        """``dz^T h``, in place where there is a gradient, so that who holds on to it sees the sum."""
        if (grad := self._local_gradient()) is None:
            self.add_whole(_product(dz, h, offs))
            return
        shape = (dz.shape[1], h.shape[1]) if offs is None else (len(offs), dz.shape[1], h.shape[1])
        add_product(grad.view(shape), dz, h, offs)

    @torch.no_grad()
    def add_whole(self, product: Tensor) -> None:
        """Adds a computed gradient."""
        from torch.distributed.tensor import DTensor  # costs a second, so not for those who have none

        parameter = self._parameter
        if (grad := self._local_gradient()) is not None:
            grad += product.view(grad.shape)
            return
        if isinstance(parameter, DTensor):
            part = product.to(parameter.dtype).view(parameter.to_local().shape)
            grad = new_dtensor(DTensor, part, parameter._spec, requires_grad=False)
        else:
            grad = product.view(parameter.shape)
        # Of an FSDP2 that accumulates in fp32, since torch 2.15, it is not the parameter's.
        parameter.grad = grad.to(parameter.grad_dtype or parameter.dtype)

    def _local_gradient(self) -> Tensor | None:
        from torch.distributed.tensor import DTensor

        grad = self._parameter.grad
        return grad.to_local() if isinstance(grad, DTensor) else grad


class DeferredFactors(Accumulator):
    """Keeps the factors of a matmul, which ``compute`` then adds to a target.

    Args:
        target: not autograd.

    Attributes:
        factors: of ``add``; empty before.
    """

    def __init__(self, target: "Target") -> None:
        self._target = target
        self.factors: tuple[Tensor, ...] = ()

    def add(self, dz: Tensor, h: Tensor, offs: Tensor | None = None) -> None:
        self.factors = (dz, h) if offs is None else (dz, h, offs)

    def compute(self) -> None:
        """Adds the matmul to the target."""
        add_to(self._target, *self.factors)


# None: autograd, which gets the gradient back.
Target = Tensor | Accumulator | None


def add_to(target: Target, dz: Tensor, h: Tensor, offs: Tensor | None = None) -> Tensor | None:
    """Adds ``dz^T h``, as ``Accumulator.add``, to the target; returns what autograd gets."""
    if target is None:
        return _product(dz, h, offs)
    if isinstance(target, Accumulator):
        return target.add(dz, h, offs)
    add_product(target, dz, h, offs)
    return None


def _product(dz: Tensor, h: Tensor, offs: Tensor | None) -> Tensor:
    return dz.t() @ h if offs is None else outer_products(dz, h, offs)


def add_product(total: Tensor, dz: Tensor, h: Tensor, offs: Tensor | None = None, *, rounded: bool = False) -> None:
    """``total += dz^T h``, accumulated in the dtype of ``total``.

    Args:
        total: ``[N, K]``, float32 or the dtype of the factors (16 bits of another kind, under autocast, are added to
            rounded).
        dz, h: ``[rows, N]`` and ``[rows, K]``, of one dtype.
        offs: where groups of rows end; ``total`` is then ``[groups, N, K]``.
        rounded: on a CPU the matmul of bfloat16 factors may be rounded to bfloat16 before it is added: twice as fast
            where the CPU has units for it. Otherwise nothing is rounded on the way.
    """
    if offs is not None:
        add_outer_products(total, dz, h, offs, add_product)
    elif total.dtype == dz.dtype:
        total.addmm_(dz.t(), h)
    elif total.itemsize < 4:
        total += dz.t() @ h
    elif dz.is_cuda:
        torch.addmm(total, dz.t(), h, out_dtype=total.dtype, out=total)
    elif rounded and dz.dtype is torch.bfloat16:
        for part, columns in zip(total.split(_COLS), dz.split(_COLS, dim=1), strict=True):
            part.add_(columns.t() @ h)
    else:
        widest = max(1, h.shape[1], min(dz.shape[1], _COLS))
        rows = max(1, _WIDE_BYTES // (widest * total.itemsize))
        for some_dz, some_h in zip(dz.split(rows), h.split(rows), strict=True):
            wide_h = some_h.to(total.dtype)
            for part, columns in zip(total.split(_COLS), some_dz.split(_COLS, dim=1), strict=True):
                part.addmm_(columns.to(total.dtype).t(), wide_h)


def targets_of(
    op: str,
    weights: Sequence[Tensor],
    main_grads: Sequence[Target] | None,
    deferred: DeferredWeightGradients | None,
) -> list[Target]:
    """Where the gradient of each weight goes, each fit for it."""
    if deferred is not None and not isinstance(deferred, DeferredWeightGradients):
        raise TypeError(f"{op}: deferred must be a DeferredWeightGradients, got {type(deferred).__name__}")
    targets: list[Target] = [None] * len(weights) if main_grads is None else list(main_grads)
    if len(targets) != len(weights):
        raise ValueError(
            f"{op}: main_grad must have one entry for each of the {len(weights)} weights, got {len(targets)}"
        )
    for i, (target, weight) in enumerate(zip(targets, weights, strict=True)):
        if target is None and deferred is not None and weight.requires_grad:
            if not weight.is_leaf:
                raise ValueError(
                    f"{op}: deferred needs weights that are leaves, or a main_grad; the gradient of a weight that was "
                    "computed from another would reach neither"
                )
            targets[i] = ParameterGrad(weight)
        elif target is not None and not isinstance(target, Accumulator):
            _check_main_grad(op, target, weight)
    if any(target is not None for target in targets):
        _check_surroundings(op)
    return targets


def _check_main_grad(op: str, main_grad: Tensor, weight: Tensor) -> None:
    """It has its weight's shape and device, and its dtype or a wider one."""
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"{op}: main_grad must be a tensor, got {type(main_grad).__name__}")
    wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
    if main_grad.dtype not in (weight.dtype, wide):
        either = " or ".join(str(d) for d in dict.fromkeys((weight.dtype, wide)))
        raise TypeError(f"{op}: main_grad must be {either} for a weight of {weight.dtype}, got {main_grad.dtype}")
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"{op}: main_grad must have the shape of weight, {list(weight.shape)}, got {list(main_grad.shape)}"
        )
    if main_grad.device != weight.device:
        raise ValueError(f"{op}: main_grad is on {main_grad.device}, but weight is on {weight.device}")


def _check_surroundings(op: str) -> None:
    if torch.compiler.is_compiling():
        raise ValueError(f"{op}: main_grad and deferred do not work under torch.compile; leave them out there")
    if torch.is_grad_enabled() and getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise ValueError(
            f"{op}: main_grad and deferred do not work inside DistributedDataParallel, which would never sum these "
            "gradients over its ranks; leave them out, or take the module out of it and all-reduce them yourself after "
            "the backward"
        )
