"""Functions that each rank of a proof runs: training over ranks that share a GPU, against one process.

Each function takes the rank, the number of ranks, ``"cuda"`` or ``"cpu"``, and the path of a new store; it raises where
a result is wrong.
"""

import contextlib
import datetime
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel_ops import ParallelMesh, all_gather_linear, linear_reduce_scatter
from parallel_ops._internal.distributed.compat import use_gpu

# Sums over ranks, and attention in blocks, round otherwise than one process does.
TOLERANCE = 2e-4
_TIMEOUT = datetime.timedelta(seconds=30)

Sections = Mapping[str, Any]


def device_of(kind: str) -> torch.device:
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def check(name: str, found: torch.Tensor, true: torch.Tensor, bound: float) -> None:
    """Raises if the largest error, as a share of the largest value, is above ``bound``."""
    error = ((found.double() - true.double()).abs().max() / true.double().abs().max()).item()
    if not error <= bound:
        raise ValueError(f"{name}: error {error:.2e}, at most {bound:.2e} was expected")


@contextlib.contextmanager
def group(rank: int, size: int, kind: str, store: str, *, eager: bool = False, offload: bool = False) -> Iterator[None]:
    """Joins a process group: gloo on CPUs, NCCL on the GPU that all ranks share.

    Args:
        eager: Binds the group to the device, with which torch forms its communicators at once.
        offload: With gloo for tensors in host memory, as the launcher has it then.
    """
    from parallel_ops.train.launch.worker import backend_of  # needs pydantic

    bound: dict[str, Any] = {}
    if kind == "cuda":
        use_gpu(device_of(kind))
        bound = {"device_id": device_of(kind)} if eager else {}
    backend = backend_of(kind == "cuda", offload=offload)
    files = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=files, rank=rank, world_size=size, timeout=_TIMEOUT, **bound)
    try:
        yield
    finally:
        dist.destroy_process_group()


def settings_of(
    kind: str, model: Sections, plan: Sections, steps: int, data: Path, sections: Sections | None = None
) -> Any:
    """The settings of a run; ``data`` has its tokens, ``sections`` replaces others."""
    from parallel_ops.train.config import Settings  # needs pydantic

    return Settings.model_validate(
        {
            "run": {"steps": steps, "device": kind, "seed": 3},
            "model": model,
            "data": {"paths": [str(data)]},
            "optimizer": {"lr": 1e-3, "eps": 1e-4, "grad_clip": 0.5, "warmup": 0},
            "parallel": {"global_batch": 8, "micro_batch": 1, **plan},
            "precision": {"dtype": "fp32"},
            **(sections or {}),
        }
    )


@contextlib.contextmanager
def tokens(model: Sections) -> Iterator[Path]:
    """A file of random tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        np.random.default_rng(0).integers(1, model["vocab_size"], 100_000).astype("uint16").tofile(path)
        yield path


def trainer_of(settings: Any) -> Any:
    """A trainer over the ranks of the default group, or of this process alone."""
    from parallel_ops.train import Trainer  # needs pydantic
    from parallel_ops.train.parallelize_model import MESH_SIZES

    mesh = None
    if dist.is_initialized():
        mesh = ParallelMesh(**{name: getattr(settings.plan, name) for name in MESH_SIZES})
    return Trainer(settings, mesh)


def losses(
    kind: str, model: Sections, plan: Sections, steps: int, sections: Sections | None = None
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a run over the ranks of the default group, or of this process alone."""
    with tokens(model) as path:
        trainer = trainer_of(settings_of(kind, model, plan, steps, path, sections))
        found = [trainer.step() for _ in range(steps)]
        trainer.loader.close()
        return [(step.loss, step.grad_norm) for step in found]


def trains_alike(
    rank: int, size: int, kind: str, store: str, model: Sections, plan: Sections, sections: Sections | None = None,
    eager: bool = False,
) -> None:  # fmt: skip
    """Four steps over the ranks have the losses and gradient norms of one process."""
    offload = "offload" in plan
    # Weights are drawn where they are kept, and a GPU draws other numbers.
    expected = losses("cpu" if offload else kind, model, {}, 4, sections) if rank == 0 else []
    with group(rank, size, kind, store, eager=eager, offload=offload):
        found = losses(kind, model, plan, 4, sections)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=False), 1):
        for what, a, b in zip(("loss", "gradient norm"), ours, theirs, strict=True):
            if not math.isclose(a, b, rel_tol=TOLERANCE):
                raise ValueError(f"step {number}: {what} {a!r}, of one process {b!r}")


def keeps_training(rank: int, size: int, kind: str, store: str, model: Sections, plan: Sections, steps: int) -> None:
    """Many steps end, and bring the loss down."""
    with group(rank, size, kind, store):
        found = losses(kind, model, plan, steps if kind == "cuda" else 3)
    if not all(math.isfinite(x) for pair in found for x in pair) or found[-1][0] >= found[0][0]:
        raise ValueError(f"the loss went from {found[0][0]} to {found[-1][0]}")


def resumes(
    rank: int, size: int, kind: str, store: str, model: Sections, plan: Sections, sections: Sections | None = None
) -> None:
    """A run with checkpoints, written while it goes on, and evaluations; resumed, its last step has the same bits."""
    with group(rank, size, kind, store), tokens(model) as path:
        further = {
            "evaluation": {"share": 0.02, "interval": 2},
            "checkpoint": {"dir": f"{store}.checkpoints", "interval": 2, "keep": 8},
        }
        settings = settings_of(kind, model, plan, 4, path, {**(sections or {}), **further})
        trainer = trainer_of(settings)
        trainer.train()
        expected = trainer.step()
        trainer.close()
        again = trainer_of(settings)
        again.resume(Path(f"{store}.checkpoints", "step-00000002"))
        found = [again.step() for _ in range(3)][-1]
        again.close()
        if (found.loss, found.grad_norm) != (expected.loss, expected.grad_norm):
            raise ValueError(
                f"resumed: {found.loss!r}, {found.grad_norm!r}, not {expected.loss!r}, {expected.grad_norm!r}"
            )


def symmetric_linears(rank: int, size: int, kind: str, store: str) -> None:
    """Linears over memory that ranks read from each other, several times, so that it is used again.

    On a CPU chunks are sent in its place. Shapes fill whole tiles, and none.
    """
    overlap: Any = "symmetric" if kind == "cuda" else 2
    below = math.nextafter(2.0**-7, 0)
    with group(rank, size, kind, store):
        world = dist.group.WORLD
        for rows, inner, features in ((512, 1024, 1536), (200, 264, 520)):
            for number in range(5):
                drawn = torch.Generator().manual_seed(number)
                x, weight = (
                    torch.randn(size * rows, inner, generator=drawn),
                    torch.randn(features, inner, generator=drawn),
                )
                own = x[rank * rows : (rank + 1) * rows].to(device_of(kind), torch.bfloat16)
                w = weight.to(device_of(kind), torch.bfloat16)
                everyone = x.bfloat16().double() @ weight.bfloat16().double().t()
                y = all_gather_linear(own, w, group=world, overlap=overlap)
                check(f"gather {rows} x {inner} x {features}", y.cpu(), everyone, below)
                parts = x.to(device_of(kind), torch.bfloat16)  # the same on every rank, so sums are multiples
                z = linear_reduce_scatter(parts, w, group=world, overlap=overlap)
                summed = size * everyone[rank * rows : (rank + 1) * rows]
                check(f"scatter {rows} x {inner} x {features}", z.cpu(), summed, below)
