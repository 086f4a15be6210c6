"""A whole training step of ``Trainer`` beside what a PyTorch user writes: data, forward, backward, clipping, AdamW.

    python -m benchmarks step [--ranks 2] [--dtype fp32] [--micro-batch 4] [--rounds 9] [--keep-memory]
    python -m benchmarks step --host                 what the trainer's own Python costs a step

A GPT of 4 layers with hidden size 512, 8 heads, 512 tokens and a vocabulary of 8,192. "fsdp2" is the same model in
plain PyTorch (SDPA, ``F.cross_entropy``), ``fully_shard`` on each block and the whole, eager and with compiled blocks;
"ddp" is ``DistributedDataParallel``. All begin with the same weights, see the same samples and take the same steps.
Each has processes of its own, which are set up as its program sets them up: ``parallel-ops train`` keeps freed host
memory (``train.heap``), a plain script does not, but for ``--keep-memory``. They take turns, one step each, and which
goes first changes, so a slow spell of the machine falls on all alike. Memory is that of a rank's tensors: held between
steps, and with the most that a step has beside.
"""

import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import multiprocessing

from benchmarks.memory import peak_bytes
from benchmarks.timing import Call, take_turns
from benchmarks.training_steps import ARMS, SIZES, TINY, Shape, arm, held_bytes, settings_of, write_tokens
from parallel_ops._internal.command_line import fail
from parallel_ops.train import Trainer
from parallel_ops.train.malloc import keep_freed_memory
from parallel_ops.train.metrics import Metrics

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    ranks: Annotated[int, typer.Option(help="Processes of each arm, on a GPU each where there are any.")] = 2,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    micro_batch: Annotated[int, typer.Option(help="Sequences of a forward on one rank.")] = 4,
    accumulation: Annotated[int, typer.Option(help="Forwards of a step.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds of which the median is shown, after one that is not timed.")] = 9,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="CPU time of the slowest rank: on a machine in use.")
    ] = False,
    keep_memory: Annotated[bool, typer.Option("--keep-memory", help="Plain scripts keep freed memory, too.")] = False,
    host: Annotated[
        bool, typer.Option("--host", help="The host time of a step of a tiny model, on one process.")
    ] = False,
) -> None:
    """Tokens a second, memory and the largest difference of the losses."""
    if dtype not in ("fp32", "bf16"):
        fail(f"unknown dtype {dtype!r}; choose from fp32, bf16")
    if min(ranks, micro_batch, accumulation, rounds) < 1:
        fail("--ranks, --micro-batch, --accumulation and --rounds must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        data = write_tokens(Path(folder))
        if host:
            _host(data, rounds)
        else:
            _compare(Shape(data, ranks, dtype, micro_batch, accumulation, cpu_time, keep_memory), rounds)


def _serve(name: str, shape: Shape, store: str, rank: int, pipe: Connection) -> None:
    """A rank of an arm: takes a step when it is told to and says how long it took; at last what it holds."""
    if shape.ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // shape.ranks))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    elif shape.keep_memory or name.startswith("trainer"):
        keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    meeting = dist.FileStore(store, shape.ranks)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=shape.ranks)
    step = arm(name, shape, device)
    clock = time.process_time if shape.cpu_time else time.perf_counter
    pipe.send(None)
    while pipe.recv() == "step":
        dist.barrier()
        start = clock()
        step()  # which has waited for its loss, so the device is done
        dist.barrier()
        pipe.send(clock() - start)
    held = held_bytes(step)
    pipe.send((step.losses, held, held + peak_bytes(step, device)))
    dist.destroy_process_group()


class _Group:
    """The processes of an arm."""

    def __init__(self, name: str, shape: Shape, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        store = os.path.join(folder, f"store of {name}")
        pairs = [context.Pipe() for _ in range(shape.ranks)]
        self._pipes = [near for near, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(name, shape, store, rank, far), daemon=True)
            for rank, (_, far) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, far in pairs:
            far.close()
        self._answers()  # they stand

    def ask(self, what: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(what)
        return self._answers()

    def _answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]


class _Asked:
    """A timer of steps that themselves say how long they took, on each rank."""

    repeat = 1

    def round(self, batches: Sequence[Sequence[Call]]) -> list[float]:
        return [max(cast(list[float], step())) for (step,) in batches]


@contextlib.contextmanager
def _groups(shape: Shape) -> Iterator[dict[str, _Group]]:
    groups: dict[str, _Group] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in ARMS:
                groups[name] = _Group(name, shape, folder)
            yield groups
        finally:
            for group in groups.values():
                for process in group.processes:
                    process.terminate()
                    process.join()


def _compare(shape: Shape, rounds: int) -> None:
    with _groups(shape) as groups:
        calls: dict[str, list[Call]] = {name: [functools.partial(groups[name].ask, "step")] for name in ARMS}
        stats = take_turns(calls, _Asked(), min_rounds=rounds, max_rounds=rounds, budget_s=0)
        said = {name: groups[name].ask("end")[0] for name in ARMS}
    best = min(stats[name].median for name in ("fsdp2", "fsdp2, compiled"))
    tokens = shape.plan["global_batch"] * SIZES["seq_length"]
    table = Table(box=SIMPLE_HEAD)
    for column in ("", "tokens/s", "ms", "quartiles", "faster", "held MiB", "peak MiB", "loss", "largest difference"):
        table.add_column(column, justify="right" if column else "left")
    usual = said["fsdp2"][0]
    for name, s in stats.items():
        losses, held, peak = said[name]
        apart = max(abs(a - b) for a, b in zip(losses, usual, strict=True))
        table.add_row(
            name, f"{tokens / s.median:,.0f}", f"{s.median * 1e3:.0f}", f"{s.p25 * 1e3:.0f} to {s.p75 * 1e3:.0f}",
            f"{best / s.median:.2f}x", f"{held / 2**20:.0f}", f"{peak / 2**20:.0f}",
            f"{losses[0]:.4f} to {losses[-1]:.4f}", f"{apart:.1e}",
        )  # fmt: skip
    Console(width=140).print(table)


def _host(data: Path, rounds: int) -> None:
    """CPU time of this thread: a step of the trainer with its metrics, and the same calls of torch alone."""
    settings = settings_of(data, TINY, global_batch=2, micro_batch=2)
    settings = settings.model_copy(
        update={"logging": settings.logging.model_copy(update={"interval": 100, "jsonl": data.with_suffix(".jsonl")})}
    )
    trainer = Trainer(settings)
    model, optimizer = trainer.model, trainer.optimizer
    batch = trainer.samples.batch(range(2))

    def alone() -> None:
        loss = model(batch.tokens, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    def timed(call: Callable[[], object]) -> float:
        start = time.thread_time()
        for _ in range(20):
            call()
        return (time.thread_time() - start) / 20

    with Metrics(trainer) as metrics:
        pairs = [(timed(alone), timed(lambda: metrics.add(trainer.step()))) for _ in range(rounds + 1)][1:]
    trainer.loader.close()
    torch_alone, ours = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    beyond = statistics.median(b - a for a, b in pairs) * 1e3
    print(f"torch's own calls {torch_alone:.2f} ms, a step of the trainer {ours:.2f} ms: {beyond:.2f} ms beyond")
