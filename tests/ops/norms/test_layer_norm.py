"""What layer_norm has beyond rms_norm: a mean and a bias. What they have in common is in test_norms.py."""

import pytest
import torch

from parallel_ops import layer_norm
from parallel_ops.ops import layer_norm_reference
from support.numerics import suite
from support.numerics.norms import stream, with_residual
from support.numerics.suite import DEVICES, randn, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)


def test_a_mean_far_from_zero_does_not_cancel(device):
    """E[x^2] - E[x]^2 in fp32 would have no digit of the variance left."""
    x = stream(64, 1000, dtype=torch.float32, device=device, mean=1e4)
    w, b = (randn(1000, dtype=torch.float32, device=device, seed=i) for i in (1, 2))
    g = randn(64, 1000, dtype=torch.float32, device=device, seed=3).detach()
    suite.check_numerics(layer_norm, layer_norm_reference, [x, w, b], [g], slack_ulps=0.5)


def test_one_column_is_normalised_to_the_bias(device):
    x = stream(7, 1, dtype=torch.float32, device=device)
    w, b = (randn(1, dtype=torch.float32, device=device, seed=i) for i in (2, 3))
    y, dx, dw, db = suite.forward_backward(with_residual(layer_norm), [x, None, w, b])
    assert torch.equal(y, b.detach().expand(7, 1))
    assert not dw.any() and db.item() == 7
    # g rstd less its mean is one multiply-add on a GPU, which does not round g rstd, and rstd is 316 at most.
    assert dx.abs().max() <= (0 if device == "cpu" else 316 * torch.finfo(torch.float32).eps)


def test_a_bias_of_another_dtype_is_named(device):
    x, w = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    refuses(layer_norm, TypeError, "bias is torch.bfloat16, but weight is torch.float32", x, w, w.bfloat16())


def test_a_bias_without_a_weight(device):
    x, b = stream(6, 8, dtype=torch.float32, device=device), randn(8, dtype=torch.float32, device=device, seed=1)
    g = randn(6, 8, dtype=torch.float32, device=device, seed=2).detach()
    suite.check_numerics(
        lambda x, b: layer_norm(x, None, b), lambda x, b: layer_norm_reference(x, None, b), [x, b], [g]
    )


def test_fp64_is_computed_in_fp64(device):
    """Its eps too: 1e-5 in fp32 is off by 3e-13."""
    x, w = (randn(*s, dtype=torch.float64, device=device) for s in ((4, 50), (50,)))
    torch.testing.assert_close(layer_norm(x, w), layer_norm_reference(x, w), rtol=1e-14, atol=1e-15)
