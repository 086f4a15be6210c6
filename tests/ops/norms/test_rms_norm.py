"""What is rms_norm's own. What it has in common with layer_norm is in test_norms.py."""

import functools

import pytest
import torch

from parallel_ops import rms_norm
from support.numerics.suite import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)


def test_the_mean_is_kept(device):
    """rms_norm scales a row and never shifts it."""
    x = torch.randn(6, 40, device=device) + 5
    y = rms_norm(x, torch.ones(40, device=device))
    torch.testing.assert_close(y / y[:, :1], x / x[:, :1])
    torch.testing.assert_close(y.square().mean(-1), torch.ones(6, device=device))


def test_direct_calls_of_the_backward_cannot_read_out_of_bounds(device):
    x, w = torch.randn(4, 8), torch.randn(8)
    backward = functools.partial(torch.ops.parallel_ops.rms_norm_backward.default, zero_centered=False)
    with pytest.raises(RuntimeError, match="rms_norm_backward: rstd must be what the forward returned"):
        backward(x, None, x, w, w[:3])
    with pytest.raises(RuntimeError, match="rms_norm_backward: grad must have the shape"):
        backward(x[:2], None, x, w, w[:4])
