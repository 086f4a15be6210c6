"""What the compiled attention kernels must not do, in any configuration that the op takes.

Spill; multiply tiles that no proxy fence has shown to the tensor cores; wait for copies that have just been started.
"""

import pytest
import torch

from ptx import aot, machine_code
from ptx.memory import proxies
from ptx.program import parse
from support.numerics.attention_launches import DRAWS, PRODUCTS, launches, loops_with_products

BF16, FP32 = torch.bfloat16, torch.float32

pytestmark = pytest.mark.aot(smoke=False)
OPTIONS = {
    "causal": {},
    "documents": {"spans": True},
    "soft cap": {"softcap": 30.0},
    "documents, soft cap": {"spans": True, "softcap": 30.0},
    "window, dropout": {"left": -1000, "dropout": DRAWS},
    "documents, soft cap, dropout": {"spans": True, "softcap": 30.0, "dropout": DRAWS},
    "window, merged": {"left": -1000, "merge": True},
    "all, merged": {"left": -1000, "merge": True, "spans": True, "softcap": 30.0, "dropout": DRAWS},
}
SIZES = [
    *((BF16, dims, sm) for sm in PRODUCTS for dims in (64, 128, 256)),
    *((FP32, dims, sm) for sm in PRODUCTS for dims in (64, 128)),
]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("dtype", "dims", "capability"), SIZES, ids=str)
def test_nothing_is_spilled_and_every_product_is_fenced(dtype, dims, capability, name):
    for launch in launches(dtype, dims, capability, **OPTIONS[name]):
        code = aot.compile_for(launch, capability)
        assert not code.spills, f"{launch}: {len(code.spill_instructions)} spills, {code}"
        assert code.shared_bytes <= aot.SHARED_MEMORY_LIMIT[capability], f"{launch}: {code}"
        found = proxies.unfenced(parse(aot.assembly(launch, capability)))
        assert not found, f"{launch}: {len(found)} products, the first: {found[0].source}: {found[0].text}"


def test_a_product_behind_copies_without_a_fence_is_found():
    """With two stages Triton compiles dK and dV for sm_100 so; a version that does not needs no other stages."""
    lines = [
        "cp.async.wait_group 0;",
        "bar.sync 0;",
        "{}",
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
    ]
    loop = ["$L__BB0_1:", lines[3], "cp.async.wait_group 0;", "@%p1 bra $L__BB0_1;"]
    fence = "fence.proxy.async.shared::cta;"
    for body, count in (
        (lines, 1),
        ([x.format(fence) if x == "{}" else x for x in lines], 0),
        ([fence, *lines], 1),
        (loop, 1),  # found on the way around
        ([loop[0], fence, *loop[1:]], 0),
    ):
        code = "\n".join(x for x in body if x != "{}")
        assert len(proxies.unfenced(parse(f".visible .entry k()\n{{\n{code}\nret;\n}}\n"))) == count, code


@pytest.mark.parametrize("name", ["causal", "documents, soft cap, dropout"])
@pytest.mark.parametrize("dims", [64, 128, 256])
def test_copies_of_the_next_tile_run_beside_products(dims, name):
    """The wait at the top of a loop leaves as many groups of copies under way as a tile has."""
    for launch in launches(BF16, dims, 90, **OPTIONS[name]):
        if launch.name == "_sum_kernel":
            continue
        loops = [x for x in loops_with_products(aot.compile_for(launch, 90)) if _commits(x)]
        assert loops, launch
        innermost = [x for x in loops if not any(y is not x and set(map(id, y)) < set(map(id, x)) for y in loops)]
        for loop in innermost:
            waits = [int(x.operands.rpartition("0x")[2], 16) for x in loop if x.name.startswith("DEPBAR")]
            assert waits and min(waits) >= _commits(loop), f"{launch}: waits {waits}, {_commits(loop)} groups a tile"


def _commits(loop: list[machine_code.Instruction]) -> int:
    return sum(x.name.startswith("LDGDEPBAR") for x in loop)
