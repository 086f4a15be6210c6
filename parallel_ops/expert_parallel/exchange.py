"""An all-to-all that is under way while other work is done, forward and backward.

    start    sends                  backward: waits for the gradients that ``finish`` has sent
    finish   waits                  backward: sends the gradients

Autograd runs the latest nodes first, so what was computed between start and finish is differentiated between them too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from parallel_ops._internal.distributed.turns import pass_on
from parallel_ops.comm import all_to_all
from parallel_ops.comm.consistency import CallSignature, check_consistency
from parallel_ops.comm.transport.base import Handle, start_exchange
from parallel_ops.comm.transport.registry import transport_of

_NAME = "expert_parallel"


class Exchange:
    """Rows on their way to other ranks.

    Args:
        sent, received: rows to, and from, each rank. The ranks must agree about them.

    Under dispatch modes, such as that of selective recomputation, and under ``torch.compile`` it is one op, which the
    mode sees, and nothing is under way.

    The nodes of autograd keep it, so it keeps none of their results: such a circle would never be freed.
    """

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> None:
        self.group, self.sent, self.received = group, list(sent), list(received)
        self._handle: Handle | None = None
        self._gradient: Tensor | None = None
        self._kept: tuple[Tensor, ...] = ()
        self._at_once = is_in_torch_dispatch_mode() or torch.compiler.is_compiling()

    def start(self, x: Tensor) -> Tensor:
        """The rows that come, ``[sum(received), ...]``, undefined until ``finish``. Called once.

        Args:
            x: ``[sum(sent), ...]``, the rows for rank 0 first.
        """
        if self._at_once:
            return all_to_all(x, self.group, split_sizes=self.sent, concat_sizes=self.received)
        found: Tensor = _Start.apply(x, self)
        return found

    def finish(self, rows: Tensor) -> Tensor:
        """The rows that have come. Called once.

        Args:
            rows: what ``start`` gave, or what a module's hooks made of them.
        """
        found: Tensor = rows if self._at_once else _Finish.apply(rows, self)
        return found

    def send(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        x = x.contiguous()
        out = x.new_empty((sum(received), *x.shape[1:]))
        transport = transport_of(self.group, x.device)
        self._handle = start_exchange(_NAME, transport, out, x, (received, sent))
        self._kept = x, out  # gloo does not keep what it sends
        return out

    def wait(self) -> None:
        pass_on()
        assert self._handle is not None
        self._handle.wait()
        self._handle, self._kept = None, ()

    def send_gradient(self, grad: Tensor) -> None:
        rows = f"gradients of {list(grad.shape)} {grad.dtype}"
        same = grad.dtype, grad.shape[1:]
        check_consistency(self.group, CallSignature(f"backward of {_NAME}", same, rows), grad.device)
        self._gradient = self.send(grad, self.received, self.sent)

    def take_gradient(self) -> Tensor:
        self.wait()
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        return gradient


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.send(x, exchange.sent, exchange.received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.take_gradient(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Autograd wants a gradient in the shape of the rows; what is under way has that of those sent.
        ctx.exchange.send_gradient(grad)
        return grad, None
