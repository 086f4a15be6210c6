"""Checks of this process's machine: versions, devices, topology, limits, environment. Nothing is started."""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from parallel_ops import __version__
from parallel_ops._internal.command_line import processors
from parallel_ops.doctor.finding import Finding
from parallel_ops.train.launch.rendezvous import check_environment

_DRIVER, _SHM = Path("/proc/driver/nvidia/version"), Path("/dev/shm")
# Bytes of shared memory a GPU: NCCL takes 10 to 33 MB for each pair of ranks that has no direct path, loaders more.
_SHARED = 1 << 30
_FILES = 4096

# Variables that slow a run down or change its meaning, and why somebody should know.
_VARIABLES = {
    "NCCL_P2P_DISABLE": "GPUs of a node send through host memory",
    "NCCL_SHM_DISABLE": "ranks of a node without a direct path send through the network",
    "NCCL_IB_DISABLE": "nodes send over TCP",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before on the host",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits in every collective, so nothing overlaps",
    "NCCL_DEBUG_SUBSYS": "NCCL writes a trace",
}


def check_machine(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Checks in the order in which one failure explains the next."""
    yield Finding("ok", "parallel_ops", f"{__version__}, Python {platform.python_version()} on {platform.machine()}")
    yield from _software()
    yield from _devices()
    yield from _limits()
    yield from _launch(environment)


def _software() -> Iterator[Finding]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if torch.version.hip:
        yield Finding("failed", "torch", f"{torch.__version__}, a ROCm build", "ROCm is not supported: docs/install.md")
    elif _DRIVER.exists() and torch.version.cuda is None:
        yield Finding(
            "failed", "torch", f"{torch.__version__}, CPU build, beside an NVIDIA driver",
            "install the CUDA build of this torch, then parallel_ops again with --no-build-isolation",
        )  # fmt: skip
    else:
        yield Finding("ok", "torch", f"{torch.__version__}, {build}")
    try:
        import parallel_ops._internal.dispatch.extension  # noqa: F401

        yield Finding("ok", "compiled ops", "loaded")
    except ImportError as error:
        yield Finding("failed", "compiled ops", str(error), "build them again for this torch, as the error says")
    try:
        yield Finding("ok", "triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        needed = torch.cuda.is_available()
        cure = "pip install the triton that torch names: ops on GPUs need it" if needed else ""
        yield Finding("failed" if needed else "ok", "triton", "not installed", cure)


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if _DRIVER.exists() and torch.version.cuda:
            cure = f"the driver is older than CUDA {torch.version.cuda} needs, or CUDA_VISIBLE_DEVICES is empty"
            yield Finding("failed", "GPUs", "torch sees none, beside an NVIDIA driver", cure)
        else:
            yield Finding("ok", "GPUs", f"none; ops run on {processors()} cores")
        return
    count = torch.cuda.device_count()
    kinds = [torch.cuda.get_device_properties(i) for i in range(count)]
    for index, kind in enumerate(kinds):
        what = f"{kind.name}, {kind.total_memory / 2**30:.0f} GiB, sm_{kind.major}{kind.minor}"
        if (kind.major, kind.minor) < (8, 0):
            yield Finding("failed", f"GPU {index}", what, "the Triton kernels need compute capability 8.0 or later")
        else:
            yield Finding("ok", f"GPU {index}", what)
    if len({(kind.name, kind.total_memory) for kind in kinds}) > 1:
        yield Finding("warning", "GPUs", "of several kinds", "every step waits for the slowest; plan for one kind")
    yield from check_peers(
        [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    )
    if torch.distributed.is_nccl_available():
        yield Finding("ok", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    elif count > 1:
        yield Finding("failed", "NCCL", "this torch has none", "install a torch that is built with NCCL")


def check_peers(reads: list[list[bool]]) -> Iterator[Finding]:
    """``reads[i][j]``: GPU i can read the memory of GPU j."""
    apart = [f"{i} and {j}" for i in range(len(reads)) for j in range(i) if not (reads[i][j] and reads[j][i])]
    if apart:
        more = f" and {len(apart) - 3} more pairs" if len(apart) > 3 else ""
        yield Finding(
            "warning", "topology", f"GPUs {', '.join(apart[:3])}{more} do not read each other's memory",
            "tensor parallelism over them goes through the host: put them into different data-parallel ranks, or "
            "enable P2P (ACS off in the BIOS, no MIG, one container)",
        )  # fmt: skip
    elif len(reads) > 1:
        yield Finding("ok", "topology", "all GPUs read each other's memory")


def _limits() -> Iterator[Finding]:
    gpus = max(1, torch.cuda.device_count())
    there = _SHM.exists()
    free = shutil.disk_usage(_SHM).free if there else 0
    few = free < _SHARED * gpus
    cure = f"give the container {gpus} GiB or more (docker run --shm-size), or --ipc=host" if few else ""
    text = f"{free / 2**30:.1f} GiB of {_SHM} are free" if there else f"there is no {_SHM}"
    yield Finding("warning" if few else "ok", "shared memory", text, cure)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < _FILES
    cure = f"ulimit -n {_FILES} or more: each pair of ranks and each file of data takes some" if few else ""
    yield Finding("warning" if few else "ok", "open files", f"at most {files}", cure)
    try:
        yield Finding("ok", "host name", f"{socket.gethostname()} is {socket.gethostbyname(socket.gethostname())}")
    except (OSError, UnicodeError) as error:  # the latter of a label of 64 letters, which Linux allows
        yield Finding(
            "warning", "host name", f"{socket.gethostname()} has no address: {error}",
            "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network's interface",
        )  # fmt: skip


def _launch(environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        check_environment()
    except ValueError as error:
        yield Finding("failed", "launcher", str(error), "start it as the message says, or unset the variables")
    for name, effect in _VARIABLES.items():
        if environment.get(name, "0") not in ("", "0"):
            yield Finding("warning", name, f"is {environment[name]}: {effect}", f"unset {name} unless that is meant")
    if sys.flags.optimize:
        yield Finding("warning", "python -O", "leaves assertions of torch out", "start Python without -O")
