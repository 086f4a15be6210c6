import pytest
import torch

from parallel_ops.ops import rotary_embedding_reference
from support import aot, suite
from support.kernels import check_compiled, differentiable, meta, poisoned
from support.rotary import angles
from support.suite import DTYPES, randn


def launches(dtype, dims, rotated):
    from parallel_ops.triton_kernels import rotary_embedding as kernels

    # q as a view of a fused qkv, so that heads and tokens lie apart.
    q = meta(4096, 2, 32, 3 * dims, dtype=dtype)[..., :dims]
    cos, y = meta(8192, rotated // 2, dtype=torch.float32), meta(4096, 2, 32, dims, dtype=dtype)
    positions = meta(4096, 2, dtype=torch.int64)
    with aot.recorded() as recorded:
        for p, interleaved, inverse in ((None, False, False), (positions, False, True), (positions, True, False)):
            kernels.rotate(q, cos, cos, p, y, interleaved=interleaved, inverse=inverse)
    return recorded


PER_TOKEN = ("positions", "cos", "sin")  # shared by all heads of a token


@pytest.mark.aot
@pytest.mark.parametrize(
    ("dtype", "dims", "rotated", "capability"),
    [
        (torch.bfloat16, 128, 128, 80),
        (torch.bfloat16, 128, 128, 90),
        (torch.float32, 128, 128, 90),
        (torch.float16, 64, 32, 100),
        (torch.bfloat16, 256, 64, 90),
        (torch.bfloat16, 80, 20, 90),
    ],
    ids=str,
)
def test_compiled_code(dtype, dims, rotated, capability):
    # Angles, which all heads share, come in narrower pieces where pairs are interleaved.
    check_compiled(launches(dtype, dims, rotated), rotated, capability, per_row=PER_TOKEN)


def interpreted(interleaved):
    from parallel_ops.triton_kernels import rotary_embedding as kernels

    def forward(x, cos, sin, positions):
        y = poisoned(x.shape, x)
        kernels.rotate(x, cos, sin, positions, y, interleaved=interleaved, inverse=False)
        return y

    def backward(grad, x, cos, sin, positions):
        dx = poisoned(x.shape, x)
        kernels.rotate(grad, cos, sin, positions, dx, interleaved=interleaved, inverse=True)
        return dx, None, None, None

    return differentiable(forward, backward)


@pytest.mark.interpret
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "half"), [((3, 2, 5, 32), 16), ((4, 3, 10), 3), ((2, 1, 33, 128), 40), ((0, 2, 8), 4)]
)
def test_interpreted(shape, half, dtype, interleaved):
    x, grad = (randn(*shape, dtype=dtype, seed=i) for i in (0, 1))
    cos_sin = angles(50, half)

    def reference(x, cos, sin, positions):
        return rotary_embedding_reference(x, cos, sin, positions=positions, interleaved=interleaved)

    generator = torch.Generator().manual_seed(0)
    for positions in (None, *(torch.randint(0, 50, s, generator=generator) for s in {shape[:1], shape[:-2]})):
        args = [x, *cos_sin, positions]
        suite.check_numerics(interpreted(interleaved), reference, args, grad.detach(), slack_ulps=1)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    suite.check_numerics(interpreted(interleaved), reference, [transposed, *cos_sin, None], None, slack_ulps=1)


@pytest.mark.interpret
def test_positions_out_of_range_give_nan_and_read_nothing():
    x, cos_sin = randn(3, 2, 8, dtype=torch.float32).detach(), angles(5, 4)
    y = interpreted(False)(x, *cos_sin, torch.tensor([1, 5, -1]))
    assert y[0].isfinite().all() and y[1:].isnan().all()
