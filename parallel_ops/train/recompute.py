"""What a forward does not keep and its backward computes again.

``none`` keeps everything. ``full`` keeps the input of every n-th block alone. ``selective`` keeps, within a block, what
is dear: outputs of matrix products, of attention and of whatever sends data; norms, activations, rotations and dropout
are computed again. The bits of a step are those of ``none``: dropout draws from the generators as they were.

Sources: Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198.
"""

import functools
import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

KINDS = ("none", "selective", "full")

# Of aten: products and what SDPA runs. By name, since which exist depends on the build of torch.
_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
# Of this package: products and attention, and what sends.
_OURS = (
    "all_gather_linear", "column_parallel_linear", "linear_reduce_scatter", "flash_attention", "ring_attention",
    "comm_all_gather", "comm_reduce_scatter", "comm_all_reduce", "comm_all_to_all",
)  # fmt: skip
_SENDING = ("_c10d_functional", "c10d")


def recompute(model: nn.Module, names: Sequence[str], kind: str, *, every: int = 1) -> None:
    """Wraps blocks of a model, in place. Names of parameters in ``state_dict`` stay.

    Args:
        names: of the modules that are recomputed, as in ``model.named_modules()``.
        kind: of ``KINDS``.
        every: of the blocks, in this order, the first of every so many.

    Raises:
        ValueError: an unknown kind, ``every`` below 1.
    """
    if kind not in KINDS:
        raise ValueError(f"recompute: kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    if every < 1:
        raise ValueError(f"recompute: every must be at least 1, got {every}")
    if kind == "none":
        return
    options: dict[str, Any] = {"checkpoint_impl": CheckpointImpl.NO_REENTRANT}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for name in names[::every]:
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(name)
        model.get_submodule(parent).register_module(child, checkpoint_wrapper(module, **options))


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    namespace, _, name = op._schema.name.partition("::")
    kept = (namespace == "aten" and name in _PRODUCTS) or (namespace == "parallel_ops" and name in _OURS)
    return CheckpointPolicy.MUST_SAVE if kept or namespace in _SENDING else CheckpointPolicy.PREFER_RECOMPUTE


def saved_bytes(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that a forward keeps for its backward, each memory counted once; parameters and buffers are not.

    What autograd saves, and what selective recomputation keeps beside it.
    """

    def alive() -> dict[int, int]:
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    before = alive()
    # A saved tensor that has been through a hook is an object that the garbage collector knows.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        out = model(*args, **kwargs)
    kept = sum(size for memory, size in alive().items() if memory not in before)
    del out
    return kept
