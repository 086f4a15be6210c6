"""The numerics check of the softmaxes, whose gradient cancels."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from support.numerics import suite


def check_numerics(
    op: suite.Op,
    reference: suite.Op,
    args: Sequence[Any],
    grad: Tensor,
    scale: float,
    gradient_unit: float | None = None,
) -> None:
    """``suite.check_numerics``, the output to 2 units in the last place beyond twice PyTorch's own error.

    The gradient ``scale y (dy - sum(dy y))`` is a difference that vanishes where one key takes all: its rounding error,
    PyTorch's too, is in units of ``scale dy``, and so is the slack (or of ``gradient_unit``, where dy has a mean that
    must not matter). Which of the two comes out luckier is chance there.
    """
    detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
    suite.check_numerics(op, reference, detached, slack_ulps=2)
    doubles = [a.detach().double().requires_grad_() if a is args[0] else a for a in args]
    _, dx, *_ = suite.forward_backward(reference, doubles, grad.double())
    largest = dx[dx.isfinite()].abs().max().item() if dx.numel() and dx.isfinite().any() else 0.0
    unit = abs(scale) * grad.abs().max().item() if grad.numel() else 0.0
    unit = unit if gradient_unit is None else gradient_unit
    suite.check_numerics(op, reference, args, grad, slack_ulps=2 * max(1.0, unit / max(largest, 1e-30)))


def walks(dtype: torch.dtype, cols: int) -> int:
    """How often rows are read: those that do not fit on chip, twice."""
    return 1 if cols * dtype.itemsize <= 64 * 1024 else 2


def compiled_cases() -> list:
    """(dtype, cols, capability) for every block configuration: several rows a program, one row at each size, the loop
    over longer rows; and once a row that vectors do not divide."""
    everywhere = [(torch.bfloat16, cols) for cols in (4096, 65536)]
    once = [(torch.bfloat16, 128), (torch.bfloat16, 2048), (torch.bfloat16, 16384), (torch.bfloat16, 32768)]
    once += [(torch.bfloat16, 1001), (torch.float16, 4104), (torch.float32, 4096), (torch.float32, 65536)]
    cases = [(*case, sm) for case in everywhere for sm in (80, 90, 100)]
    cases += [(*case, 90) for case in once]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}-sm_{case[2]}".replace("torch.", "")) for case in cases]
