"""Type checkers follow an op to its implementation: mypy checks this file, and pytest does not run it."""

from torch import Tensor
from typing_extensions import assert_type

from parallel_ops.ops.activations.bias_gelu import _forward, bias_gelu
from parallel_ops.ops.attention.flash_attention import _forward as _attention
from parallel_ops.ops.norms.rms_norm import _forward as _norm


def results(x: Tensor) -> None:
    assert_type(bias_gelu(x), Tensor)
    assert_type(_forward(x, None, True), Tensor)
    assert_type(_forward.dispatched(x, None, True), Tensor)
    assert_type(_norm.checked(lambda: None, x, None, None, 1e-6, False), tuple[Tensor, Tensor, Tensor])
    assert_type(
        _attention(x, x, x, None, None, None, True, 1.0, None, 0.0, 0.0, 0),
        tuple[Tensor, Tensor],
    )


def mistakes(x: Tensor) -> None:
    """Each is an error; mypy reports an ignore that is not needed."""
    _forward(x, None)  # type: ignore[call-arg]
    _forward(x, None, x)  # type: ignore[arg-type]
    _norm.checked(lambda: None, x, None, None, "eps", False)  # type: ignore[arg-type]
