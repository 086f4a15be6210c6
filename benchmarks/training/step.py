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

import functools
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.harness import options
from benchmarks.harness.memory import peak_bytes
from benchmarks.harness.processes import Processes
from benchmarks.harness.timing import CallTimer, HostTimer, Rounds, take_turns
from benchmarks.training.steps import (
    ARMS,
    SIZES,
    TINY,
    PlainStep,
    Shape,
    TrainerStep,
    arm,
    held_bytes,
    settings_of,
    write_tokens,
)  # fmt: skip
from parallel_ops._internal.command_line import fail
from parallel_ops._internal.distributed.compat import use_gpu
from parallel_ops.train import Trainer
from parallel_ops.train.launch.malloc import keep_freed_memory
from parallel_ops.train.report.metrics import Metrics


def main(
    ranks: Annotated[int, typer.Option(min=1, help="Processes of each arm, on a GPU each where there are any.")] = 2,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences of a forward on one rank.")] = 4,
    accumulation: Annotated[int, typer.Option(min=1, help="Forwards of a step.")] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of which the median is shown, after one that is not timed.")
    ] = 9,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="CPU time of the slowest rank: on a machine in use.")
    ] = False,
    keep_memory: Annotated[bool, typer.Option("--keep-memory", help="Plain scripts keep freed memory, too.")] = False,
    host: Annotated[
        bool, typer.Option("--host", help="The host time of a step of a tiny model, on one process.")
    ] = False,
) -> None:
    """Tokens a second, memory and the largest difference of the losses."""
    options.check("dtype", [dtype], ("fp32", "bf16"))
    if min(ranks, micro_batch, accumulation, rounds) < 1:
        fail("--ranks, --micro-batch, --accumulation and --rounds must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        data = write_tokens(Path(folder))
        if host:
            _host(data, rounds)
        else:
            _compare(Shape(data, ranks, dtype, micro_batch, accumulation, cpu_time, keep_memory), rounds)


app = options.single(main)

# The arm of this process: its step and its clock.
_begun: tuple[PlainStep | TrainerStep, HostTimer] | None = None


def _begin(rank: int, ranks: int, name: str, shape: Shape, store: str) -> None:
    """Sets a rank of an arm up, as its program does."""
    global _begun  # noqa: PLW0603
    if ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        use_gpu(device)
    elif shape.keep_memory or name.startswith("trainer"):
        keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    meeting = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=ranks)
    clock = time.process_time if shape.cpu_time else time.perf_counter
    _begun = arm(name, shape, device), HostTimer(device, clock=clock, group=dist.group.WORLD, join=True)


def _step(rank: int, ranks: int) -> float:
    """Seconds of a step."""
    assert _begun is not None
    step, timer = _begun
    return timer.round([[step]])[0]


def _end(rank: int, ranks: int) -> tuple[list[float], int, int]:
    """Losses, bytes held between steps, and with the most that a step has beside."""
    assert _begun is not None
    step, _ = _begun
    held = held_bytes(step)
    return step.losses, held, held + peak_bytes(step, next(step.model.parameters()).device)


def _compare(shape: Shape, rounds: int) -> None:
    groups = {name: Processes(shape.ranks) for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, group in groups.items():
                group.run(_begin, name, shape, f"{folder}/store of {name}")
            calls = {name: functools.partial(group.run, _step) for name, group in groups.items()}
            stats = take_turns(calls, CallTimer(), Rounds(rounds))
            said = {name: group.run(_end)[0] for name, group in groups.items()}
        finally:
            for group in groups.values():
                group.close()
    best = min(stats[name].median for name in ("fsdp2", "fsdp2, compiled"))
    tokens = shape.plan["global_batch"] * SIZES["seq_length"]
    table = options.table(
        "", "tokens/s", "ms", "quartiles", "faster", "held MiB", "peak MiB", "loss", "largest difference"
    )
    usual = said["fsdp2"][0]
    for name, s in stats.items():
        losses, held, peak = said[name]
        apart = max(abs(a - b) for a, b in zip(losses, usual, strict=True))
        table.add_row(
            name, f"{tokens / s.median:,.0f}", *options.milliseconds(s), f"{best / s.median:.2f}x",
            f"{held / 2**20:.0f}", f"{peak / 2**20:.0f}",
            f"{losses[0]:.4f} to {losses[-1]:.4f}", f"{apart:.1e}",
        )  # fmt: skip
    options.console(140).print(table)


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

    with Metrics(trainer) as metrics:
        timer = HostTimer(torch.device("cpu"), repeat=20, clock=time.thread_time)
        stats = take_turns({"torch": alone, "trainer": lambda: metrics.add(trainer.step())}, timer, Rounds(rounds))
    trainer.loader.close()
    torch_alone, ours = (stats[name].median * 1e3 for name in ("torch", "trainer"))
    print(
        f"torch's own calls {torch_alone:.2f} ms, a step of the trainer {ours:.2f} ms: {ours - torch_alone:.2f} beyond"
    )
