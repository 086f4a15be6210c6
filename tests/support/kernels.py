"""What every kernel test file shares: launches compiled ahead of time, launchers made differentiable."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import pytest
import torch

from support import aot
from support.suite import DTYPES


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with a shape and no data: enough for a launcher whose launch is recorded, not executed."""
    return torch.empty(shape, dtype=dtype, device="meta")


def aot_cases() -> list:
    """(dtype, cols, capability): aligned sizes for every dtype and chip, and once a size that vectors do not divide."""
    aligned = [(dtype, 4096, sm) for dtype in DTYPES for sm in sorted(aot.SHARED_MEMORY_LIMIT)]
    cases = [*aligned, (torch.bfloat16, 1001, 90)]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}-sm_{case[2]}".replace("torch.", "")) for case in cases]


def interpreted_cases(*shapes: tuple[int, ...]) -> list:
    """(shape, dtype): every shape in fp32, the first in the other dtypes too. The interpreter is slow."""
    cases = [*((shape, torch.float32) for shape in shapes), *((shapes[0], dtype) for dtype in DTYPES[1:])]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}".replace("torch.", "")) for case in cases]


# Kernels whose traffic is a rounding error beside that of the kernel they follow.
SMALL = {"_column_sum_kernel", "_merge_kernel", "_combine_kernel"}


def check_compiled(
    launches: list[aot.Launch],
    cols: int,
    capability: int,
    *,
    per_row: Collection[str] = (),
    per_program: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> None:
    """No spills, no local memory, shared memory within the chip's limit, bulk loads and stores 128 bits wide.

    ``per_row``: pointers of the kernels, without their _ptr, to one value a row, beside the bulk of the data.
    ``per_program``: by kernel, pointers to what a program reads or writes once while it walks over many rows.
    """
    assert launches, "nothing was launched"
    for launch in launches:
        code = aot.compile_for(launch, capability)
        assert not code.spill_instructions and code.local_bytes == 0, f"{launch} spills: {code}"
        assert code.stack_bytes == 0, f"{launch} uses the stack: {code}"
        limit = aot.SHARED_MEMORY_LIMIT[capability]
        assert code.shared_bytes <= limit, f"{launch} needs more than {limit} bytes of shared memory: {code}"
        if cols % 16 == 0 and launch.name not in SMALL:
            beside = {*per_row, *per_program.get(launch.name, ())}
            assert code.wide_share(beside) >= 0.9, f"{launch} moves bulk data in narrow pieces: {code.access_bits}"


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, *args):
        ctx.save_for_backward(*(a for a in args if isinstance(a, torch.Tensor)))
        ctx.backward_launcher, ctx.args = backward, args
        return forward(*args)

    @staticmethod
    def backward(ctx, *grads):
        ctx.saved_tensors  # noqa: B018  (raises if an input was modified in place)
        return None, None, *ctx.backward_launcher(*grads, *ctx.args)


def differentiable(forward, backward):
    """A function of ``*args`` from ``forward(*args)`` and ``backward(*grads, *args)``, which wrap the launchers."""
    return lambda *args: _Kernels.apply(forward, backward, *args)


def poisoned(shape, like: torch.Tensor) -> torch.Tensor:
    """An output full of NaN, so that an element that no program writes is seen."""
    return torch.full(tuple(shape), torch.nan, dtype=like.dtype)
