"""Order between programs: what the executor lets pass, and what it finds where a part of a protocol is missing."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from ptx.execution import executed  # noqa: E402
from ptx.values import Fault  # noqa: E402

pytestmark = pytest.mark.executed(smoke=False)
BLOCK, WORKERS = 256, 5


@triton.jit
def _sum_kernel(x_ptr, sum_ptr, counter_ptr, workers, BLOCK: tl.constexpr, MISSING: tl.constexpr):
    """The last program adds what all others stored."""
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if program < workers:
        tl.store(x_ptr + program * BLOCK + i, i + 10 * program)
        if MISSING != "barrier":
            tl.debug_barrier()
        if MISSING != "arrival":
            if MISSING == "plain store":
                tl.store(counter_ptr, workers)
            else:
                tl.atomic_add(counter_ptr, 1, sem="relaxed" if MISSING == "release" else "release")
    else:
        if MISSING != "wait":
            while tl.atomic_add(counter_ptr, 0, sem="acquire") < workers:
                tl.inline_asm_elementwise(
                    "nanosleep.u32 20; mov.b32 $0, $1;", "=r,r", [workers], dtype=tl.int32, is_pure=False, pack=1
                )
        total = tl.zeros((BLOCK,), tl.int32)
        for j in range(workers):
            total += tl.load(x_ptr + j * BLOCK + i)
        tl.store(sum_ptr + i, total)


def run(missing="", shuffle=None):
    x, total = torch.zeros(WORKERS * BLOCK, dtype=torch.int32), torch.zeros(BLOCK, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    with executed(90, shuffle=shuffle):
        _sum_kernel[(WORKERS + 1,)](x, total, count, WORKERS, BLOCK=BLOCK, MISSING=missing, num_warps=4)
    return total, count


@pytest.mark.parametrize("shuffle", [None, *range(4)])
def test_a_program_reads_what_it_waited_for(shuffle):
    total, count = run(shuffle=shuffle)
    assert count.item() == WORKERS
    assert torch.equal(total, WORKERS * torch.arange(BLOCK, dtype=torch.int32) + 10 * sum(range(WORKERS)))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("wait", "reads what another program wrote"),
        ("barrier", "reads what another program wrote"),
        ("release", "reads what another program wrote"),
        ("arrival", "waits for what no program does"),
        ("plain store", "another program stored|two programs write|plain and atomic"),
    ],
)
def test_what_is_missing_is_found(missing, message):
    with pytest.raises(Fault, match=message):
        run(missing)
