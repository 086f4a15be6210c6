"""``python -m benchmarks.gpu_session.attention FOLDER``: attention in TFLOP/s beside torch's backends.

Forward and backward by themselves, causal, bfloat16, medians of events. Counted are the products of the visible half,
two forward and five backward, as papers count them; with a window or documents those of what is visible. Rows are in
DEVICE-attention.csv of the folder, after each measurement, so that a time limit costs the last ones alone.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks import results
from benchmarks.bench_flash_attention import backend, flex
from benchmarks.environment import Environment, describe
from benchmarks.timing import CudaTimer, HostTimer, Timer, take_turns
from parallel_ops import flash_attention

# Sequences, tokens, heads, key heads, dims: Llama 3 8B, a rank of its 70B at tensor parallel 8, short sequences, small
# heads, long sequences, and what a rank of a long one has.
SHAPES = (
    (1, 8192, 32, 8, 128), (1, 8192, 8, 1, 128), (1, 4096, 8, 1, 128), (4, 2048, 32, 8, 128), (1, 8192, 32, 32, 64),
    (1, 16384, 16, 16, 128), (1, 32768, 4, 1, 128),
)  # fmt: skip
WINDOW = 1024
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Shape = tuple[int, int, int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """``mask``: causal, window or documents."""

    provider: str
    mask: str
    shape: str
    direction: str
    ms: float
    tflops: float

    @property
    def key(self) -> tuple[str, ...]:
        return self.provider, self.mask, self.shape, self.direction


def documents(tokens: int, device: torch.device) -> Tensor:
    """Four, of which the longest has half of the tokens."""
    return torch.tensor([0, tokens // 2, tokens * 3 // 4, tokens * 7 // 8, tokens], dtype=torch.int32, device=device)


def providers(device: torch.device) -> list[tuple[str, str, Callable[[int], Attention]]]:
    """(provider, mask, tokens to what computes it), what compiles last."""

    def ours(name: str) -> Callable[[int], Attention]:
        return lambda tokens: lambda q, k, v: flash_attention(q, k, v, backend=name)  # type: ignore[arg-type]

    def with_window(tokens: int) -> Attention:
        return lambda q, k, v: flash_attention(q, k, v, window=min(WINDOW, tokens // 2))

    def with_documents(tokens: int) -> Attention:
        ends = documents(tokens, device)
        return lambda q, k, v: flash_attention(q, k, v, cu_seqlens=ends)

    if device.type == "cpu":
        flash = ("flash", "causal", lambda tokens: backend(SDPBackend.FLASH_ATTENTION))
        return [("parallel_ops", "causal", ours("auto")), flash, ("parallel_ops", "window", with_window)]
    compiled = flex()
    return [
        ("triton", "causal", ours("triton")),
        ("parallel_ops", "causal", ours("auto")),
        ("cudnn", "causal", lambda tokens: backend(SDPBackend.CUDNN_ATTENTION)),
        ("flash", "causal", lambda tokens: backend(SDPBackend.FLASH_ATTENTION)),
        ("parallel_ops", "window", with_window),
        ("parallel_ops", "documents", with_documents),
        ("flex", "causal", lambda tokens: compiled),
    ]


def visible(tokens: int, mask: str) -> float:
    """Pairs of a query and a key that it sees."""
    if mask == "window":
        window = min(WINDOW, tokens // 2)
        return window * (tokens - (window - 1) / 2)
    lengths = [tokens]
    if mask == "documents":
        ends = documents(tokens, torch.device("cpu")).tolist()
        lengths = [b - a for a, b in itertools.pairwise(ends)]
    return sum(n * n / 2 for n in lengths)


def flops(shape: Shape, mask: str, direction: str) -> float:
    batch, tokens, heads, _, dims = shape
    return (4 if direction == "forward" else 10) * batch * heads * dims * visible(tokens, mask)


def measure(attend: Attention, shape: Shape, device: torch.device, rounds: int = 7) -> dict[str, float]:
    """Seconds of forward and backward."""
    batch, tokens, heads, kv_heads, dims = shape
    q, k, v = (
        torch.randn(tokens, batch, h, dims, device=device, dtype=torch.bfloat16).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    out = attend(q, k, v)
    grad = torch.randn_like(out)
    calls: dict[str, list[Callable[[], object]]] = {
        "forward": [lambda: attend(q, k, v)],
        "backward": [lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)],
    }
    for (call,) in calls.values():
        call()
    timer: Timer = CudaTimer(repeat=4) if device.type == "cuda" else HostTimer(device)
    stats = take_turns(calls, timer, min_rounds=rounds, max_rounds=rounds, budget_s=0)
    return {direction: s.median for direction, s in stats.items()}


def main(folder: str, device: str = "cuda", shapes: Sequence[Shape] = SHAPES) -> int:
    where = torch.device(device)
    environment = vars(describe(where))
    path = Path(folder) / f"{environment['device']}-attention.csv"
    missing = 0
    for provider, mask, make in providers(where):
        for shape in shapes[:2] if provider == "flex" else shapes:
            if mask == "documents" and shape[0] > 1:
                continue
            name = "x".join(map(str, shape))
            try:
                seconds = measure(make(shape[1]), shape, where)
            except (RuntimeError, ValueError) as error:
                missing += provider in ("triton", "parallel_ops")
                print(f"{provider} {mask} {name}: {str(error).splitlines()[0]}", flush=True)
                continue
            rows = [
                Row(
                    provider=provider, mask=mask, shape=name, direction=direction, ms=1e3 * s,
                    tflops=flops(shape, mask, direction) / s / 1e12, **environment,
                )
                for direction, s in seconds.items()
            ]  # fmt: skip
            results.merge(path, rows)
            said = ", ".join(f"{row.direction} {row.tflops:.0f} ({row.ms:.3f} ms)" for row in rows)
            print(f"{provider:12} {mask:9} {name:18} {said} TFLOP/s", flush=True)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
