"""The machine, versions and commit of a measurement."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

import parallel_ops
from parallel_ops._internal.command_line import processors

_ROOT = Path(__file__).resolve().parents[2]
_FALLBACK_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The columns that all rows of one run share: rows of every kind are made of it and of what was measured."""

    device: str
    driver: str
    threads: int
    torch: str
    triton: str
    version: str
    commit: str
    date: str


def describe(device: torch.device) -> Environment:
    driver = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if device.type == "cuda" else ""
    return Environment(
        device=device_slug(device),
        driver=driver.split("\n")[0],
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        triton=_version("triton"),
        version=parallel_ops.__version__,
        commit=_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def device_slug(device: torch.device) -> str:
    """``nvidia-h200``, or for a CPU its name and the number of its cores that this process may use."""
    if device.type == "cuda":
        return _slug(torch.cuda.get_device_name(device))
    return f"{_slug(_cpu_name())}-{processors()}-cores"


def last_level_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        return int(os.sysconf("SC_LEVEL3_CACHE_SIZE")) or _FALLBACK_CACHE_BYTES
    except (ValueError, OSError, AttributeError):
        return _FALLBACK_CACHE_BYTES


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def _slug(name: str) -> str:
    name = re.sub(r"\((R|TM|C)\)|\bCPU\b|@.*", " ", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _commit() -> str:
    """The tree's commit, ``-dirty`` when tracked files differ; ``PARALLEL_OPS_COMMIT`` names it where git cannot."""
    revision = _run("git", "rev-parse", "--short=10", "HEAD")
    if not revision:
        return os.environ.get("PARALLEL_OPS_COMMIT", "unknown")
    changed = _run("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
    return f"{revision}-dirty" if changed else revision


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
