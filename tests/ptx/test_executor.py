"""The executor of PTX itself: a planted bug of each kind is found, and code without it runs."""

import numpy as np
import pytest
import torch

from ptx import execution
from ptx.machine import Approximation
from ptx.program import parse
from ptx.values import Fault, fused_multiply_add

_MODULE = """
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry kernel(
    .param .u64 x_param,
    .param .u64 y_param
)
{{
    .reg .pred %p<9>;
    .reg .b16 %h<9>;
    .reg .b32 %r<99>;
    .reg .b64 %d<20>;
    ld.param.u64 %d1, [x_param];
    ld.param.u64 %d2, [y_param];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, {threads}, %r1;
    mul.wide.s32 %d3, %r3, 4;
    add.s64 %d4, %d1, %d3;
    add.s64 %d5, %d2, %d3;
    mov.u32 %r9, smem;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r9, %r4;
    xor.b32 %r6, %r5, 128;
    setp.lt.s32 %p1, %r1, 16;
    setp.lt.s32 %p2, %r1, 32;
    {body}
    ret;
}}
"""


def run(body, *, warps=2, programs=1, x=None, y=None, seed=None, shared=1024):
    """%d4, %d5: this thread's elements of x and y; %r5, %r6: its word of shared memory and the other warp's."""
    n = 32 * warps * programs
    x = torch.arange(n, dtype=torch.float32) if x is None else x
    y = torch.zeros(n) if y is None else y
    flags = {y.untyped_storage().data_ptr(): np.ones(y.nbytes, np.bool_)}
    program = parse(_MODULE.format(threads=32 * warps, body=body))
    arguments = [("x", x), ("y", y)]
    report = execution.run(program, (programs,), warps, arguments, shared, None, flags, Approximation(seed))
    return y, report


COPY = "ld.global.b32 %r7, [%d4]; st.global.b32 [%d5], %r7;"
THROUGH_SHARED = (
    "ld.global.b32 %r7, [%d4]; st.shared.b32 [%r5], %r7; {}ld.shared.b32 %r8, [%r6]; st.global.b32 [%d5], %r8;"
)
ASYNC = (
    "cp.async.ca.shared.global [%r5], [%d4], 4; cp.async.commit_group; {}bar.sync 0;"
    "ld.shared.b32 %r8, [%r5]; st.global.b32 [%d5], %r8;"
)

BUGS = {
    "outside its tensor": "ld.global.b32 %r7, [%d4+4];",
    "before its tensor": "ld.global.b32 %r7, [%d4+-4];",
    "misaligned": "ld.global.v2.b32 {%r7, %r8}, [%d1+4];",
    "two programs write one place": "st.global.b32 [%d2], %r1;",
    "reads what nobody wrote": "ld.global.b32 %r7, [%d5];",
    "reads what another program wrote": (
        "st.global.b32 [%d5], %r1; xor.b64 %d6, %d3, 256; add.s64 %d6, %d2, %d6; ld.global.b32 %r7, [%d6];"
    ),
    "reads what another thread wrote": (
        "st.global.b32 [%d5], %r1; xor.b64 %d6, %d3, 4; add.s64 %d6, %d2, %d6; ld.global.b32 %r7, [%d6];"
    ),
    "overwrites what another warp read since the last barrier, of x": (
        "xor.b64 %d6, %d3, 128; add.s64 %d6, %d1, %d6; ld.global.b32 %r7, [%d6];"
        "add.s32 %r7, %r7, 1; st.global.b32 [%d4], %r7;"
    ),
    "reads shared memory that nobody wrote": "ld.shared.b32 %r7, [%r5];",
    "outside shared memory": "st.shared.b32 [%r5+1000], %r1;",
    "misaligned in shared memory": "st.shared.v2.b32 [%r5], {%r1, %r1};",
    "another warp wrote since the last barrier": THROUGH_SHARED.format(""),
    "another warp read since the last barrier": (
        THROUGH_SHARED.format("bar.sync 0;") + "add.s32 %r8, %r8, 1; st.shared.b32 [%r5], %r8;"
    ),
    "threads write different values to one place of shared memory": "st.shared.b32 [%r9], %r1;",
    "a barrier that not all threads reach": "@%p2 bra SKIP; bar.sync 0; SKIP:",
    "a shuffle from a thread that does not take part": "@%p1 shfl.sync.bfly.b32 %r7, %r1, 16, 31, -1;",
    "a copy under way will write": ASYNC.format(""),
    "ldmatrix by a part of a warp": "@%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r7}, [%r9];",
    "does not end": "AGAIN: bra AGAIN;",
    "an instruction that is not known here": "tcgen05.alloc %r7, [%r9];",
}


@pytest.mark.parametrize("message", BUGS)
def test_a_planted_bug_is_found(message, monkeypatch):
    monkeypatch.setattr("ptx.machine._LIMIT", 1000)
    expected = message.replace("before its tensor", "outside its tensor")
    with pytest.raises(Fault, match=expected):
        run(BUGS[message], programs=2)


def test_code_without_bugs_runs():
    copied, _ = run(COPY, programs=2)
    assert torch.equal(copied, torch.arange(128.0))
    swapped, report = run(THROUGH_SHARED.format("bar.sync 0;"))
    assert torch.equal(swapped, torch.arange(64.0).view(2, 32).flip(0).flatten())
    assert report.barriers == 1 and report.bank_ratio == 1.0
    late, _ = run(ASYNC.format("cp.async.wait_group 0;"))
    assert torch.equal(late, torch.arange(64.0))


def test_gaps_between_rows_belong_to_no_tensor():
    rows = torch.zeros(2, 40)[:, :32]
    with pytest.raises(Fault, match="outside its tensor"):
        run("ld.global.b32 %r7, [%d4];", x=rows)


def test_a_tensor_is_known_after_it_was_written():
    run(COPY + "bar.sync 0; xor.b64 %d6, %d3, 4; add.s64 %d6, %d2, %d6; ld.global.b32 %r7, [%d6];")


def test_sectors_and_widths():
    _, packed = run("ld.global.b32 %r7, [%d4];")
    assert packed.sector_ratio == 1.0 and packed.loads["x"].widths == {32: 256}
    scattered = "mul.wide.s32 %d6, %r1, 32; add.s64 %d6, %d1, %d6; ld.global.b32 %r7, [%d6];"
    _, strided = run(scattered, x=torch.zeros(512))
    assert strided.loads["x"].sectors == 64 and strided.sector_ratio == 8.0
    assert strided.loads["x"].distinct() == 64 * 32


@pytest.mark.parametrize(("words", "ratio"), [(1, 1.0), (2, 2.0), (33, 1.0), (32, 32.0)])
def test_bank_conflicts(words, ratio):
    body = f"mad.lo.s32 %r7, %r1, {4 * words}, %r9; st.shared.b32 [%r7], %r1;"
    assert run(body, warps=1, shared=32 * 33 * 4)[1].bank_ratio == ratio
    vectors = "shl.b32 %r7, %r1, 4; add.s32 %r7, %r7, %r9; st.shared.v4.b32 [%r7], {%r1, %r1, %r1, %r1};"
    assert run(vectors, warps=1)[1].bank_ratio == 1.0


def test_instructions_are_counted_by_trips():
    body = "mov.u32 %r7, 0; LOOP: add.s32 %r7, %r7, 1; setp.lt.s32 %p3, %r7, 10; @%p3 bra LOOP;"
    _, report = run(body, warps=1)
    assert report.count("bra") == 10 and report.instructions == 14 + 1 + 30 + 1


def test_threads_that_part_meet_again():
    body = """
        mov.u32 %r7, 1; @%p1 bra LOW; mov.u32 %r7, 2; bra DONE; LOW: mov.u32 %r7, 3; DONE:
        shfl.sync.bfly.b32 %r8, %r7, 16, 31, -1; st.global.b32 [%d5], %r8;
    """
    y, _ = run(body, warps=1)
    assert y.view(torch.int32).tolist() == [2] * 16 + [3] * 16


def test_approximate_instructions_are_off_by_their_worst_error():
    x = torch.linspace(-3.9, 3.9, 64)
    body = "ld.global.b32 %r7, [%d4]; ex2.approx.f32 %r8, %r7; st.global.b32 [%d5], %r8;"
    exact = torch.exp2(x.double())
    assert torch.equal(run(body, x=x)[0], exact.float())
    off = [((run(body, x=x, seed=seed)[0] - exact) / exact).abs() * 2**22 for seed in (0, 1)]
    assert off[0].min() > 0.74 and off[0].max() < 1.26  # the result is rounded, to a quarter of the error
    again = run(body, x=x, seed=0)[0]
    assert torch.equal(again, run(body, x=x, seed=0)[0]) and not torch.equal(again, run(body, x=x, seed=1)[0])
    powers = run(body, x=x.round(), seed=0)[0]  # which exp and erf in fp64 rely on
    assert torch.equal(powers, torch.exp2(x.round()))


def test_fused_multiply_add_of_fp64_rounds_once():
    x, y = np.array([1 + 2.0**-52, 3.0, 1e308]), np.array([1 - 2.0**-52, 1 / 3, 10.0])
    z = np.array([-1.0, -1.0, 0.0])
    with np.errstate(all="ignore"):
        rounded = fused_multiply_add("f64", x, y, z)
    assert rounded.tolist() == [-(2.0**-104), -(2.0**-54), np.inf]
