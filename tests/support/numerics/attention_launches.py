"""Launches of the attention kernels to compile and to look at."""

import torch

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.ops.attention.block import Dropout
from ptx import aot, machine_code
from ptx.kernels import meta

FP32 = torch.float32


def launches(
    dtype, dims, capability, *, left=None, right=0, softcap=0.0, dropout=None, spans=False, merge=False, dims_v=None
):
    from parallel_ops.triton_kernels.attention import flash_attention as kernels

    q, k = meta(4096, 1, 8, dims, dtype=dtype), meta(4096, 1, 2, dims, dtype=dtype)
    grad, v = (meta(*t.shape[:3], dims_v or dims, dtype=dtype) for t in (q, k))
    kind = FP32 if merge else dtype
    out, dq, dk, dv = (meta(*t.shape, dtype=kind) for t in (grad, q, k, v))
    statistics, rows = meta(2, 1, 8, 4096, dtype=FP32), meta(3, 1, 8, 4096, dtype=FP32)
    bounds = meta(2, 4096, dtype=torch.int32) if spans else None
    options = {"left": left, "right": right, "spans": bounds, "scale": 0.1, "softcap": softcap, "dropout": dropout}
    with aot.recorded() as recorded, aot.chosen_for(capability):
        kernels.forward(q, k, v, out, statistics, merge=merge, **options)
        kernels.backward(grad, q, k, v, rows, dq, dk, dv, accumulate_dq=merge, query_spans=bounds, **options)
    # At 132 SMs each member of a group of four has programs of its own, unless keys are in small blocks.
    names = [launch.name for launch in recorded]
    assert names in ([*KERNELS[:2], "_sum_kernel", KERNELS[2]], list(KERNELS)), names
    return recorded


KERNELS = ("_forward_kernel", "_keys_kernel", "_queries_kernel")


PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
DRAWS = Dropout(0.1, meta(1, dtype=torch.int64), TokenRange(0, 4096), TokenRange(0, 4096))


def loops_with_products(code: aot.Compiled) -> list[list[machine_code.Instruction]]:
    """By length: the first is the innermost one that masks nothing."""
    instructions = machine_code.instructions(code.sass)
    loops = [instructions[x.first : x.last + 1] for x in machine_code.code_loops(instructions)]
    return sorted((x for x in loops if any(i.name.startswith(tuple(PRODUCTS.values())) for i in x)), key=len)
