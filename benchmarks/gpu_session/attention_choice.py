"""``python -m benchmarks.gpu_session.attention_choice``: the kernels that attention takes on this GPU; their errors.

For each call it prints the backend that ``backend="auto"`` chose, and for every backend that takes the call the largest
error of the output and of each gradient against fp64, relative to the largest element. Exits with 1 if one is more than
three times that of plain PyTorch in bfloat16, or if a backend raised.
"""

import logging
import sys
from collections.abc import Callable
from logging.handlers import BufferingHandler
from typing import Any

import torch
from torch import Tensor

from parallel_ops import flash_attention
from parallel_ops.ops import flash_attention_reference

# heads, key heads, tokens, dims, options
CALLS: tuple[tuple[int, int, int, int, dict[str, Any]], ...] = (
    (8, 1, 1024, 128, {}),
    (8, 2, 640, 64, {"causal": False}),
    (4, 4, 777, 128, {}),
    (4, 2, 512, 256, {}),
    (8, 1, 1024, 128, {"window_size": (199, 0)}),
    (8, 1, 1024, 128, {"cu_seqlens": (0, 100, 100, 700, 1024)}),
    (4, 2, 512, 128, {"sink": True}),
)
BACKENDS = ("auto", "triton", "cudnn", "flash", "fa4")


def results(function: Callable[..., Tensor], tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients of q, k, v and the sink."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    q, k, v, *sink = leaves
    out = function(q, k, v, **options, **({"sink": sink[0]} if sink else {}))
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, generator=generator).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def errors(found: list[Tensor], true: list[Tensor]) -> list[float]:
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, true, strict=True)]


def main(device: str = "cuda") -> int:
    """Runs all calls; the exit status."""
    chosen, logger, failed = BufferingHandler(sys.maxsize), logging.getLogger("parallel_ops.attention"), 0
    logger.addHandler(chosen)
    logger.setLevel(logging.DEBUG)
    for heads, kv_heads, tokens, dims, given in CALLS:
        options = dict(given)
        generator = torch.Generator().manual_seed(tokens)
        shapes: list[tuple[int, ...]] = [(tokens, 1, heads, dims), *[(tokens, 1, kv_heads, dims)] * 2]
        shapes += [(heads,)] if options.pop("sink", False) else []
        tensors = [torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes]
        if "cu_seqlens" in options:
            options["cu_seqlens"] = torch.tensor(options["cu_seqlens"], dtype=torch.int32, device=device)
        true = results(flash_attention_reference, [t.double() for t in tensors], options)
        bound = [3 * e + 1e-3 for e in errors(results(flash_attention_reference, tensors, options), true)]
        print(f"{heads} heads, {kv_heads} kv heads, {tokens} tokens, {dims} dims, {given}")
        for backend in BACKENDS:
            chosen.flush()
            try:
                found = errors(results(flash_attention, tensors, {**options, "backend": backend}), true)
            except ValueError as refused:  # before any kernel: the backend does not take such calls
                print(f"  {backend:7} {refused}")
                continue
            except RuntimeError as raised:
                failed += 1
                print(f"  {backend:7} RAISED {raised}")
                continue
            wrong = any(e > most for e, most in zip(found, bound, strict=True))
            failed += wrong
            taken = [str(record.args[1]) for record in chosen.buffer if isinstance(record.args, tuple)]
            names = ", ".join(dict.fromkeys(taken)) or "this package's"
            print(f"  {backend:7} took {names}: {'WRONG ' if wrong else ''}" + " ".join(f"{e:.1e}" for e in found))
    print("all right" if not failed else f"{failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
