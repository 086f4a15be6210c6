"""``python -m benchmarks.gpu_session.correct [--processes 14] [--only NAME ...]``: is every op right on this GPU?

Each op forward and backward in float32 and bfloat16, on shapes as models have them and on ragged ones, against fp64:
the error may be twice that of plain PyTorch in the same dtype (``tests/support/suite.py``), and a second call must give
the same bits. Processes share the cases, since most of the time goes into compiling kernels. The four cases of
``SANITIZED`` run once more under ``compute-sanitizer``, if it is there, which sees accesses out of bounds. Exits with 1
if a case is wrong.
"""

import argparse
import concurrent.futures
import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_ops import ops, vocab_parallel_linear_cross_entropy

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support import suite
from support.experts import random_experts, spread_logits
from support.suite import randn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SANITIZED = ("bias_gelu", "rms_norm", "flash_attention", "permute")


class Check(NamedTuple):
    """``grad``: the incoming gradient for all outputs; ones where it is ``None``."""

    op: Callable[..., Any]
    reference: Callable[..., Any]
    args: list[Any]
    grad: Tensor | None = None
    slack: float = 2.0


class Sizes(NamedTuple):
    rows: int
    cols: int
    tokens: int
    dims: int


SIZES = {"real": Sizes(512, 4096, 512, 128), "ragged": Sizes(37, 1037, 161, 80), "tiny": Sizes(5, 24, 9, 16)}


def _pair(name: str, args: list[Any], n: int, **options: Any) -> Check:
    """The op ``name`` and its reference; ``n``: the number of summands of its longest sum."""
    functions = [partial(getattr(ops, name + of), **options) for of in ("", "_reference")]
    return Check(functions[0], functions[1], args, None, 8.0 if n > 100 else 2.0)


def _attention(s: Sizes, make: Callable[..., Tensor], **options: Any) -> Check:
    q, k, v = make(s.tokens, 2, 4, s.dims), make(s.tokens, 2, 2, s.dims), make(s.tokens, 2, 2, s.dims)
    if "cu_seqlens" in options:
        q, k, v = (t.detach()[:, :1].clone().requires_grad_() for t in (q, k, v))
        options["cu_seqlens"] = torch.tensor([0, 3, 3, s.tokens // 2, s.tokens], dtype=torch.int32, device=q.device)
    sink = [make(4)] if options.pop("sink", False) else []

    def of(function: Callable[..., Tensor], **more: Any) -> Callable[..., Tensor]:
        return lambda q, k, v, sink=None: function(q, k, v, sink=sink, **options, **more)

    backend = {"backend": "triton"} if q.is_cuda else {}
    return Check(of(ops.flash_attention, **backend), of(ops.flash_attention_reference), [q, k, v, *sink], None, 8.0)


def _routing(s: Sizes, dtype: torch.dtype, device: str) -> Check:
    logits = spread_logits(s.rows, 64, dtype=dtype, device=device)

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor) -> tuple[Tensor, ...]:
            found = function(x, 6, score="sigmoid", groups=8, top_groups=4, scale=2.5)
            return found.weights, found.score_sums, found.z_sum

        return run

    return Check(of(ops.route), of(ops.route_reference), [logits], None, 64.0)


def _permuted(s: Sizes, make: Callable[..., Tensor], device: str) -> Check:
    order = ops.sort_by_expert(random_experts(s.rows, 6, 16, device=device), 16)

    def of(there: Callable[..., Tensor], back: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weights: back(there(x, order), order, weights)

    args = [make(s.rows, s.cols), make(s.rows, 6)]
    return Check(of(ops.permute, ops.unpermute), of(ops.permute_reference, ops.unpermute_reference), args, None, 64.0)


def _linear_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((x @ weight.T).to(torch.promote_types(x.dtype, torch.float32)), target)


def checks(s: Sizes, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Check]]:
    """By name; sizes as ``SIZES`` has them."""

    def make(*shape: int) -> Tensor:
        return randn(*shape, dtype=dtype, device=device, seed=sum(shape))

    def target() -> Tensor:
        return torch.randint(s.cols, (s.rows,), generator=torch.Generator().manual_seed(0)).to(device)

    def x() -> Tensor:
        return make(s.rows, s.cols)

    def scores() -> Tensor:
        return make(2, 3, s.tokens, s.tokens)

    def mask() -> Tensor:
        return torch.rand(2, 1, s.tokens, s.tokens, generator=torch.Generator().manual_seed(0)).to(device) < 0.3

    def angles() -> list[Tensor]:
        return [
            torch.rand(s.tokens, s.dims // 2, generator=torch.Generator().manual_seed(n)).to(device) for n in (1, 2)
        ]

    drawn = {"p": 0.3, "seed": 7}
    return {
        "bias_gelu": lambda: _pair("bias_gelu", [x(), make(s.cols)], s.rows),
        "bias_swiglu": lambda: _pair("bias_swiglu", [make(s.rows, 2 * s.cols), make(2 * s.cols)], s.rows),
        "silu_mul": lambda: _pair("silu_mul", [x(), x()], 1),
        "gelu_mul": lambda: _pair("gelu_mul", [x(), x()], 1),
        "bias_dropout_add": lambda: _pair("bias_dropout_add", [x(), make(s.cols), x()], s.rows, **drawn),
        "layer_norm": lambda: _pair("layer_norm", [x(), make(s.cols), make(s.cols)], s.cols),
        "rms_norm": lambda: _pair("rms_norm", [x(), make(s.cols)], s.cols),
        "rms_norm, residual": lambda: Check(
            lambda x, w, r: ops.rms_norm(x, w, residual=r), lambda x, w, r: ops.rms_norm_reference(x, w, residual=r),
            [x(), make(s.cols), x()], None, 8.0,
        ),
        "rotary_embedding": lambda: _pair("rotary_embedding", [make(s.tokens, 2, 4, s.dims), *angles()], 1),
        "scaled_causal_softmax": lambda: _pair("scaled_causal_softmax", [scores(), 0.5], s.tokens),
        "scaled_masked_softmax": lambda: _pair("scaled_masked_softmax", [scores(), mask(), 0.5], s.tokens),
        "cross_entropy": lambda: _pair("cross_entropy", [x(), target()], s.cols, label_smoothing=0.1, z_loss=1e-3),
        "vocab_parallel_linear_cross_entropy": lambda: Check(
            vocab_parallel_linear_cross_entropy, _linear_loss,
            [make(s.rows, 64), make(s.cols, 64), target()], None, 64.0,
        ),
        "route": lambda: _routing(s, dtype, device),
        "permute": lambda: _permuted(s, make, device),
        "flash_attention": lambda: _attention(s, make),
        "flash_attention, full": lambda: _attention(s, make, causal=False),
        "flash_attention, window": lambda: _attention(s, make, window=max(2, s.tokens // 5)),
        "flash_attention, sink": lambda: _attention(s, make, sink=True),
        "flash_attention, softcap": lambda: _attention(s, make, softcap=2.0),
        "flash_attention, documents": lambda: _attention(s, make, cu_seqlens=True),
        "flash_attention, dropout": lambda: _attention(s, make, dropout_p=0.2, seed=3),
        "flash_attention, wide": lambda: _attention(s._replace(dims=256), make),
    }  # fmt: skip


def run(name: str, dtype: str, size: str, device: str) -> str | None:
    """What is wrong; ``None`` if all is right."""
    if device == "cuda":
        torch.cuda.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        check = checks(SIZES[size], DTYPES[dtype], device)[name]()
        suite.check_numerics(check.op, check.reference, check.args, check.grad, slack_ulps=check.slack)
    except Exception as error:  # also what a kernel raises: the other cases go on
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['?'])[0]}"
    return None


def sanitized(names: tuple[str, ...], limit: float) -> int:
    """Runs cases again under compute-sanitizer; how many it complains of."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not there")
        return 0
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", __spec__.name, "--processes"]
    started = {
        name: subprocess.Popen(
            [*command, "0", "--size", "tiny", "--dtype", "bfloat16", "--only", name],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name in names
    }  # fmt: skip
    wrong, end = 0, time.monotonic() + limit
    for name, process in started.items():
        try:
            said, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"sanitized {name}: not done within {limit:.0f} s")
            continue
        wrong += process.returncode != 0
        print(f"sanitized {name}: " + ("clean" if process.returncode == 0 else said[-1500:]), flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=14, help="0: in this process")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--size", choices=[*SIZES], action="append")
    parser.add_argument("--dtype", choices=[*DTYPES], action="append")
    parser.add_argument("--sanitizer-limit", type=float, default=0.0, help="seconds for compute-sanitizer")
    given = parser.parse_args()
    cases = [
        (name, dtype, size, given.device)
        for size in given.size or ["real", "ragged"]
        for dtype in given.dtype or DTYPES
        for name in given.only or checks(SIZES["tiny"], torch.float32, given.device)
    ]
    start, wrong = time.monotonic(), 0
    if given.processes:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(given.processes, mp_context=context) as pool:
            futures = {pool.submit(run, *case): case for case in cases}
            for future in concurrent.futures.as_completed(futures):
                wrong += _said(futures[future], future.exception() or future.result())
    else:
        for case in cases:
            wrong += _said(case, run(*case))
    print(f"{len(cases) - wrong} of {len(cases)} cases right, {time.monotonic() - start:.0f} s")
    if given.sanitizer_limit:
        wrong += sanitized(SANITIZED, given.sanitizer_limit)
    return int(wrong > 0)


def _said(case: tuple[str, ...], problem: object) -> bool:
    if problem:
        print(f"WRONG {', '.join(case)}: {problem}", flush=True)
    return problem is not None


if __name__ == "__main__":
    sys.exit(main())
