import pytest
import torch

from parallel_ops import rotary_embedding
from parallel_ops.ops import rotary_embedding_reference
from ptx import aot
from ptx.execution import rerun
from ptx.kernels import check_compiled, meta, poisoned
from support.numerics import suite
from support.numerics.suite import DTYPES, angles, randn


def launches(dtype, dims, rotated):
    from parallel_ops.triton_kernels import rotary_embedding as kernels

    # q and k as views of a fused qkv, so that heads and tokens lie apart; k has fewer heads.
    q, k = (meta(512, 2, heads, 3 * dims, dtype=dtype)[..., :dims] for heads in (32, 8))
    cos, y = meta(8192, rotated // 2, dtype=torch.float32), meta(512, 2, 32, dims, dtype=dtype)
    positions, cu_seqlens = meta(512, 2, dtype=torch.int64), meta(9, dtype=torch.int32)
    with aot.recorded() as recorded:
        for p, interleaved, inverse in ((None, False, False), (positions, False, True), (positions, True, False)):
            kernels.rotate(q, None, cos, cos, p, None, y, None, interleaved=interleaved, inverse=inverse)
        kernels.rotate(q, k, cos, cos, None, None, q, k, interleaved=False, inverse=False)
        packed = (q[:, 0], k[:, 0], cos, cos, None, cu_seqlens)
        kernels.rotate(*packed, y[:, 0], y[:, 0, :8], interleaved=False, inverse=False)
    return recorded


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
    # Each warp has some of the heads, to all of which a token's angles belong.
    check_compiled(launches(dtype, dims, rotated), rotated, capability, tables=("cos", "sin"))


@pytest.mark.aot
def test_strides_that_take_64_bits():
    from parallel_ops.triton_kernels import rotary_embedding as kernels

    # Storages of 4 GiB, of which nothing but what is touched exists.
    q, k = (torch.empty_strided((5, 1, 2, 16), (2**29, 0, 16, 1), dtype=torch.bfloat16, device="meta") for _ in "qk")
    cos, y = meta(5, 8, dtype=torch.float32), meta(5, 1, 2, 16, dtype=torch.bfloat16)
    with aot.recorded() as recorded:
        kernels.rotate(q, k, cos, cos, None, None, y, y, interleaved=False, inverse=False)
    rerun(recorded[0], 90, programs=5)  # which raises where an address is not the tensor's


@pytest.mark.executed
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("shape", "half", "dtype"),
    [
        *(((3, 2, 5, 32), 16, dtype) for dtype in DTYPES),
        *((shape, half, torch.float32) for shape, half in [((4, 3, 10), 3), ((2, 1, 33, 128), 40), ((0, 2, 8), 4)]),
    ],
    ids=str,
)
def test_interpreted(shape, half, dtype, interleaved):
    x, grad = (randn(*shape, dtype=dtype, seed=i) for i in (0, 1))
    cos_sin = angles(50, half)
    op, reference = (
        lambda x, cos, sin, p, f=f: f(x, cos, sin, positions=p, interleaved=interleaved)
        for f in (rotary_embedding, rotary_embedding_reference)
    )
    generator = torch.Generator().manual_seed(0)
    for positions in (None, *(torch.randint(0, 50, s, generator=generator) for s in {shape[:1], shape[:-2]})):
        args = [x, *cos_sin, positions]
        suite.check_numerics(op, reference, args, grad.detach(), slack_ulps=1)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    suite.check_numerics(op, reference, [transposed, *cos_sin, None], None, slack_ulps=1)


@pytest.mark.executed(smoke=False)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_q_and_k_in_one_launch(dtype, interleaved):
    """In place too, with k of fewer heads, as views of a fused qkv, heads first, with angles or sequences by token."""
    from parallel_ops.triton_kernels import rotary_embedding as kernels

    qkv = randn(5, 2, 7, 20, dtype=dtype).detach()
    q, k = qkv[:, :, :5], qkv[:, :, 5:]
    cos, sin = angles(9, 8)
    tables = {
        "by position": (cos, sin, torch.tensor([[8, 0], [1, 1], [2, 5], [3, 3], [4, 0]]), None),
        "by token": (torch.stack([cos[:5], cos[4:]], 1), torch.stack([sin[:5], sin[4:]], 1), None, None),
    }
    for name, (c, s, positions, _) in tables.items():
        expected = [
            rotary_embedding_reference(x.double(), c, s, positions=positions, interleaved=interleaved) for x in (q, k)
        ]
        y = [poisoned((2, x.shape[2], 5, 20), dtype).permute(2, 0, 1, 3) for x in (q, k)]
        kernels.rotate(q, k, c, s, positions, None, *y, interleaved=interleaved, inverse=False)
        mine = qkv.clone()
        over = mine[:, :, :5], mine[:, :, 5:]
        kernels.rotate(*over, c, s, positions, None, *over, interleaved=interleaved, inverse=False)
        for a, b, true in zip(y, over, expected, strict=True):
            assert torch.equal(a, b), name
            torch.testing.assert_close(a.double(), true, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    packed, cu_seqlens = q[:, 0], torch.tensor([0, 1, 1, 4, 5], dtype=torch.int32)
    y = poisoned(packed.shape, packed)
    kernels.rotate(packed, None, cos, sin, None, cu_seqlens, y, None, interleaved=interleaved, inverse=False)
    restarted = poisoned(packed.shape, packed)
    kernels.rotate(
        packed, None, cos, sin, torch.tensor([0, 0, 1, 2, 0]), None, restarted, None, interleaved=interleaved,
        inverse=False,
    )  # fmt: skip
    assert torch.equal(y, restarted)


@pytest.mark.executed
def test_positions_out_of_range_give_nan_and_read_nothing():
    x, cos_sin = randn(3, 2, 8, dtype=torch.float32).detach(), angles(5, 4)
    y, _ = torch.ops.parallel_ops.rotary_embedding(x, None, *cos_sin, torch.tensor([1, 5, -1]), None, False, False)
    assert y[0].isfinite().all() and y[1:].isnan().all()


@pytest.mark.executed(smoke=False)
def test_any_layout_gives_the_same_bits():
    """In fp32, where the compiler's choice of the product that is not rounded would show."""
    x, cos_sin = randn(4, 3, 2, 40, dtype=torch.float32), angles(4, 16)
    for interleaved in (False, True):
        suite.check_layouts(lambda *args, i=interleaved: rotary_embedding(*args, interleaved=i), [x, *cos_sin])
