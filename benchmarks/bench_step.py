"""A whole training step of ``Trainer`` beside what a PyTorch user writes: data, forward, backward, clipping, AdamW.

    torchrun --nproc-per-node 2 -m benchmarks.bench_step [--dtype fp32] [--micro-batch 2] [--rounds 15]
    python -m benchmarks.bench_step --host                 what the trainer's own Python costs a step

A GPT of 4 layers with hidden size 512, 8 heads, 512 tokens and a vocabulary of 8,192. "fsdp2" is the same model in
plain PyTorch (SDPA, ``F.cross_entropy``), ``fully_shard`` on each block and the whole, eager and with compiled blocks;
"ddp" is ``DistributedDataParallel``. All begin with the same weights, see the same samples and take the same steps;
they take turns in each round, so a slow spell of the machine falls on all alike. Memory is that of this rank's tensors:
held between steps, and with the most that a step has beside.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.memory import peak_bytes
from benchmarks.timing import take_turns
from parallel_ops import ParallelMesh
from parallel_ops._command_line import fail, run
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.train import Trainer
from parallel_ops.train.loader import Loader
from parallel_ops.train.metrics import Metrics
from parallel_ops.train.optimizer import adamw
from parallel_ops.train.plain import PlainTransformer
from parallel_ops.train.samples import Samples
from parallel_ops.train.settings import Settings
from parallel_ops.train.spread import PRECISIONS
from parallel_ops.train.tokens import TokenStream

_SEED, _RATE = 0, 1e-3
_SIZES: dict[str, Any] = {"layers": 4, "hidden": 512, "heads": 8, "seq_length": 512, "vocab_size": 8_192}
_TINY: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "vocab_size": 64}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    micro_batch: Annotated[int, typer.Option(help="Sequences of a forward on one rank.")] = 2,
    accumulation: Annotated[int, typer.Option(help="Forwards of a step.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds of which the median is shown.")] = 15,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="CPU time of rank 0: on a machine in use.")] = False,
    host: Annotated[
        bool, typer.Option("--host", help="The host time of a step of a tiny model, on one process.")
    ] = False,
) -> None:
    """Tokens a second, memory and the largest difference of the losses."""
    if dtype not in ("fp32", "bf16"):
        fail(f"unknown dtype {dtype!r}; choose from fp32, bf16")
    with tempfile.TemporaryDirectory() as folder:
        data = _data(Path(folder))
        if host:
            _host(data, rounds)
            return
        on_gpu = torch.cuda.is_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        if on_gpu:
            torch.cuda.set_device(dist.get_node_local_rank())
        _compare(data, dtype, micro_batch, accumulation, rounds, time.process_time if cpu_time else time.perf_counter)
        dist.destroy_process_group()


def _data(folder: Path) -> Path:
    """Tokens with something to learn in them: the same pairs come again and again."""
    generator = np.random.default_rng(0)
    pairs = generator.integers(0, _TINY["vocab_size"], (64, 2))
    pairs[generator.integers(0, 64, 400_000)].astype("uint16").tofile(folder / "tokens.bin")
    return folder / "tokens.bin"


def _settings(data: Path, sizes: dict[str, Any], **parallel: Any) -> Settings:
    dtype = parallel.pop("dtype", "fp32")
    return Settings.model_validate(
        {
            "run": {"steps": 10_000, "seed": _SEED},
            "model": sizes,
            "data": {"paths": [str(data)]},
            "optimizer": {"lr": _RATE, "schedule": "constant"},
            "parallel": parallel,
            "precision": {"dtype": dtype},
        }
    )


class _Ours:
    """A step of ``Trainer``."""

    def __init__(self, settings: Settings, mesh: ParallelMesh | None) -> None:
        self.trainer = Trainer(settings, mesh)
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer
        self.losses: list[float] = []

    def __call__(self) -> None:
        self.losses.append(self.trainer.step().loss)


class _Plain:
    """A step as a PyTorch user writes it, of a model that returns its loss."""

    def __init__(self, settings: Settings, model: nn.Module, device: torch.device, *, autocast: bool = False) -> None:
        plan = settings.plan
        self.model, self.device, self.autocast = model, device, autocast
        self.optimizer = adamw(model, settings.optimizer)
        self.loader, self.taken, self.global_batch = _loader(settings), 0, plan.global_batch
        self.losses: list[float] = []

    def __call__(self) -> None:
        batches = self.loader.step(self.taken)
        self.taken += self.global_batch
        for group in self.optimizer.param_groups:
            group["lr"] = _RATE
        total = torch.zeros((), device=self.device)
        for number, on_host in enumerate(batches):
            last = number == len(batches) - 1
            quiet: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if isinstance(self.model, nn.parallel.DistributedDataParallel) and not last:
                quiet = self.model.no_sync()
            batch = on_host.to(self.device)
            with quiet:
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                    loss = self.model(batch.tokens, batch.targets) / len(batches)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        self.losses.append(total.item() / dist.get_world_size())


def _loader(settings: Settings) -> Loader:
    plan = settings.plan
    samples = Samples(TokenStream(settings.data.paths), seq_length=settings.seq_length, seed=_SEED)
    return Loader(
        samples, global_batch=plan.global_batch, micro_batch=plan.micro_batch, replicas=dist.get_world_size(),
        replica=dist.get_rank(),
    )  # fmt: skip


def _compare(
    data: Path, dtype: str, micro_batch: int, accumulation: int, rounds: int, clock: Callable[[], float]
) -> None:
    ranks = dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mesh = ParallelMesh(dp_shard=ranks)
    sizes = {"dp": ranks, "global_batch": ranks * micro_batch * accumulation, "micro_batch": micro_batch}
    plain_settings = _settings(data, _SIZES, **sizes, dtype=dtype)
    torch.manual_seed(_SEED)
    weights = Transformer(TransformerConfig(**_SIZES)).state_dict()

    def plain() -> nn.Module:
        model = PlainTransformer(TransformerConfig(**_SIZES))
        model.load_state_dict(weights)
        return model.to(device)

    def fsdp2(compiled: bool) -> nn.Module:
        model = plain()
        low = PRECISIONS[dtype]
        policy = MixedPrecisionPolicy() if dtype == "fp32" else MixedPrecisionPolicy(low, torch.float32)
        for layer in model.layers:  # type: ignore[union-attr]
            if compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh["fsdp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["fsdp"], mp_policy=policy)
        return model

    steps: dict[str, _Plain | _Ours] = {
        "fsdp2": _Plain(plain_settings, fsdp2(False), device),
        "fsdp2, compiled": _Plain(plain_settings, fsdp2(True), device),
        "ddp": _Plain(
            plain_settings, nn.parallel.DistributedDataParallel(plain()), device, autocast=dtype != "fp32"
        ),
    }  # fmt: skip
    for zero in (0, 2, 3):
        steps[f"trainer, zero {zero}"] = _Ours(_settings(data, _SIZES, **sizes, zero=zero, dtype=dtype), mesh)
    calls: dict[str, list[Callable[[], object]]] = {name: [_together(step)] for name, step in steps.items()}
    stats = take_turns(calls, _StepTimer(clock), min_rounds=rounds, max_rounds=rounds, budget_s=0)
    held = {name: _held(step) for name, step in steps.items()}
    peaks = {name: held[name] + peak_bytes(step, device) for name, step in steps.items()}
    if dist.get_rank():
        return
    best = min(stats[name].median for name in ("fsdp2", "fsdp2, compiled"))
    tokens = plain_settings.plan.global_batch * _SIZES["seq_length"]
    table = Table(box=SIMPLE_HEAD)
    columns = ("", "tokens/s", "ms", "quartiles", "faster", "held MiB", "peak MiB", "loss", "largest difference")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    first = steps["fsdp2"].losses
    for name, s in stats.items():
        losses = steps[name].losses
        apart = max(abs(a - b) for a, b in zip(losses, first, strict=True))
        table.add_row(
            name, f"{tokens / s.median:,.0f}", f"{s.median * 1e3:.0f}", f"{s.p25 * 1e3:.0f} to {s.p75 * 1e3:.0f}",
            f"{best / s.median:.2f}x", f"{held[name] / 2**20:.0f}", f"{peaks[name] / 2**20:.0f}",
            f"{losses[0]:.4f} to {losses[-1]:.4f}", f"{apart:.1e}",
        )  # fmt: skip
    Console(width=140).print(table)


class _StepTimer:
    """Times one step at a time, by any clock. Each has waited for its result, so the device is done."""

    repeat = 1

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def round(self, batches: Sequence[Sequence[Callable[[], object]]]) -> list[float]:
        seconds = []
        for (step,) in batches:
            start = self._clock()
            step()
            seconds.append(self._clock() - start)
        return seconds


def _together(step: Callable[[], None]) -> Callable[[], None]:
    """A step that begins and ends on all ranks at once."""

    def call() -> None:
        dist.barrier()
        step()
        dist.barrier()

    return call


def _held(step: _Plain | _Ours) -> int:
    """Bytes of this rank's parameters and optimizer state."""
    tensors: list[Any] = list(step.model.parameters())
    tensors += [value for state in step.optimizer.state.values() for value in state.values()]
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in own)


def _host(data: Path, rounds: int) -> None:
    """CPU time of this thread: a step of the trainer with its metrics, and the same calls of torch alone."""
    settings = _settings(data, _TINY, global_batch=2, micro_batch=2)
    settings = settings.model_copy(
        update={"logging": settings.logging.model_copy(update={"every": 100, "jsonl": data.with_suffix(".jsonl")})}
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


if __name__ == "__main__":
    run(app, prog_name="python -m benchmarks.bench_step")
