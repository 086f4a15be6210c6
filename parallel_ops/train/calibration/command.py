"""Starts the processes that measure, and writes what they found."""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

from parallel_ops._internal.distributed.compat import use_gpu
from parallel_ops.planner import presets
from parallel_ops.planner.cluster import GPU, Cluster
from parallel_ops.train.calibration.fit import Measured, as_json, cluster_of
from parallel_ops.train.calibration.measure import measure
from parallel_ops.train.launch.malloc import keep_freed_memory
from parallel_ops.train.planner_bridge import gpu_here
from parallel_ops.train.report.outputs import check_file


def calibrate(
    path: Path, processes: int | None, seconds: float, sizes: dict[str, Any] | None = None
) -> tuple[Cluster, Measured]:
    """Measures this machine and writes the cluster to ``path``.

    Args:
        processes: ranks to measure with; ``None`` for one on each GPU, or on CPUs two.
        seconds: about how long to measure, the start of the processes not included.
        sizes: see ``measure``.

    Raises:
        ValueError: ``path`` is no ``.json``, there are more processes than GPUs, or the times make no sense.
        OSError: ``path`` cannot be written.
    """
    if path.suffix != ".json":
        raise ValueError(f"calibrate: FILE must end in .json, got {path}")
    check_file("calibrate", path)  # before a minute is spent
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = processes or gpus or 2
    if gpus and ranks > gpus:
        raise ValueError(f"--processes: {ranks} are more than the {gpus} GPUs here")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "measured")
        spawn(_rank, (ranks, bool(gpus), seconds, folder, str(found), sizes), nprocs=ranks)
        measured: Measured = torch.load(found, weights_only=False)
    device = _device(ranks)
    cluster = replace(
        cluster_of(measured, device, ranks, "gloo" if not gpus else "nccl"), name=f"{device.name}x{ranks}"
    )
    path.write_text(json.dumps(as_json(cluster, measured), indent=1) + "\n", encoding="utf-8")
    return cluster, measured


def _rank(
    rank: int, ranks: int, cuda: bool, seconds: float, folder: str, found: str, sizes: dict[str, Any] | None
) -> None:
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        use_gpu(device)
    else:
        keep_freed_memory()  # as in training
    if ranks > 1 and not cuda:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    if ranks > 1:
        store = dist.FileStore(os.path.join(folder, "store"), ranks)  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks)
    measured = measure(device, seconds, sizes)
    if rank == 0:
        torch.save(measured, found)
    if ranks > 1:
        dist.destroy_process_group()
        # References of torch's keep the groups and gloo's threads beyond this. A thread that drops a tensor while the
        # interpreter ends aborts the process (pytorch/pytorch#179291), so the interpreter does not end in order.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _device(ranks: int) -> GPU:
    """What is known of each rank's device: a known GPU, another one, or a share of this machine. Figures that are
    measured are 0."""
    name, generation = "cpu", "cpu"
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    elif (known := gpu_here()) is not None:
        return presets.gpu(known)
    else:
        here = torch.cuda.get_device_properties(0)
        name, memory = here.name.lower().replace(" ", "-"), float(here.total_memory)
        generation = {8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell"}.get(here.major, "unknown")
    none: dict[str, Any] = dict.fromkeys(("fp32", "fp16", "bf16", "fp8", "watts"), 0.0)
    return GPU(name=name, generation=generation, memory=memory, bandwidth=1.0, **none)


def report(path: Path, cluster: Cluster, measured: Measured) -> None:
    """Prints what was found."""
    console = Console(width=100)
    gpu, constants = cluster.gpu, dict(cluster.constants)
    table = Table("measured", "", "share", box=box.SIMPLE_HEAD)
    products = {"matmul": f"{measured.dtype} products"}
    products |= {"flash_forward": "attention, forward", "flash_backward": "attention, backward"}
    for name, label in products.items():
        rate = gpu.peak(measured.dtype) * constants[name]
        table.add_row(label, f"{rate / 1e12:.3g} TFLOP/s", f"{constants[name]:.0%}")
    table.add_row("memory", f"{gpu.bandwidth * constants['memory'] / 1e9:.3g} GB/s", f"{constants['memory']:.0%}")
    table.add_row("elementwise traffic", f"{constants['elementwise']:.2f} times the planner's count", "")
    if cluster.gpus > 1:
        link = cluster.intra
        table.add_row(f"link ({link.name})", f"{link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.0f} us", "")
        table.add_row("overlap costs", f"{constants['interference']:.0%} of the shorter part", "")
    console.print(table)
    console.print(f"{path}: {cluster.gpus} x {gpu.name}; parallel-ops plan --cluster {path}", highlight=False)
