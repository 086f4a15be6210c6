import functools

import pytest
import torch

from parallel_ops import bias_dropout_add
from parallel_ops.ops import bias_dropout_add_reference
from ptx import aot
from ptx.kernels import aot_cases, check_compiled, meta
from support.numerics import suite
from support.numerics.suite import randn

SEED = 0x0123_4567_89AB_CDEF


def launches(dtype, cols, offsets=(0, 2)):
    from parallel_ops.triton_kernels import bias_dropout_add as kernels

    x, b, seed = meta(8192, cols, dtype=dtype), meta(cols, dtype=dtype), meta(1, dtype=torch.int64)
    with aot.recorded() as recorded:
        for bias, dbias in ((b, b), (None, b[:0])):
            for offset in offsets:
                kernels.forward(x, bias, x, x, p=0.1, seed=seed, index_offset=offset)
                kernels.backward(x, x, dbias, p=0.1, seed=seed, index_offset=offset)
            kernels.forward(x, bias, x, x, p=0.0, seed=None, index_offset=0)
        kernels.forward(x, None, None, x, p=0.1, seed=seed, index_offset=0)
        if 0 in offsets:
            positions = meta(2048, dtype=torch.int64)  # of four rows each
            kernels.forward(x, b, x, x, p=0.1, seed=seed, index_offset=0, row_positions=positions)
            kernels.backward(x, x, b, p=0.1, seed=seed, index_offset=0, row_positions=positions)
        kernels.backward(x, x, b, p=0.0, seed=None, index_offset=0)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), aot_cases())
def test_compiled_code(dtype, cols, capability):
    check_compiled(launches(dtype, cols, offsets=(0,)), cols, capability)


@pytest.mark.aot(smoke=False)
def test_compiled_code_where_blocks_start_before_the_tensor():
    """Such accesses are narrower; nothing else may be worse."""
    for launch in launches(torch.bfloat16, 4096, offsets=(1, 2)):
        code = aot.compile_for(launch, 90)
        assert not code.spills, f"{launch}: {code}"


@pytest.mark.aot
def test_call_by_call_values_do_not_recompile():
    from parallel_ops.triton_kernels import bias_dropout_add as kernels

    x, seed = meta(64, 4096, dtype=torch.bfloat16), meta(1, dtype=torch.int64)
    with aot.recorded() as recorded:
        for p in (0.1, 0.5, 0.9, 1.0):
            for index_offset in (0, 16, 2**20 + 4, 2**40):
                kernels.forward(x, None, x, x, p=p, seed=seed, index_offset=index_offset)
    assert len(recorded) == 1


@pytest.mark.aot
def test_grids_of_very_wide_rows_fit_the_device():
    """recorded() checks every grid: only its first axis may be longer than 65,535 programs."""
    from parallel_ops.triton_kernels import bias_dropout_add as kernels

    x, seed = meta(1, 2**28, dtype=torch.float32), meta(1, dtype=torch.int64)
    with aot.recorded():
        kernels.forward(x, None, x, x, p=0.1, seed=seed, index_offset=0)
        kernels.backward(x, x, x[0, :0], p=0.1, seed=seed, index_offset=0)


def both(p, seed, index_offset, row_positions=None):
    options = {"dropout_p": p, "dropout_seed": seed, "index_offset": index_offset, "row_positions": row_positions}
    return [functools.partial(f, **options) for f in (bias_dropout_add, bias_dropout_add_reference)]


DRAWS = [
    (0.3, SEED, 0),
    (0.3, -2, 2**34 - 100),  # counters whose upper word changes within the tensor
    (0.9, 2**33, 2**34 + 3),  # blocks that start before the tensor
    (0.3, 7, 2**50 + 2),
    (1.0, SEED, 1),
    (0.0, None, 0),
]


@pytest.mark.executed
@pytest.mark.parametrize(
    ("shape", "dtype", "draw"),
    [
        *(((3, 5, 72), torch.bfloat16, draw) for draw in range(len(DRAWS))),
        *((shape, torch.float32, draw) for shape in ((30, 9), (2, 516)) for draw in (1, 2)),
        ((2, 1030), torch.float16, 0),
        *(((3, cols), torch.float32, draw) for cols, draw in ((1028, 0), (1030, 1), (1028, 2), (1030, 3))),
    ],
    ids=str,
)
def test_interpreted(shape, dtype, draw):
    x, bias, residual = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([shape, shape[-1:], shape]))
    grad = randn(*shape, dtype=dtype, seed=3).detach()
    ours, theirs = both(*DRAWS[draw])
    suite.check_numerics(ours, theirs, [x, bias, residual], grad, slack_ulps=2)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    suite.check_numerics(ours, theirs, [transposed, None, residual], None, slack_ulps=2)
    suite.check_numerics(ours, theirs, [x, None, None], None, slack_ulps=2)


@pytest.mark.executed(smoke=False)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_interpreted_with_dtypes_of_their_own(p):
    """A residual stream in fp32 between layers in bf16, and the other way round."""
    wide, narrow = torch.float32, torch.bfloat16
    for dtypes in ((narrow, wide, wide), (narrow, narrow, wide), (wide, narrow, narrow), (narrow, wide, narrow)):
        x, bias, residual = (randn(*s, dtype=t, seed=i) for i, (s, t) in enumerate(zip(SHAPES, dtypes, strict=True)))
        suite.check_numerics(
            *both(p, SEED if p else None, 2), [x, bias, residual], randn(5, 264, dtype=wide).detach(), slack_ulps=2
        )


@pytest.mark.executed(smoke=False)
@pytest.mark.parametrize(("shape", "index_offset"), [((4, 3, 72), 0), ((4, 2, 2, 9), 3), ((4, 520), 3)])
def test_interpreted_with_rows_from_anywhere(shape, index_offset):
    """Positions whose indices pass 2^34, where counters pass 32 bits."""
    positions = torch.tensor([2, 0, 2**34 // 72, 7])
    x, bias, residual = (randn(*s, dtype=torch.float32, seed=i) for i, s in enumerate([shape, shape[-1:], shape]))
    ours, theirs = both(0.3, SEED, index_offset, positions)
    suite.check_numerics(ours, theirs, [x, bias, residual], slack_ulps=2)
    suite.check_numerics(ours, theirs, [x, None, residual], slack_ulps=2)


SHAPES = [(5, 264), (264,), (5, 264)]


@pytest.mark.executed
def test_interpreted_when_programs_take_several_blocks_of_rows():
    x, bias, residual = (randn(*s, dtype=torch.float32, seed=i) for i, s in enumerate([(520, 4), (4,), (520, 4)]))
    grad = randn(520, 4, dtype=torch.float32, seed=3)
    suite.check_numerics(*both(0.3, SEED, 2), [x, bias, residual], grad, slack_ulps=2)


@pytest.mark.executed
def test_interpreted_without_elements():
    x, bias, residual = (randn(*s, dtype=torch.float32) for s in [(0, 4), (4,), (0, 4)])
    suite.check_numerics(*both(0.3, SEED, 0), [x, bias, residual])
