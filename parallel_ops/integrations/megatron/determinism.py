"""What a deterministic run needs of torch and of the environment, set together and restored together.

Megatron's own mode switches its fused cross-entropy and the overlap of tensor-parallel communication off, whose sums
come in another order on each run. This package's sum in rank order, so both stay on.
"""

import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

# Algorithms of NCCL whose sums have one order, as Megatron's deterministic mode asks for.
_ALGORITHMS = ("^NVLS", "Tree", "Ring", "CollnetDirect", "CollnetChain")
_WORKSPACES = (":4096:8", ":16:8")


def start() -> Callable[[], None]:
    """Turns deterministic algorithms on; returns what restores the state of before.

    Raises:
        ValueError: A variable of the environment has a value that is not deterministic, or is not set though CUDA or
            the process group has started without it.
    """
    added = _environment(os.environ, torch.cuda.is_available(), torch.cuda.is_initialized(), dist.is_initialized())
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # The ops write all of their outputs, so filling new memory before them would only cost bandwidth.
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    os.environ.update(added)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False

    def restore() -> None:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
        for name, value in added.items():
            if os.environ.get(name) == value:
                del os.environ[name]

    return restore


def _environment(found: Mapping[str, str], cuda: bool, cuda_started: bool, group_started: bool) -> dict[str, str]:
    """The variables to set, of those that are missing in ``found``."""
    if not cuda:
        return {}
    added = {}
    wanted = {
        "CUBLAS_WORKSPACE_CONFIG": (_WORKSPACES, cuda_started, "the first call of CUDA"),
        "NCCL_ALGO": (_ALGORITHMS, group_started, "init_process_group"),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": (("0",), False, ""),
    }
    for name, (allowed, late, before) in wanted.items():
        value = found.get(name)
        if value is None and late:
            raise ValueError(f"apply: deterministic=True needs {name}={allowed[0]} in the environment before {before}")
        if value is None:
            added[name] = allowed[0]
        elif value not in allowed:
            raise ValueError(f"apply: deterministic=True needs {name} to be one of {', '.join(allowed)}, got {value!r}")
    return added
