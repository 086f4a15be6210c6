"""A call of a linear over a group: its arguments, their comparison between ranks, and how it overlaps.

off         whole collectives; in a backward beside whole matmuls, as in Megatron-LM's linears
n           each rank's shard in n chunks, multiplied as they arrive or sent as they are done (``chunked.py``)
symmetric   matmuls over memory that the GPUs of a node read from each other (``symmetric.py``)
auto        ``off`` or the number of chunks that is the fastest (``choose.py``)
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device, check_same_dtype
from parallel_ops._internal.distributed.compat import resolve_group
from parallel_ops._internal.distributed.groups import GradReduce, check_tensor
from parallel_ops._internal.gradients.weight_gradients import DeferredWeightGradients, Target
from parallel_ops.comm.consistency import CallSignature, check_consistency
from parallel_ops.comm.transport.base import Transport
from parallel_ops.comm.transport.registry import transport_of
from parallel_ops.tensor_parallel.linear import choose
from parallel_ops.tensor_parallel.linear.choose import OFF, Phase, Product, roughly

Overlap = Literal["auto", "off", "symmetric"] | int

# Codes in the ops' schemas; positive numbers are chunks of each rank's shard.
AUTO, SYMMETRIC = -1, -2
_WORDS: dict[str, int] = {"auto": AUTO, "off": OFF, "symmetric": SYMMETRIC}
_CODES = {code: word for word, code in _WORDS.items()}


def encode(op: str, overlap: Overlap) -> int:
    """``overlap`` as the integer of the ops' schemas; raises TypeError or ValueError if it is not valid."""
    if isinstance(overlap, str) and overlap in _WORDS:
        return _WORDS[overlap]
    if isinstance(overlap, int) and not isinstance(overlap, bool) and overlap >= 1:
        return overlap
    words = ", ".join(map(repr, _WORDS))
    message = f"{op}: overlap must be one of {words} or a number of chunks of at least 1, got {overlap!r}"
    raise ValueError(message) if isinstance(overlap, int | str) else TypeError(message)


def check_arguments(
    op: str, x: Tensor, weights: list[Tensor], biases: list[Tensor], group: ProcessGroup | None
) -> None:
    """Raises unless x, weights and biases fit each other and are on a device of the group."""
    check_floating(op, "x", x)
    if x.dim() < 2:
        raise ValueError(f"{op}: x must have at least two dimensions, got {list(x.shape)}")
    check_tensor(op, x, group)
    if not weights:
        raise ValueError(f"{op}: weight must be a tensor or a sequence of at least one")
    for weight in weights:
        check_floating(op, "weight", weight)
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{op}: weight must have shape [N, {x.shape[-1]}], the last dimension of x, got {list(weight.shape)}"
            )
        check_same_device(op, "weight", weight, "x", x)
        check_same_dtype(op, "weight", weight, "x", x)
    if biases and len(biases) != len(weights):
        raise ValueError(f"{op}: bias must be None or one for each of the {len(weights)} weights, got {len(biases)}")
    for weight, bias in zip(weights, biases, strict=False):
        check_floating(op, "bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{op}: bias must have shape [{weight.shape[0]}], one element for each row of weight, "
                f"got {list(bias.shape)}"
            )
        check_same_device(op, "bias", bias, "x", x)
        check_same_dtype(op, "bias", bias, "x", x)


class WeightGradients(Protocol):
    """Computes weight gradients from their factors.

    Args:
        dys, inputs: the output gradients and the input, matrices of the same rows; their matmuls are the gradients.
        part: the weights whose gradients are computed now.
    """

    def __call__(self, dys: Sequence[Tensor], inputs: Tensor, part: slice = ..., /) -> None: ...


@dataclasses.dataclass(frozen=True)
class LinearOptions:
    """The keyword arguments of the linears over a group, made by the public functions; see ``all_gather_linear``.

    Attributes:
        main_grad: one for each weight, if there are several.
        partial_bias: the gradient of bias is of this rank's rows only.
    """

    group: ProcessGroup | None
    overlap: Overlap
    grad_reduce: GradReduce
    sizes: Sequence[int] | None = None
    main_grad: Target | Sequence[Target] = None
    deferred: DeferredWeightGradients | None = None
    partial_bias: bool | None = None  # of ops that have one


class GroupCall(NamedTuple):
    """An op and its arguments after the tensors, in the order of the schemas; most have no ``partial_bias``."""

    op: str
    group: str | None
    sizes: list[int]  # of the sharded dimension, in rank order
    overlap: int
    needs: list[bool]  # whether x, each weight and each bias need a gradient
    exact: bool = True  # sums are in rank order in fp32, not the backend's
    partial_bias: bool = False  # the gradient of bias is of this rank's rows only

    @property
    def symmetric(self) -> bool:
        return self.overlap == SYMMETRIC

    def needs_weights(self, count: int) -> list[bool]:
        return self.needs[1 : 1 + count]

    def needs_biases(self, count: int) -> list[bool]:
        return self.needs[1 + count :]

    def transport(self, device: torch.device) -> Transport | None:
        return None if self.group is None else transport_of(resolve_group(self.group), device)

    def check_consistency(
        self, transport: Transport, x: Tensor, same: tuple[object, ...], shape: Callable[[], str],
        weights: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Raises on all ranks unless all make the same call.

        If a measurement chooses, the weights must have the same shapes too: choices are cached by shape, so
        otherwise some ranks would measure, and wait for the others.
        """
        over = transport.capabilities.name
        # The messages of a backward depend on which parameters need gradients.
        flags = tuple(self.needs), self.exact, self.partial_bias
        options: tuple[object, ...] = (tuple(self.sizes), self.overlap, flags, over)
        measured = [tuple(w.shape) for w in weights] if self.overlap == AUTO and x.is_cuda else []

        def text() -> str:
            even = len(set(self.sizes)) == 1
            sizes = f"[{self.sizes[0]}] * {len(self.sizes)}" if even else str(self.sizes)
            overlap = _CODES.get(self.overlap, self.overlap)
            words = f"{shape()} {x.dtype}, sizes={sizes}, overlap={overlap!r}, requires_grad={self.needs} over {over}"
            words += "" if self.exact else ", grad_reduce='backend'"
            return f"{words}, weights of {measured}" if measured else words

        signature = CallSignature(self.op, (x.dtype, *same, *options, *measured), text)
        check_consistency(resolve_group(self.group), signature, x.device)

    def check_backward(self, grads: Sequence[Tensor]) -> None:
        """Raises on all ranks unless all run the same backward; the ranks may have different output features."""
        grad, shapes = grads[0], tuple(g.shape[1:-1] for g in grads)
        same = (grad.dtype, shapes, tuple(self.sizes), self.overlap, tuple(self.needs))
        text = f"gradients of {[list(g.shape) for g in grads]} {grad.dtype}, requires_grad={self.needs}"
        check_consistency(resolve_group(self.group), CallSignature(f"backward of {self.op}", same, text), grad.device)

    def chunks(
        self, phase: Phase, transport: Transport, like: Tensor, columns: int, inner: int, run: Callable[[int], object]
    ) -> int:
        """How a matmul ``[rows, inner] @ [inner, columns]`` overlaps: ``OFF``, ``SYMMETRIC`` or a number of chunks.

        Args:
            phase: whether the input is gathered or the output scattered.
            like: ``[s, ..., any]`` in the dtype and on the device of the matmul, any number of rows.
            run: runs the op in a way, for timing.
        """
        if self.overlap != AUTO or not (like.is_cuda or choose.may_measure(like.device)):
            return OFF if self.overlap == AUTO else self.overlap
        rows = rows_of(self.sizes, like)
        sent = {"gather": max(rows) * (transport.size - 1) * inner, "scatter": (sum(rows) - min(rows)) * columns}
        product = Product(
            phase, roughly(sum(rows)), columns, inner, roughly(sent[phase] * like.itemsize), transport.size,
            self.exact, like.dtype, transport.capabilities.name,
        )  # fmt: skip
        return choose.choose(product, like.device, resolve_group(self.group), run)


def rows_of(sizes: Sequence[int], t: Tensor) -> list[int]:
    """The rows of every rank's matrix, for a tensor ``[s, ..., N]`` of which rank r has ``sizes[r]`` entries."""
    return [size * math.prod(t.shape[1:-1]) for size in sizes]
