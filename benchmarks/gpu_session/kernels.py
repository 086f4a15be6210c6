"""Kernels on one GPU against fp64, a captured step and repeated launches; functions as in ``ranks``."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_session import attention_choice, capture
from benchmarks.gpu_session.ranks import check, device_of
from parallel_ops import float8_grouped_linear, grouped_linear, rms_norm
from parallel_ops._internal.gradients.weight_gradients import add_product
from parallel_ops.ops import rms_norm_reference
from parallel_ops.ops.float8_linear import float8_linear
from parallel_ops.ops.float8_recipes import RECIPES, device_problem

# Half a unit in the last place of bfloat16, and of the two kinds of float8: output gradients are rounded to e5m2.
_BF16, _E4M3, _E5M2 = 2.0**-9, 2.0**-4, 2.0**-3


def _drawn(*shape: int, seed: int, kind: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device_of(kind), dtype)


def attention(rank: int, size: int, kind: str, store: str) -> None:
    """Every backend that takes a call, forward and backward."""
    if attention_choice.main(kind):
        raise ValueError("a backend is wrong; its errors are in the log")


def float8(rank: int, size: int, kind: str, store: str) -> None:
    """A linear's output and gradients, scaled by row, within the rounding of their factors."""
    _float8(kind, "fp8_rowwise")


def blocks(rank: int, size: int, kind: str, store: str) -> None:
    """The same, scaled by blocks: of those recipes that the GPU has."""
    found = [name for name in ("fp8_blockwise", "mxfp8") if kind == "cpu" or not device_problem(device_of(kind), name)]
    if not found:
        raise ValueError("this GPU has no products with scales of blocks")
    for name in found:
        _float8(kind, name)


def float8_experts(rank: int, size: int, kind: str, store: str) -> None:
    """Grouped matmuls in float8, of every recipe that the GPU has, with experts that have no rows."""
    offs = torch.tensor([0, 128, 128, 384], device=device_of(kind))
    x, weight = (_drawn(*s, seed=i, kind=kind).requires_grad_() for i, s in enumerate(((512, 256), (4, 128, 256))))
    grad = _drawn(512, 128, seed=2, kind=kind)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    true = grouped_linear(wide[0], wide[1], offs)
    expected = [true.detach(), *torch.autograd.grad(true, wide, grad.double())]
    found = [name for name in RECIPES if kind == "cpu" or not device_problem(device_of(kind), name)]
    if not found:
        raise ValueError("this GPU has no float8 products")
    for recipe in found:
        y = float8_grouped_linear(x, weight, offs, recipe=recipe, emulated=kind == "cpu")  # type: ignore[arg-type]
        results = [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]
        for name, got, wanted in zip(("y", "the gradient of x", "that of weight"), results, expected, strict=True):
            check(f"{recipe}, {name}", got, wanted, _E4M3)
        if results[2][[0, 2]].count_nonzero():
            raise ValueError(f"{recipe}: experts without rows have a gradient")


def _float8(kind: str, recipe: Any) -> None:
    x, weight = (_drawn(*s, seed=i, kind=kind).requires_grad_() for i, s in enumerate(((512, 1024), (768, 1024))))
    grad = _drawn(512, 768, seed=2, kind=kind)
    y = float8_linear(x, [weight], [None], recipe=recipe, emulated=kind == "cpu")[0]
    y.backward(grad)
    assert x.grad is not None and weight.grad is not None
    wide_x, wide_weight, wide_grad = (t.detach().double() for t in (x, weight, grad))
    check("y", y.detach(), wide_x @ wide_weight.t(), _E4M3)
    check("the gradient of x", x.grad, wide_grad @ wide_weight, _E5M2)
    check("the gradient of weight", weight.grad, wide_grad.t() @ wide_x, _E5M2)


def experts(rank: int, size: int, kind: str, store: str) -> None:
    """Grouped matmuls with experts that have no rows, whose gradients are zero, in memory that held NaN."""
    offs = torch.tensor([0, 96, 96, 100, 256, 256], dtype=torch.int64, device=device_of(kind))
    x, weight = _drawn(256, 64, seed=0, kind=kind), _drawn(6, 128, 64, seed=1, kind=kind)
    # Freed memory is what the results are allocated from.
    poison = [torch.full((6, 128, 64), torch.nan, device=x.device, dtype=x.dtype) for _ in range(8)]
    del poison
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        rows, matrices = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
        y = grouped_linear(rows, matrices, offs)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), (rows, matrices))])
    for name, found, true in zip(("y", "the gradient of x", "the gradient of weight"), *results, strict=True):
        check(name, found, true, 4 * _BF16)
    if results[0][2][[0, 2, 5]].count_nonzero():
        raise ValueError("experts without rows have a gradient")


def weight_gradients(rank: int, size: int, kind: str, store: str) -> None:
    """bfloat16 factors added to an fp32 main gradient without rounding the matmul."""
    dz, h = _drawn(512, 96, seed=0, kind=kind), _drawn(512, 160, seed=1, kind=kind)
    total = _drawn(96, 160, seed=2, kind=kind, dtype=torch.float32)
    true = total.double() + dz.double().t() @ h.double()
    add_product(total, dz, h)
    check("the main gradient", total, true, 2.0**-18)


def captured_step(rank: int, size: int, kind: str, store: str) -> None:
    """A training step in a CUDA graph has the losses of eager mode, bit by bit."""
    if kind == "cuda":
        capture.compare_replays()


def captured_training(rank: int, size: int, kind: str, store: str, *, cuda_graph: str) -> None:
    """Steps of the trainer by ``run.cuda_graph`` have the losses of its eager steps."""
    capture.compare({"eager": capture.losses_of_run(kind), cuda_graph: capture.losses_of_run(kind, cuda_graph)})


def offloaded(rank: int, size: int, kind: str, store: str) -> None:
    """Steps with activations in pinned host memory have the losses of steps that keep them."""
    runs = {"kept": capture.losses_of_run(kind)}
    for offload in ("inputs", "all"):
        recompute = {"kind": "full" if offload == "inputs" else "none", "offload": offload}
        runs[offload] = capture.losses_of_run(kind, sections={"recompute": recompute})
    capture.compare(runs)


def repeated_launches(rank: int, size: int, kind: str, store: str) -> None:
    """Launches that are repeated: on other streams, with addresses of other alignment and with other sizes."""
    weight = _drawn(256, seed=0, kind=kind)
    memory = _drawn(64 * 256 + 8, seed=1, kind=kind)
    cuda = kind == "cuda"
    streams = [torch.cuda.Stream(), torch.cuda.current_stream()] if cuda else [None]
    for turn in range(3):
        for stream in streams:
            for offset, rows in ((0, 64), (1, 64), (8, 32), (0, 1)):
                x = memory[offset : offset + rows * 256].view(rows, 256)
                if stream is not None:
                    stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    y = rms_norm(x, weight)
                if stream is not None:
                    torch.cuda.current_stream().wait_stream(stream)
                true = rms_norm_reference(x.double(), weight.double())
                assert isinstance(y, Tensor) and isinstance(true, Tensor)  # without a residual
                check(f"turn {turn}, {rows} rows at {offset}", y, true, 2 * _BF16)


def tests(rank: int, size: int, kind: str, store: str, folder: str) -> None:
    """The tests of a folder on the GPU, in several processes, since most of their time compiles kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", folder]
    command += ["-n", os.environ.get("PROCESSES", "14"), "-k", kind] if kind == "cuda" else ["--collect-only"]
    ran = subprocess.run(command, check=False, cwd=Path(__file__).resolve().parents[2])
    if ran.returncode:
        raise ValueError(f"pytest exited with {ran.returncode}; the log has its failures")


PROOFS: dict[str, Callable[[int, int, str, str], None]] = {
    "attention backends": attention,
    "float8 linear": float8,
    "block-scaled linear": blocks,
    "float8 experts": float8_experts,
    "grouped products": experts,
    "fp32 weight gradients": weight_gradients,
    "captured step": captured_step,
    "captured training step": functools.partial(captured_training, cuda_graph="step"),
    "captured layers": functools.partial(captured_training, cuda_graph="layers"),
    "offloaded activations": offloaded,
    "repeated launches": repeated_launches,
}
