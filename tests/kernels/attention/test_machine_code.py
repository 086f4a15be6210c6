"""What the compiled attention kernels must have, and what they must not do, in any configuration that the op takes:

spill; multiply tiles that no proxy fence has shown to the tensor cores; wait for copies that have just been started.
"""

import re

import pytest
import torch
import triton

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.ops.attention.block import Dropout
from ptx import aot, machine_code
from ptx.kernels import check_shared_memory, meta
from ptx.memory import proxies
from ptx.program import parse
from support.numerics.attention_launches import DRAWS, PRODUCTS, launches, loops_with_products

BF16, FP32 = torch.bfloat16, torch.float32

not_smoke = pytest.mark.aot(smoke=False)
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


@not_smoke
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("dtype", "dims", "capability"), SIZES, ids=str)
def test_nothing_is_spilled_and_every_product_is_fenced(dtype, dims, capability, name):
    for launch in launches(dtype, dims, capability, **OPTIONS[name]):
        code = aot.compile_for(launch, capability)
        assert not code.spills, f"{launch}: {len(code.spill_instructions)} spills, {code}"
        assert code.shared_bytes <= aot.SHARED_MEMORY_LIMIT[capability], f"{launch}: {code}"
        found = proxies.unfenced(parse(aot.assembly(launch, capability)))
        assert not found, f"{launch}: {len(found)} products, the first: {found[0].source}: {found[0].text}"


@not_smoke
@pytest.mark.parametrize("capability", [89, 120])
@pytest.mark.parametrize(("dtype", "dims"), [(BF16, 128), (BF16, 256), (FP32, 128)], ids=str)
def test_tiles_fit_99_kib(dtype, dims, capability):
    for launch in launches(dtype, dims, capability, **OPTIONS["documents"]):
        check_shared_memory(launch, capability)


@not_smoke
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


@not_smoke
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


COMPILED = [
    *((BF16, dims, sm, "causal", {}) for sm in PRODUCTS for dims in (64, 128)),
    (BF16, 128, 90, "window, merged", {"left": -1000, "merge": True}),
    (BF16, 128, 90, "documents", {"spans": True}),
    (BF16, 128, 90, "soft cap", {"softcap": 30.0}),
    *((BF16, dims, sm, "dropout", {"dropout": DRAWS}) for dims, sm in ((128, 90), (64, 80), (128, 100))),
    (BF16, 256, 90, "causal", {}),
    (BF16, 192, 90, "values of 128", {"dims_v": 128}),
]


# Machine instructions that a thread of sm_90 issues for each of its scores in a tile of bf16 that nothing masks: 7.0,
# 10.6 and 7.7 at 64 dims, 8.1, 17.3 and 8.9 at 128. The least of a forward are 4.5: a maximum, a multiply-add, an
# exponential, a sum, half a conversion. Triton 3.6 loads the numbers of queries into each thread that needs them.
# Triton 3.9 puts a fence and a barrier before each wgmma of a loop: 7 to 19 % more.
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
OLD, FENCED = TRITON == (3, 6), TRITON >= (3, 9)
ISSUED = {
    64: {"_forward_kernel": 7.4, "_keys_kernel": 15.9 if OLD else 11.2, "_queries_kernel": 8.1},
    128: {"_forward_kernel": 8.6, "_keys_kernel": 22.4 if OLD else 18.1, "_queries_kernel": 9.4},
}


@pytest.mark.aot
@pytest.mark.parametrize(
    ("dtype", "dims", "capability", "options"),
    [
        pytest.param(dtype, dims, sm, options, id=f"{dtype}-{dims}-sm_{sm}-{name}".replace("torch.", ""))
        for dtype, dims, sm, name, options in COMPILED
    ],
)
def test_compiled_code(dtype, dims, capability, options):
    """Matmuls on tensor cores in the loop, nothing spilled, few instructions, no atomics: sums have one order."""
    for launch in launches(dtype, dims, capability, **options):
        code = aot.compile_for(launch, capability)
        assert not code.spills, f"{launch} spills: {code}"
        assert code.shared_bytes <= aot.SHARED_MEMORY_LIMIT[capability], f"{launch}: {code}"
        if launch.name == "_sum_kernel":
            assert "LDG.E.128" in code.sass
            continue
        copies = [x.name for x in loops_with_products(code)[0] if x.name.startswith("LDGSTS")]
        staged = dict(launch.options)["num_stages"] > 1
        if launch.name != "_keys_kernel" and staged:  # whose queries come with a number each, their shift and delta
            assert copies and all(name.endswith("128") for name in copies), f"{launch}: {copies}"
        loops = [{x.name.split(".")[0] for x in loop} for loop in loops_with_products(code)]
        assert len(loops) >= 2 and all(PRODUCTS[capability] in names for names in loops), f"{launch}: {loops}"
        assert not any(names & {"ATOM", "ATOMG", "RED"} for names in loops), f"{launch}: {loops}"
        if capability == 90 and dims in ISSUED and not options:
            sizes = dict(launch.constants)
            scores = sizes["BLOCK_QUERIES"] * sizes["BLOCK_KEYS"] / (32 * dict(launch.options)["num_warps"])
            found = len(loops_with_products(code)[0]) / scores
            bound = ISSUED[dims][launch.name] * (1.13 if FENCED else 1)
            assert found <= bound, f"{launch}: {found:.1f} instructions a score"


@pytest.mark.aot
def test_blocks_of_a_ring_share_one_kernel():
    """Bounds, offsets and places of blocks differ from call to call."""
    from parallel_ops.triton_kernels.attention import flash_attention as kernels

    q, rows = meta(100, 1, 2, 64, dtype=BF16), meta(2, 1, 2, 100, dtype=FP32)
    seed = meta(1, dtype=torch.int64)
    with aot.recorded() as recorded:
        for right in (0, 1, 16, -3, 2**40):
            for start in (0, 1 << 20, 2**33):
                draws = Dropout(0.1, seed, TokenRange(start, 100), TokenRange(16, 100))
                kernels.forward(
                    q, q, q, q, rows, merge=False, left=None, right=right, spans=None, scale=0.5, softcap=0.0,
                    dropout=draws,
                )  # fmt: skip
    assert len(recorded) <= 2, recorded  # places beyond 32 bits are a type of their own


@pytest.mark.aot
@pytest.mark.parametrize("dims", [33, 64])
def test_all_lanes_have_the_same_delta(dims):
    """Lanes add up in pairs. A product fused into such a sum would be rounded in the other lane alone."""
    from parallel_ops.triton_kernels.attention.rows import gradient_rows

    with aot.recorded() as recorded:
        out, rows = meta(100, 1, 2, dims, dtype=BF16), meta(3, 1, 2, 100, dtype=FP32)
        gradient_rows(out, out, rows[:2], rows)
    ptx = aot.compiled(recorded[0], 90).asm["ptx"]
    received = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", ptx))
    assert received
    assert not received & set(re.findall(r"fma\.rn\.f32\s.*, (%\w+);", ptx))
