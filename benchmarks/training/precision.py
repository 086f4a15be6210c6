"""Losses of small models in every precision of matmuls, beside those in bfloat16.

    python -m benchmarks precision [--steps 300] [--model dense]

A dense model and one with experts, 2 layers of width 128, learn the bytes of this repository's pages, in one process.
All layers are in float8 (``fp8_bf16_layers = 0``), on a GPU that has a recipe by its matmuls, elsewhere emulated. The
loss is the mean of the last third of the steps, and ``percent`` its distance from that of bfloat16, which starts with
the same weights and sees the same batches. At a rate of 3e-3, and of the last tenth, it is 1 % more or less by chance.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.harness import options, results
from benchmarks.harness.environment import Environment, describe
from parallel_ops.ops.float8_recipes import PRECISIONS, device_problem
from parallel_ops.train import Trainer
from parallel_ops.train.config import Settings

_ROOT = Path(__file__).parents[2]
_DENSE: dict[str, Any] = {
    "vocab_size": 256, "seq_length": 64, "num_layers": 2, "hidden_size": 128, "num_heads": 4, "ffn_hidden_size": 256,
    "activation": "swiglu", "norm": "rms_norm", "bias": False, "positions": "rotary", "tied_embeddings": False,
}  # fmt: skip
MODELS = {
    "dense": _DENSE,
    "experts": _DENSE | {"experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 128, "aux_loss": 0.01}},
}


@dataclass(frozen=True, kw_only=True)
class PrecisionRow(Environment):
    """Mean loss of the last steps. percent: how far it is above that of bfloat16."""

    model: str
    precision: str
    steps: int
    emulated: bool
    loss: float
    percent: float

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.precision


def losses(model: str, precision: str, steps: int, *, device: str, emulated: bool) -> list[float]:
    """The losses of all steps."""
    docs = _ROOT / "docs"
    # This set and order belong to the published losses.
    pages = [*sorted([*docs.glob("*.md"), *docs.glob("gpu/*.md")]), docs / "design/what_goes_wrong_elsewhere.md"]
    settings = Settings.model_validate(
        {
            "run": {"steps": steps, "seed": 0, "device": device},
            "model": MODELS[model],
            "data": {"paths": [str(path) for path in pages], "dtype": "uint8"},
            "optimizer": {"lr": 1e-3, "warmup": steps // 10},
            "parallel": {"global_batch": 4, "micro_batch": 4},
            "precision": {
                "dtype": "bf16", "linears": precision, "fp8_emulation": emulated and precision != "bf16",
                "fp8_bf16_layers": 0,
            },
        }
    )  # fmt: skip
    trainer = Trainer(settings)
    found = [trainer.step().loss for _ in range(steps)]
    trainer.loader.close()
    return found


def main(
    steps: Annotated[int, typer.Option(min=10, help="Of each run.")] = 300,
    model: Annotated[list[str] | None, typer.Option(help="dense or experts; repeatable. Both by default.")] = None,
    device: options.Device = "auto",
    output: options.Output = None,
) -> None:
    """The loss of each precision, and how far it is from that of bfloat16."""
    options.check("model", model, MODELS)
    kind = options.chosen_device(device)
    where = dataclasses.asdict(describe(torch.device(kind)))
    path = options.folder(output, steps < 300) / f"{where['device']}-precision.csv"
    for name in model or MODELS:
        plain = 0.0
        for precision in PRECISIONS:
            emulated = precision != "bf16" and device_problem(torch.device(kind), precision) is not None
            last = losses(name, precision, steps, device=kind, emulated=emulated)[-(steps // 3) :]
            loss = statistics.fmean(last)
            plain = loss if precision == "bf16" else plain
            percent = 100 * (loss / plain - 1)
            row = PrecisionRow(
                model=name, precision=precision, steps=steps, emulated=emulated, loss=loss, percent=percent, **where
            )  # fmt: skip
            results.merge(path, [row])
            print(f"{name:8} {precision:14} {loss:.4f} {percent:+.2f} %", flush=True)


app = options.single(main)
