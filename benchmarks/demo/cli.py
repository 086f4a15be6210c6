"""The command line of ``python -m benchmarks.demo``."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.demo import report
from benchmarks.demo.config import demo_settings, in_parallel, name_of
from benchmarks.demo.data import STANDARD_LIBRARY, load_text
from benchmarks.demo.runs import ALONE, PRODUCTS, Run, train
from benchmarks.harness import options
from parallel_ops._internal.command_line import INTERRUPTED, fail, run
from parallel_ops.models import TransformerConfig
from parallel_ops.train.config import Settings
from parallel_ops.train.launch.rendezvous import under_torchrun
from parallel_ops.train.report.outputs import PLOT_FORMATS, check_file


def command(
    text: Annotated[
        str | None, typer.Option(help="File or folder to train on.", show_default="Python's standard library")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 30,
    num_layers: Annotated[int, typer.Option(help="Transformer layers.")] = 3,
    hidden_size: Annotated[int, typer.Option(help="Width of the residual stream.")] = 256,
    num_heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    seq_length: Annotated[int, typer.Option(help="Bytes in a sequence.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences in a step.")] = 4,
    ffn_hidden_size: Annotated[
        int | None, typer.Option(help="Width of the MLP.", show_default="4 x hidden size")
    ] = None,
    activation: Annotated[str, typer.Option(help="Activation of the MLP: gelu or swiglu.")] = "gelu",
    positions: Annotated[str, typer.Option(help="How the model knows positions: learned or rotary.")] = "rotary",
    norm: Annotated[str, typer.Option(help="Norm of each layer's input: layer_norm or rms_norm.")] = "layer_norm",
    dropout: Annotated[
        float, typer.Option(help="Dropout probability. Above 0 the two models draw different masks.")
    ] = 0.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and dropout.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU and float32 on a CPU.")
    ] = "auto",
    vocabulary: Annotated[int, typer.Option(help="Size of the vocabulary, of which bytes take 256.")] = 256,
    runs: Annotated[
        str,
        typer.Option(help="What to train on one process: some of them, the one that others are compared with first."),
    ] = ",".join(ALONE),
    tp: Annotated[
        int, typer.Option(help="Train on this many tensor-parallel processes as well.", show_default="1, no such run")
    ] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="These processes split the tokens between products too.")
    ] = False,
    cp: Annotated[
        int,
        typer.Option(
            help="Processes that share each sequence, times those of --tp.", show_default="1, whole sequences"
        ),
    ] = 1,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Train on four more processes, 2 data-parallel x 2 tensor-parallel with ZeRO-3, and on the two stages "
            "of a pipeline.",
        ),
    ] = False,
    output: Annotated[Path, typer.Option(help="Where to save the plot (png, pdf or svg).")] = Path("demo.png"),
    json: Annotated[Path | None, typer.Option(help="Where to save every loss and step time.")] = None,
) -> None:
    """Trains a small GPT on the bytes of a text: in plain PyTorch, with this package, and in parallel.

    Plain is what a PyTorch user writes today, scaled_dot_product_attention included; compiled and fused-compiled are
    the same models under torch.compile. All start from the same weights and see the same batches; they take turns step
    by step, each in its own process or processes, and each on the same CPU cores in all. Prints one table that compares
    them, with the time of the matmuls of a step alone, and saves a plot of the loss curves and step times.
    The loss at the end is the mean over the last tenth of the steps.

    The processes are started here, by the launcher of parallel-ops train: over gloo on CPUs, over NCCL on as many GPUs.

    Example: python -m benchmarks.demo --steps 50 --tp 2
    """
    try:
        if under_torchrun():
            raise ValueError("the demo starts its processes itself; leave torchrun out, and choose them with --tp")
        if text == "":  # the current folder for Path
            raise ValueError("--text is empty; name a file or a folder, or leave it out")
        source = STANDARD_LIBRARY if text is None else Path(text)
        gpus = _gpus(device)
        model = TransformerConfig(
            vocab_size=vocabulary, seq_length=seq_length, num_layers=num_layers, hidden_size=hidden_size,
            num_heads=num_heads, ffn_hidden_size=ffn_hidden_size, dropout=dropout, activation=activation,
            positions=positions, norm=norm,
        )  # fmt: skip
        settings = demo_settings(
            model, source, steps=steps, batch=batch, run={"seed": seed, "device": "cuda" if gpus else "cpu"},
            optimizer={"lr": lr}, precision={"dtype": _precision(dtype, gpus)},
        )  # fmt: skip
        plans: list[dict[str, Any]] = []
        if (tp, cp) != (1, 1):
            plans.append({"tp": tp, "cp": cp, "sequence_parallel": sequence_parallel and tp > 1})
        if everything:
            plans.append({"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": sequence_parallel})
            if num_layers > 1:  # a stage needs one
                plans.append({"pp": 2})
        each = dict.fromkeys(_chosen(runs), settings) | _parallel(settings, plans, device, gpus) | {PRODUCTS: settings}
        if (length := len(load_text(source))) < seq_length + 1:
            raise ValueError(f"the text has {length} bytes, but a sequence needs {seq_length + 1}")
        _check_outputs(output, json)
    except (ValueError, OSError) as error:
        fail(error)
    try:
        *results, products = _train(each)
        console = options.console(140)
        console.print(report.table(settings, results, products))
        report.plot(settings, results, output)
        if json is not None:
            json.write_text(report.as_json(settings, results, products))
        written = " and ".join(str(path) for path in (output, json) if path is not None)
        console.print(f"written to {written}", soft_wrap=True, highlight=False, markup=False)
    except (RuntimeError, OSError) as error:
        fail(error, 1)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)


app = options.single(command)


def main() -> None:
    """Runs the command line."""
    run(app, "python -m benchmarks.demo")


def _train(each: dict[str, Settings]) -> list[Run]:
    """Trains behind a progress bar, or with a line every tenth of the steps where stderr is no terminal."""
    console, steps = Console(stderr=True), next(iter(each.values())).run.steps
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=steps)
        if not console.is_terminal:
            names = ", ".join(name for name in each if name != PRODUCTS)
            print(f"training {names}: {steps} steps each, which take turns; then a table", file=sys.stderr, flush=True)

        def show(runs: list[Run]) -> None:
            done = len(runs[0].losses)
            losses = ", ".join(f"{run.name} {run.losses[-1]:.3f}" for run in runs if run.name != PRODUCTS)
            progress.update(task, advance=1, description=f"loss: {losses}")
            if not console.is_terminal and (done % max(1, steps // 10) == 0 or done == steps):
                print(f"step {done}/{steps}  loss: {losses}", file=sys.stderr, flush=True)

        return train(each, show)


def _chosen(runs: str) -> list[str]:
    names = [name.strip() for name in runs.split(",")]
    for name in names:
        if name not in ALONE:
            raise ValueError(f"--runs: there is no run {name!r}; choose from {', '.join(ALONE)}")
    if len(set(names)) < len(names):
        raise ValueError(f"--runs: {runs} has one of them twice")
    return names


def _parallel(
    settings: Settings, plans: list[dict[str, Any]], device: str, gpus: int | None
) -> dict[str, Settings]:  # fmt: skip
    """The settings of the parallel runs by name, of those that there are GPUs for."""
    found = {}
    for plan in plans:
        own = in_parallel(settings, **plan)
        if gpus is None or own.plan.gpus <= gpus:
            found[name_of(own.plan)] = own
            continue
        needs = f"{name_of(own.plan)} needs {own.plan.gpus} GPUs, and this torch sees {gpus}"
        if device == "cuda":
            raise ValueError(f"--device cuda: {needs}; leave it out, or use --device cpu")
        typer.echo(f"note: {needs}; --device cpu needs none", err=True)
    return found


def _precision(dtype: str, gpus: int | None) -> str:
    known = {"auto": "bf16" if gpus else "fp32", "float32": "fp32", "bfloat16": "bf16"}
    if dtype not in known:
        raise ValueError(f"--dtype must be one of {', '.join(known)}, got {dtype!r}")
    return known[dtype]


def _check_outputs(output: Path, json: Path | None) -> None:
    if output.suffix.lower() not in PLOT_FORMATS:
        raise ValueError(f"--output must end in {', '.join(PLOT_FORMATS)}, got {output}")
    for key, path in (("--output", output), ("--json", json)):
        if path is not None:
            check_file(key, path)


def _gpus(device: str) -> int | None:
    """The GPUs of the runs; ``None`` for CPUs."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {device!r}")
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ValueError("--device cuda: this torch sees no CUDA GPU")
    return torch.cuda.device_count() if there and device != "cpu" else None
