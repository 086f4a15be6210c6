"""A training step of a Transformer, captured in one CUDA graph.

Two models of the same weights train on the same batches, one in eager mode and one by replays of its graph, forward,
backward and AdamW. Their losses must be the same bits: every kernel adds in an order that the shapes set. What both
take a step is printed. The same is printed of the trainer, with ``run.cuda_graph`` and without, whose losses may differ
by the rounding of learning rates.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_session.ranks import settings_of, tokens
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.train import Trainer

STEPS, _WARMUP = 5, 3
_SIZE = {"num_layers": 4, "hidden_size": 512, "seq_length": 512}
_TINY = {"num_layers": 1, "hidden_size": 32, "seq_length": 32}
# Of losses of bf16 runs whose learning rates are fp32 or fp64, assumed; from batch to batch they differ by 2e-3.
_ROUNDING = 5e-4


def config() -> TransformerConfig:
    return TransformerConfig(
        vocab_size=4096, seq_length=512, num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=2, norm="rms_norm",
        activation="swiglu", positions="rotary", bias=False,
    )  # fmt: skip


class Trained:
    """A model with its optimizer, and the tensors that a step reads and writes."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = Transformer(config()).to(device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=device.type == "cuda")
        self.tokens = torch.zeros(512, 2, dtype=torch.int64, device=device)
        self.loss = torch.zeros((), device=device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.tokens, self.tokens)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())


def batches(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4096, (512, 2), generator=generator).to(device) for _ in range(_WARMUP + STEPS)]


def losses(device: torch.device, dtype: torch.dtype, *, replayed: bool = False) -> tuple[list[float], float]:
    """The losses, and seconds of a step.

    ``replayed``: The first steps are in eager mode, on a side stream as capturing asks for, and replays follow.
    """
    trained, found, start = Trained(device, dtype), [], 0.0
    if replayed:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for number, batch in enumerate(batches(device)):
        trained.tokens.copy_(batch)
        if number == _WARMUP:
            if replayed:
                with torch.cuda.graph(graph):
                    trained.step()
                torch.cuda.synchronize()
            start = time.perf_counter()
        if not replayed:
            trained.step()
        elif number < _WARMUP:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                trained.step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            graph.replay()
        found.append(trained.loss.item())
    return found, (time.perf_counter() - start) / STEPS


def losses_of_run(
    kind: str, cuda_graph: str | bool = False, sections: Mapping[str, Any] | None = None
) -> tuple[list[float], float]:
    """Losses of the trainer's steps, and seconds of the fastest of the last; ``sections`` are further settings."""
    model: dict[str, Any] = {
        "vocab_size": 4096, "num_heads": 8, "norm": "rms_norm", "activation": "swiglu", "positions": "rotary",
        "bias": False, **(_SIZE if kind == "cuda" else _TINY),
    }  # fmt: skip
    steps = _WARMUP + 1 + STEPS
    with tokens(model) as data:
        run = {"device": kind, "cuda_graph": cuda_graph, "steps": steps}
        further = {"run": run, "optimizer": {}, "precision": {}, **(sections or {})}
        settings = settings_of(kind, model, {"global_batch": 4, "micro_batch": 2}, steps, data, further)
        with Trainer(settings) as trainer:
            if cuda_graph and kind == "cuda" and trainer.eager_reason is not None:
                raise ValueError(f"nothing was captured: {trainer.eager_reason}")
            taken = [trainer.step() for _ in range(steps)]
    return [step.loss for step in taken], min(step.seconds for step in taken[-STEPS:])


def compare(runs: Mapping[str, tuple[list[float], float]]) -> None:
    """Raises if losses of a run are not those of the first, but for rounding."""
    first = next(iter(runs.values()))[0]
    for name, (losses, seconds) in runs.items():
        print(f"trainer, {name:8} {[round(x, 5) for x in losses]}, {1e3 * seconds:.2f} ms a step", flush=True)
    for name, (losses, _) in runs.items():
        if any(abs(x - y) > _ROUNDING * abs(x) for x, y in zip(first, losses, strict=True)):
            raise ValueError(f"losses of {name} differ")


def compare_replays() -> None:
    """Raises if losses of replays are not the bits of eager steps."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    # Attention by this package's kernels: torch's backwards add by atomics, in another order each time.
    torch.use_deterministic_algorithms(True, warn_only=True)
    eager, eager_seconds = losses(device, dtype)
    replayed, seconds = losses(device, dtype, replayed=True)
    print(f"eager    {[round(x, 5) for x in eager]}, {1e3 * eager_seconds:.2f} ms a step")
    print(f"replayed {[round(x, 5) for x in replayed]}, {1e3 * seconds:.2f} ms a step")
    torch.use_deterministic_algorithms(False)
    if eager != replayed:
        raise ValueError("replayed losses differ")
