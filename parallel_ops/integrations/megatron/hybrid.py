"""A spec for Megatron's ``HybridModel``, built where the installed version has one."""

import importlib.util
from typing import Any

import megatron.core
from megatron.core.transformer.spec_utils import ModuleSpec

from parallel_ops._internal.distributed.groups import GradReduce


def hybrid_stack_spec(config: Any, *, grad_reduce: GradReduce = "fp32") -> ModuleSpec:
    """The stack to give to ``HybridModel(hybrid_stack_spec=...)``, for any pattern of layers.

    Attention (``*``), latent attention (``+``), MLPs (``-``), experts (``E``), layers that predict more tokens and the
    last norm are made of this package's modules. Other layers (Mamba, gated delta nets, sparse attention) are those of
    Megatron's own spec, with Transformer Engine.

    Args:
        config: the ``TransformerConfig`` of the model.
        grad_reduce: how the linears add partial sums of the ranks; see ``ParallelOpsSpecProvider``.

    Raises:
        ValueError: an unknown ``grad_reduce``.
        RuntimeError: this version of Megatron-core has no ``HybridModel``.
    """
    if importlib.util.find_spec("megatron.core.models.hybrid") is None:
        raise RuntimeError(
            f"hybrid_stack_spec: megatron-core {megatron.core.__version__} has no HybridModel; 0.18 and 0.19 do"
        )
    from parallel_ops.integrations.megatron import _hybrid

    return _hybrid.stack_spec(config, grad_reduce)
