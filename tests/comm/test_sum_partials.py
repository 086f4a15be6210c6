import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops.comm.sum_partials import sum_partials, sum_partials_reference
from support.numerics import suite
from support.numerics.suite import DEVICES, DTYPES, randn

pytestmark = pytest.mark.parametrize("device", DEVICES)
raw_op = torch.ops.parallel_ops.sum_partials.default


def arguments(count, shape, dtype, device, *, bias=True, residual=True, seed=0):
    partials = randn(count, *shape, dtype=dtype, device=device, seed=seed).detach()
    return [
        partials,
        randn(shape[-1], dtype=dtype, device=device, seed=seed + 1).detach() if bias else None,
        randn(*shape, dtype=dtype, device=device, seed=seed + 2).detach() if residual else None,
    ]


@given(
    count=st.integers(1, 20),
    shape=suite.shapes(),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    bias=st.booleans(),
    residual=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_bits_of_a_sum_of_one_tensor_after_the_other(device, count, shape, dtype, bias, residual, seed):
    args = arguments(count, shape, dtype, device, bias=bias, residual=residual, seed=seed)
    assert torch.equal(sum_partials(*args), sum_partials_reference(*args))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numerics_of_a_large_tensor(device, dtype):
    suite.check_numerics(sum_partials, sum_partials_reference, arguments(8, (1024, 384), dtype, device))


def test_16_bit_partials_are_rounded_once(device):
    parts = torch.tensor([[256.0, 1.0], *[[1.0, 2.0**-9]] * 4], device=device).bfloat16()
    assert sum_partials(parts).tolist() == [260.0, 1.0078125]  # in bfloat16 256 + 1 is 256, and 1 + 2^-9 is 1
    bias = torch.tensor([0.5, 0.0], device=device).bfloat16()
    assert sum_partials(parts[1:2], bias).tolist() == [1.5, 2.0**-9]
    assert parts[0].tolist() == [256.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_in_a_dtype_of_its_own(device, dtype):
    partials, _, residual = arguments(3, (5, 1030), dtype, device)
    for bias in (randn(1030, dtype=other, device=device).detach() for other in (torch.float32, torch.bfloat16)):
        args = partials, bias, residual
        assert torch.equal(sum_partials(*args), sum_partials_reference(*args))


def test_integers_are_added_as_they_are(device):
    for dtype in (torch.int32, torch.int64):
        partials = torch.tensor([[2**30, -1], [2**30, 3], [-(2**30), 5]], dtype=dtype, device=device)
        assert torch.equal(sum_partials(partials), torch.tensor([2**30, 7], dtype=dtype, device=device))


def test_special_values_and_signed_zeros(device):
    partials = torch.tensor([[-0.0, torch.inf, torch.nan, 1e38], [-0.0, -torch.inf, 1.0, 3e38]], device=device)
    y = sum_partials(partials)
    torch.testing.assert_close(y, torch.tensor([-0.0, torch.nan, torch.nan, torch.inf], device=device), equal_nan=True)
    assert y[0].signbit()


def test_layouts(device):
    partials, bias, residual = arguments(3, (4, 1030), torch.bfloat16, device)
    expected = sum_partials(partials, bias, residual)
    for index, argument in enumerate((partials, bias, residual)):
        for name, layout in suite.layouts(argument).items():
            args = [partials, bias, residual]
            args[index] = layout
            assert torch.equal(sum_partials(*args), expected), name
    for layout in suite.layouts(partials[..., 0, 0]).values():  # of numbers
        assert torch.equal(sum_partials(layout), sum_partials_reference(partials[..., 0, 0]))


@pytest.mark.parametrize("shape", [(), (0, 8), (3, 0), (1, 1), (1, 70000), (70000, 1)])
def test_extreme_shapes(device, shape):
    partials = randn(2, *shape, dtype=torch.float32, device=device).detach()
    assert torch.equal(sum_partials(partials), sum_partials_reference(partials))


def test_custom_op_contract(device):
    partials, bias, residual = arguments(3, (4, 9), torch.float32, device)
    for args in ([partials, bias, residual], [partials, None, None], [partials.transpose(1, 2), None, None]):
        suite.check_op(raw_op, args)
    suite.check_deterministic(sum_partials, arguments(8, (700, 300), torch.bfloat16, device))
    suite.check_compiles(sum_partials, [arguments(2, shape, torch.float32, device) for shape in ((4, 8), (6, 10))])


def test_bad_arguments_are_named(device):
    partials = torch.randn(2, 4, 8, device=device)
    for shape, message in (((), r"partials must have shape \[P, ...\]"), ((0, 4), r"with P > 0, got \[0, 4\]")):
        with pytest.raises(ValueError, match=message):
            sum_partials(torch.zeros(shape, device=device))
    with pytest.raises(ValueError, match=r"bias must have shape \[8\], got \[7\]"):
        sum_partials(partials, torch.zeros(7, device=device))
    with pytest.raises(ValueError, match="bias is on meta"):
        sum_partials(partials, torch.zeros(8, device="meta"))
    with pytest.raises(ValueError, match=r"residual must have shape \[4, 8\], got \[2, 4, 8\]"):
        sum_partials(partials, None, partials)
    with pytest.raises(ValueError, match="residual is on meta"):
        sum_partials(partials, None, partials[0].to("meta"))
    with pytest.raises(TypeError, match=r"residual must be torch.float32 like partials, got torch.float64"):
        sum_partials(partials, None, partials[0].double())
    with pytest.raises(TypeError, match=r"bias and residual are for floating partials, got torch.int64"):
        sum_partials(partials.long(), None, partials[0].long())


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    partials = torch.randn(2, 4, 8)
    for args, message in (
        ((partials[:0], None, None), "partials must have at least one partial"),
        ((partials, torch.randn(7), None), "bias must have one element"),
        ((partials, None, partials[0, :2]), "residual must have the shape"),
        ((partials, None, partials[0].double()), "residual must have the dtype"),
    ):
        with pytest.raises(RuntimeError, match=f"sum_partials: {message}"):
            raw_op(*args)
