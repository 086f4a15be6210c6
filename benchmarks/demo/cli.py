"""The command line of ``python -m benchmarks.demo``."""

import enum
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.demo import report
from benchmarks.demo.compare import Run, train
from benchmarks.demo.config import demo_settings, in_parallel, name_of
from benchmarks.demo.data import STANDARD_LIBRARY, load_text
from benchmarks.demo.runs import ALONE, PRODUCTS
from benchmarks.demo.worker import Here, local_ranks, rank_of_torchrun, torchrun_ranks
from parallel_ops._internal.command_line import INTERRUPTED, fail, run
from parallel_ops.models import TransformerConfig
from parallel_ops.train.config import Settings
from parallel_ops.train.launch.rendezvous import first_rank
from parallel_ops.train.outputs import PLOT_FORMATS, check_file


class Device(str, enum.Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, enum.Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Activation(str, enum.Enum):
    gelu = "gelu"
    swiglu = "swiglu"


class Positions(str, enum.Enum):
    learned = "learned"
    rotary = "rotary"


class Norm(str, enum.Enum):
    layer_norm = "layer_norm"
    rms_norm = "rms_norm"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command line."""
    run(app, "python -m benchmarks.demo")


@app.command()
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
    activation: Annotated[Activation, typer.Option(help="Activation of the MLP.")] = Activation.gelu,
    positions: Annotated[Positions, typer.Option(help="How the model knows positions.")] = Positions.rotary,
    norm: Annotated[Norm, typer.Option(help="Normalisation of each layer's input.")] = Norm.layer_norm,
    dropout: Annotated[
        float, typer.Option(help="Dropout probability. Above 0 the two models draw different masks.")
    ] = 0.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and dropout.")] = 0,
    device: Annotated[Device, typer.Option(help="auto takes a GPU where there is one.")] = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="auto is bfloat16 on a GPU, float32 on a CPU.")] = Dtype.auto,
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
    them, with the time of the matrix products of a step alone, and saves a plot of the loss curves and step times.
    The loss at the end is the mean over the last tenth of the steps.

    The parallel processes are started here, over gloo on CPUs and over NCCL on as many GPUs. Under torchrun, its
    processes are used, and rank 0 trains the other models beside, on its node alone; it alone writes files.

    Example: python -m benchmarks.demo --steps 50 --tp 2
    """
    try:
        if text == "":  # the current folder for Path
            raise ValueError("--text is empty; name a file or a folder, or leave it out")
        source = STANDARD_LIBRARY if text is None else Path(text)
        chosen = _chosen(runs)
        place, (tp, cp) = _device(device), _ranks(device, tp, cp)
        model = TransformerConfig(
            vocab_size=vocabulary,
            seq_length=seq_length,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            ffn_hidden_size=ffn_hidden_size,
            dropout=dropout,
            activation=activation.value,
            positions=positions.value,
            norm=norm.value,
        )
        low = dtype is Dtype.bfloat16 or (dtype is Dtype.auto and place == "cuda")
        settings = demo_settings(
            model, source, steps=steps, batch=batch, run={"seed": seed, "device": place}, optimizer={"lr": lr},
            precision={"dtype": "bf16" if low else "fp32"},
        )  # fmt: skip
        parallel = [in_parallel(settings, tp=tp, cp=cp, sequence_parallel=sequence_parallel)] if tp * cp != 1 else []
        if everything:
            _check_four(place)
            parallel.append(in_parallel(settings, dp=2, tp=2, zero=3, sequence_parallel=sequence_parallel))
            if num_layers > 1:  # a stage needs one
                parallel.append(in_parallel(settings, pp=2))
        if (length := len(load_text(source))) < seq_length + 1:
            raise ValueError(f"the text has {length} bytes, but a sequence needs {seq_length + 1}")
        _check_outputs(output, json)
    except (ValueError, OSError) as error:
        fail(error)
    try:
        each = dict.fromkeys(chosen, settings) | {name_of(own.plan): own for own in parallel} | {PRODUCTS: settings}
        trained = _train(each)
        if not trained:
            return
        *results, products = trained
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, 140)  # a file has no lines that are too long
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


def _train(each: dict[str, Settings]) -> list[Run]:
    """Trains; under torchrun as one of its ranks. Only rank 0 returns runs."""
    if torchrun_ranks() == 1:
        return _train_all(each, {})
    name, settings = next((name, own) for name, own in each.items() if own.plan.gpus > 1)
    with rank_of_torchrun(settings) as here:
        if first_rank():
            return _train_all(each, {name: here})
        for _ in range(settings.run.steps):
            here.ask("step")
        return []


def _train_all(each: dict[str, Settings], here: dict[str, Here]) -> list[Run]:
    """Trains behind a progress bar, or with a line every tenth of the steps where stderr is no terminal."""
    console, steps, done = Console(stderr=True), next(iter(each.values())).run.steps, 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=steps)
        if not console.is_terminal:
            names = ", ".join(name for name in each if name != PRODUCTS)
            print(f"training {names}: {steps} steps each, which take turns; then a table", file=sys.stderr, flush=True)

        def show(runs: list[Run]) -> None:
            nonlocal done
            done += 1
            losses = ", ".join(f"{run.name} {run.losses[-1]:.3f}" for run in runs if run.name != PRODUCTS)
            progress.update(task, advance=1, description=f"loss: {losses}")
            if not console.is_terminal and (done % max(1, steps // 10) == 0 or done == steps):
                print(f"step {done}/{steps}  loss: {losses}", file=sys.stderr, flush=True)

        return train(each, show, here=here)


def _chosen(runs: str) -> list[str]:
    names = [name.strip() for name in runs.split(",")]
    for name in names:
        if name not in ALONE:
            raise ValueError(f"--runs: there is no run {name!r}; choose from {', '.join(ALONE)}")
    if len(set(names)) < len(names):
        raise ValueError(f"--runs: {runs} has one of them twice")
    return names


def _check_outputs(output: Path, json: Path | None) -> None:
    if output.suffix.lower() not in PLOT_FORMATS:
        raise ValueError(f"--output must end in {', '.join(PLOT_FORMATS)}, got {output}")
    for key, path in (("--output", output), ("--json", json)):
        if path is not None and first_rank():
            check_file(key, path)


def _ranks(device: Device, tp: int, cp: int = 1) -> tuple[int, int]:
    """The tensor-parallel and context-parallel sizes: those of the options if there are as many GPUs. Without options,
    all processes of torchrun are tensor-parallel."""
    world = torchrun_ranks()
    asked = f"--tp {tp}" + (f" --cp {cp}" if cp != 1 else "")
    if world > 1 and tp * cp not in (1, world):
        raise ValueError(f"{asked}: torchrun started {world} processes; leave it out, or make them the same")
    wanted = tp * cp if world == 1 else local_ranks()
    gpus = torch.cuda.device_count() if _device(device) == "cuda" else wanted
    if gpus >= wanted:
        return (tp, cp) if world == 1 or tp * cp == world else (world, 1)
    if world > 1:
        raise ValueError(f"torchrun started {wanted} processes here, but this torch sees {gpus} GPUs; use --device cpu")
    if device is Device.cuda:
        raise ValueError(f"{asked}: needs {wanted} GPUs, and this torch sees {gpus}; use --tp 1 or --device cpu")
    typer.echo(f"note: {asked} needs {wanted} GPUs, and this torch sees {gpus}; --device cpu needs none", err=True)
    return 1, 1


def _check_four(device: str) -> None:
    """ValueError: the four processes of ``--all`` cannot be started."""
    if torchrun_ranks() > 1:
        raise ValueError("--all starts its processes itself; leave torchrun out")
    if device == "cuda" and torch.cuda.device_count() < 4:
        raise ValueError(f"--all: needs 4 GPUs, and this torch sees {torch.cuda.device_count()}; use --device cpu")


def _device(device: Device) -> str:
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA GPU")
    return device.value
