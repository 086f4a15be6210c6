"""How fp32 matmuls of the attention kernels are made, by torch's settings, former and new."""

import pytest
import torch

pytest.importorskip("triton")

from parallel_ops.triton_kernels.attention.flash_attention import _precision


@pytest.fixture
def settings():
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("name", "values"), [("allow_tf32", (True, False)), ("fp32_precision", ("tf32", "ieee"))])
def test_fp32_follows_either_setting_of_torch(name, values, settings):
    q = torch.empty(1)
    for value, precision in zip(values, ("tf32", "tf32x3"), strict=True):
        setattr(settings, name, value)
        assert (_precision(q), _precision(q.bfloat16())) == (precision, "tf32")


def test_fp32_is_exact_by_default():
    assert _precision(torch.empty(1)) == "tf32x3"
