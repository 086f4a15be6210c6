"""What every kernel test file shares: launches compiled ahead of time, launchers made differentiable."""

import pytest
import torch

from ptx import aot
from ptx.execution import rerun, unwritten
from ptx.report import SECTOR, Report
from support.numerics.suite import DTYPES


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with a shape and no data: enough for a launcher whose launch is recorded, not executed."""
    return torch.empty(shape, dtype=dtype, device="meta")


def aot_cases() -> list:
    """(dtype, cols, capability): fp32 and bf16 for sm_90, bf16 for every chip, once a size that vectors do not divide.

    Code for fp16 differs from that for bf16 in its conversions alone; it is executed.
    """
    cases = [(dtype, 4096, 90) for dtype in DTYPES if dtype is not torch.float16] + [
        (torch.bfloat16, 4096, sm) for sm in (80, 100)
    ]
    cases.append((torch.bfloat16, 1001, 90))
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}-sm_{case[2]}".replace("torch.", "")) for case in cases]


def interpreted_cases(*shapes: tuple[int, ...]) -> list:
    """(shape, dtype): every shape in fp32, the first in the other dtypes too. The interpreter is slow."""
    cases = [*((shape, torch.float32) for shape in shapes), *((shapes[0], dtype) for dtype in DTYPES[1:])]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}".replace("torch.", "")) for case in cases]


# Kernels whose traffic is a rounding error beside that of the kernel they follow.
SMALL = {"_merge_kernel", "_combine_kernel"}


def check_compiled(
    launches: list[aot.Launch], cols: int, capability: int, *, passes: float = 1.0, tables: tuple[str, ...] = ()
) -> None:
    """No spills, no local memory, shared memory within the chip's limit, and data moved as it should be.

    ``passes``: how often a program may read and write what it touches. ``tables``: what each of its four warps reads.
    """
    assert launches, "nothing was launched"
    for launch in launches:
        check_machine_code(launch, capability)
        if launch.name not in SMALL:
            check_transfers(rerun(launch, capability, programs=1), cols, passes, tables)


def check_machine_code(launch: aot.Launch, capability: int) -> None:
    """No spills, no stack, no local memory, and shared memory within the chip's limit."""
    code = aot.compile_for(launch, capability)
    assert not code.spills, f"{launch} spills: {code}"
    limit = aot.SHARED_MEMORY_LIMIT[capability]
    assert code.shared_bytes <= limit, f"{launch} needs more than {limit} bytes of shared memory: {code}"


def check_shared_memory(launch: aot.Launch, capability: int) -> None:
    """Within the chip's limit."""
    used = aot.compiled(launch, capability, machine_code=False).metadata.shared
    limit = aot.SHARED_MEMORY_LIMIT[capability]
    assert used <= limit, f"{launch} needs {used} bytes of shared memory, of {limit}"


def check_transfers(report: Report, cols: int, passes: float = 1.0, tables: tuple[str, ...] = ()) -> None:
    """Bulk data moves once, in whole sectors, 128 bits a thread where rows of ``cols`` elements begin at 16 bytes.

    Counted over what one program executes, so loops weigh as much as they run.
    """
    operands = {
        **{f"load of {k}": t for k, t in report.loads.items()},
        **{f"store of {k}": t for k, t in report.stores.items()},
    }
    moved = sum(t.bytes for t in operands.values())
    name = f"{report.specialised}"
    bulk = {operand: t for operand, t in operands.items() if t.bytes >= 0.1 * moved}
    items = {operand: min(report.element_bytes[operand.rpartition(" ")[2]], 16) for operand in bulk}
    for operand, t in bulk.items():
        item = items[operand]
        # Tables in fp32 beside 16-bit data come in two loads a thread, each half of its sectors; L1 has the other half.
        loads = max(1, item // min(items.values()))
        # A mask of one byte an element beside 16-bit data comes 8 elements a thread, whole sectors all the same.
        narrow = sum(n for width, n in t.widths.items() if width < (128 if item > 1 else 64))
        if cols * item % 16 == 0:
            assert narrow <= 0.1 * t.bytes, f"{name}: {operand} moves in narrow pieces: {dict(t.widths)} bytes by bits"
            assert t.sectors <= 1.1 * loads * t.least, (
                f"{name}: {operand} takes {t.sectors} sectors where {t.least} would do"
            )
        distinct = max(t.distinct_per_program(), 1) * (4 if operand.rpartition(" ")[2] in tables else 1)
        assert SECTOR * t.least <= 1.1 * passes * distinct, (
            f"{name}: {operand} moves {SECTOR * t.least} bytes where {distinct} are touched"
        )


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


def poisoned(shape, like: torch.Tensor | torch.dtype) -> torch.Tensor:
    """What a kernel is to write: full of NaN or large integers until then, and to read it earlier is a fault."""
    return unwritten(tuple(shape), like if isinstance(like, torch.dtype) else like.dtype)
