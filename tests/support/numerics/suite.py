"""The promises that every op makes, as checks of a function and its inputs.

``op`` and ``reference`` take the same arguments. Arguments that are floating-point tensors with ``requires_grad``
are differentiated; everything else is passed through.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place, relative: 3 and 2 bits of mantissa.
FLOAT8_ROUNDING = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}

Op = Callable[..., Tensor | tuple[Tensor, ...]]
# The incoming gradient: one for each output, or one that serves all; None is ones expanded to the outputs.
Grad = Tensor | Sequence[Tensor] | None


def outputs_of(y: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return list(y) if isinstance(y, tuple) else [y]


def _grads_for(outputs: list[Tensor], grad: Grad) -> list[Tensor]:
    if grad is None:
        return [torch.ones((), dtype=y.dtype, device=y.device).expand(y.shape) for y in outputs]
    grads = [grad] * len(outputs) if isinstance(grad, Tensor) else grad
    return [g.to(y.dtype) for g, y in zip(grads, outputs, strict=True)]


def forward_backward(op: Op, args: Sequence[Any], grad: Grad = None) -> list[Tensor]:
    """The outputs and the gradients of ``args`` that require one."""
    args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    outputs = outputs_of(op(*args))
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    if leaves:
        torch.autograd.backward(outputs, _grads_for(outputs, grad))
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves)]


def as_double(args: Sequence[Any]) -> list[Any]:
    return [
        a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    ]


def error(got: Tensor, oracle: Tensor) -> float:
    """The largest absolute error; NaN and infinities must be in the same places."""
    got, oracle = got.double(), oracle.double()
    # A finite oracle value may be past the largest number of the dtype.
    same = (got == oracle) | (got.isnan() & oracle.isnan()) | (got.isinf() & (oracle.abs() > 6.5e4))
    return torch.where(same, 0.0, (got - oracle).abs()).nan_to_num(nan=torch.inf).max().item() if got.numel() else 0.0


def check_numerics(op: Op, reference: Op, args: Sequence[Any], grad: Grad = None, *, slack_ulps: float = 0.5) -> None:
    """Against the fp64 oracle, the error is at most twice PyTorch's own at the same dtype.

    ``slack_ulps`` is added, in units of the last place of the largest value: half a unit is the one rounding that no
    implementation can avoid; tiny tensors, where PyTorch may happen to be exact, take a little more.
    """
    ours = forward_backward(op, args, grad)
    if any(y.is_cuda for y in ours):  # the first call's launches are Triton's, later ones are not
        torch.testing.assert_close(forward_backward(op, args, grad), ours, rtol=0, atol=0, equal_nan=True)
    theirs = forward_backward(reference, args, grad)
    oracle = forward_backward(reference, as_double(args), grad)
    for index, (got, peer, true) in enumerate(zip(ours, theirs, oracle, strict=True)):
        name = f"result {index} (outputs come first, then gradients)"
        assert got.shape == true.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(true.shape)}"
        assert got.dtype == peer.dtype, f"{name}: {got.dtype}, PyTorch gives {peer.dtype}"
        finite = true[true.isfinite()]
        scale = finite.abs().max().item() if finite.numel() else 0.0
        slack = slack_ulps * torch.finfo(got.dtype).eps * scale + torch.finfo(got.dtype).smallest_normal
        ours_error, bound = error(got, true), 2 * error(peer, true) + slack
        assert ours_error <= bound, (
            f"{name}: error {ours_error:.3e}, PyTorch's is {error(peer, true):.3e} (bound {bound:.3e})"
        )


def check_op(op: Any, args: Sequence[Any]) -> None:
    """torch's own checks of a custom op: schema, autograd registration, fake, AOTAutograd with dynamic shapes."""
    torch.library.opcheck(op, tuple(args))


def check_gradient(op: Op, args: Sequence[Any]) -> None:
    """The analytic gradient against finite differences, in fp64."""
    assert torch.autograd.gradcheck(op, tuple(as_double(args)), fast_mode=False)


def check_second_derivative_raises(op: Op, args: Sequence[Any]) -> None:
    args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    y = outputs_of(op(*args))[0]
    leaf = next(a for a in args if isinstance(a, Tensor) and a.requires_grad)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)


def check_deterministic(op: Op, args: Sequence[Any], grad: Grad = None) -> None:
    """The same bits again, and at every thread count."""
    first = forward_backward(op, args, grad)
    threads = torch.get_num_threads()
    try:
        for count in (threads, 1, 2, 3):
            torch.set_num_threads(count)
            for a, b in zip(first, forward_backward(op, args, grad), strict=True):
                assert torch.equal(a, b), f"differs at {count} threads"
    finally:
        torch.set_num_threads(threads)


def check_compiles(op: Op, cases: Sequence[Sequence[Any]], *, backend: str = "aot_eager") -> None:
    """One graph, no break, serves every case (which differ in sizes), forward and backward, with eager's result."""
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend=backend)
    for args in cases:
        for a, b in zip(forward_backward(op, args), forward_backward(compiled, args), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def check_checkpointing(op: Op, args: Sequence[Any]) -> None:
    """Recomputed under activation checkpointing, the gradients are the same bits."""
    for reentrant in (False, True):
        checkpointed = lambda *a: checkpoint(op, *a, use_reentrant=reentrant)  # noqa: B023, E731
        torch.manual_seed(0)
        plain = forward_backward(op, args)
        torch.manual_seed(0)
        for a, b in zip(plain, forward_backward(checkpointed, args), strict=True):
            assert torch.equal(a, b)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """``x`` in every memory layout that callers have: the values are those of ``x``, the strides differ."""
    out = {"contiguous": x.contiguous()}
    if x.dim() >= 2:
        out["transposed"] = x.transpose(0, -1).contiguous().transpose(0, -1)
        out["rows apart"] = torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    out["columns apart"] = torch.stack([x, x], dim=-1)[..., 0]
    out["offset"] = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.numel() else x
    return {name: t.detach().requires_grad_(x.requires_grad) for name, t in out.items()}


def check_layouts(op: Op, args: Sequence[Any], index: int = 0) -> None:
    """Argument ``index`` and the incoming gradient in every layout give the bits that contiguous ones give.

    Where there are several outputs they have one shape, and the gradient serves all.
    """
    grad = torch.randn(outputs_of(op(*args))[0].shape, generator=torch.Generator().manual_seed(1)).to(args[index])
    expected = forward_backward(op, args, grad)
    for name, tensor in layouts(args[index]).items():
        varied = [*args[:index], tensor, *args[index + 1 :]]
        for grad_name, g in layouts(grad).items():
            for a, b in zip(expected, forward_backward(op, varied, g), strict=True):
                assert torch.equal(a, b), f"argument {name}, gradient {grad_name}"
    ones = forward_backward(op, args, torch.ones_like(grad))
    for a, b in zip(ones, forward_backward(op, args), strict=True):  # the gradient of .sum(): stride 0
        assert torch.equal(a, b), "expanded gradient"


def shapes(max_cols: int = 2100) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of one to four dimensions, up to a few thousand elements, columns across the kernels' block sizes."""
    cols = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 1023, 1024, 1025, 2049, max_cols]))
    return st.tuples(st.lists(st.integers(1, 5), max_size=3), cols).map(lambda s: (*s[0], s[1]))


def randn(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal values that require a gradient, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(device, dtype).requires_grad_()


def angles(positions: int, half: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """cos and sin of rotary embeddings as models have them: base 10,000, computed in fp64."""
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / max(1, half))
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return [t.to(device, dtype) for t in (angle.cos(), angle.sin())]


def rows_far_apart(*shape: int, seed: int = 0) -> Tensor:
    """Rows of sizes that lie far apart, with the outliers that activations have."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[0])[:, None]
    t[:, 0] *= 20
    return t.bfloat16()


def check_compiles_under_autocast(op: Op, args: Sequence[Any]) -> None:
    """Inside a compiled autocast region the op gives what it gives in an eager one."""

    def run(*inputs: Any) -> Tensor:
        device = next(a for a in inputs if isinstance(a, Tensor)).device.type
        with torch.autocast(device, dtype=torch.bfloat16):
            return op(*inputs)

    check_compiles(run, [args])


def refused(error: type[Exception], match: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """``call`` raises ``error`` with a message that matches."""
    with pytest.raises(error, match=match):
        call(*args, **kwargs)


def refuses(op: Callable[..., Any], error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
    """``op``, or a partial of it, raises ``error`` with a message that names it and matches."""
    name = getattr(op, "func", op).__name__.partition(".")[0]
    refused(error, f"{name}: .*{message}", op, *args, **kwargs)


class RecordedOps(TorchDispatchMode):
    """The calls of the package's ops in a block, each with its arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "parallel_ops":
            names = (argument.name for argument in func._schema.arguments)
            self.calls.append((func, {**dict(zip(names, args, strict=False)), **(kwargs or {})}))
        return func(*args, **(kwargs or {}))
