"""``python -m benchmarks.gpu_session.pulls``: gathers over symmetric memory, by two processes on one GPU.

Each way of ``all_gather_linear`` multiplies the same rows, a few times over, so that workspaces and flags are used
again; products must be those of the gathered rows. Two processes take turns on one GPU, so their times say nothing.
Exits with 1 where a product is wrong or a process fails.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

from parallel_ops import all_gather_linear
from parallel_ops.tensor_parallel.linear.call import Overlap

PROCESSES, TIMES = 2, 5
# Rows of a rank, inner size, output features: whole tiles, and rows and features that fill no tile.
SHAPES = ((512, 1024, 1536), (200, 264, 520))
WAYS: tuple[Overlap, ...] = ("off", "symmetric")


def error(way: Overlap, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference from a product in fp64, as a share of its largest element, over all repetitions."""
    rows, inner, features = shape
    generator = torch.Generator().manual_seed(dist.get_rank())
    worst = 0.0
    for number in range(TIMES):
        x, weight = (torch.randn(n, inner, generator=generator).to(device, dtype) for n in (rows, features))
        y = all_gather_linear(x, weight, group=dist.group.WORLD, overlap=way)
        everyone: list[Tensor] = [torch.empty_like(x.cpu()) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, x.cpu())
        expected = torch.cat(everyone).double() @ weight.cpu().double().t()
        if number == 0 and y.shape != expected.shape:
            return float("inf")
        worst = max(worst, ((y.cpu().double() - expected).abs().max() / expected.abs().max()).item())
    return worst


def _rank(rank: int, folder: str, kind: str, ways: Sequence[Overlap]) -> None:
    # torch maps the memory of another rank on the same GPU only with it.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    store = dist.FileStore(os.path.join(folder, "store"), PROCESSES)  # type: ignore[attr-defined]
    # NCCL refuses ranks that share a GPU.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=20))
    device, wrong = torch.device(kind), 0
    for way in ways:
        for shape in SHAPES:
            found = error(way, shape, device, torch.bfloat16)
            right = found < 2**-7
            wrong += not right
            if rank == 0:
                print(
                    f"{way!s:6} {'x'.join(map(str, shape)):14} {'right' if right else 'WRONG'}, {found:.1e}", flush=True
                )
    dist.destroy_process_group()
    if wrong:
        raise ValueError(f"rank {rank}: {wrong} of {len(ways) * len(SHAPES)} products are wrong")


def main(kind: str = "cuda", ways: Sequence[Overlap] = WAYS) -> int:
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_rank, (folder, kind, ways), nprocs=PROCESSES)
        except ProcessException as problem:
            print(problem)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
