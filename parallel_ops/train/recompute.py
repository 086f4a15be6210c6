"""Activation recomputation.

``none`` keeps everything. ``full`` keeps only the input of every n-th block. ``selective`` keeps the expensive results
within a block: outputs of matmuls, attention and communication; norms, activations, rotations and dropout are
recomputed. ``experts`` keeps the rows that experts get and recomputes their matmuls and activation, but no
communication. The results are bit-identical to ``none``: the state of the random generators is restored.

Sources: Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from parallel_ops._internal.distributed.compat import selective_options
from parallel_ops.layers.experts import Experts

KINDS = ("none", "selective", "full", "experts")

# aten's matmuls and the kernels of SDPA. By name, since the build of torch decides which exist.
_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_scaled_mm_v2",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
# This package's matmuls, attention and communication.
_OURS = (
    "all_gather_linear", "column_parallel_linear", "linear_reduce_scatter", "grouped_linear", "flash_attention",
    "ring_attention", "comm_all_gather", "comm_reduce_scatter", "comm_all_reduce", "comm_all_to_all",
)  # fmt: skip
_SENDING = ("_c10d_functional", "c10d")


def recompute(model: nn.Module, names: Sequence[str], kind: str, *, every: int = 1, draws: bool = True) -> None:
    """Wraps blocks of a model in place. Names of parameters in ``state_dict`` do not change.

    Args:
        names: Names of the blocks, as in ``model.named_modules()``.
        kind: One of ``KINDS``.
        every: Recompute every n-th block.
        draws: Blocks draw random numbers: keeps the state of the generators, which no CUDA graph can capture.

    Raises:
        ValueError: ``kind`` is unknown, or ``every`` is below 1.
    """
    if kind not in KINDS:
        raise ValueError(f"recompute: kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    if every < 1:
        raise ValueError(f"recompute: every must be at least 1, got {every}")
    if kind == "none":
        return
    if kind == "experts":
        for module in (module for name in names[::every] for module in model.get_submodule(name).modules()):
            if isinstance(module, Experts):
                module.recompute = True
        return
    options: dict[str, Any] = {"checkpoint_impl": CheckpointImpl.NO_REENTRANT, "preserve_rng_state": draws}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        options |= selective_options()  # what is kept stays on the device, also of offloaded blocks
    for name in names[::every]:
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(name)
        model.get_submodule(parent).register_module(child, checkpoint_wrapper(module, **options))


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    namespace, _, name = op._schema.name.partition("::")
    kept = (namespace == "aten" and name in _PRODUCTS) or (namespace == "parallel_ops" and name in _OURS)
    return CheckpointPolicy.MUST_SAVE if kept or namespace in _SENDING else CheckpointPolicy.PREFER_RECOMPUTE
