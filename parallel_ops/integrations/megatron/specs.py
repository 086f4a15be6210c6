"""Layer specs with this package's modules, built by Megatron's own functions, so they fit the installed version."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from parallel_ops._internal.distributed.groups import GradReduce, is_fp32
from parallel_ops.integrations.megatron import modules
from parallel_ops.integrations.megatron.attention import CoreAttention


class ParallelOpsSpecProvider(LocalSpecProvider):
    """The local spec with this package's modules. Experts stay Megatron's: they have no sequence to gather.

    Args:
        grad_reduce: how the linears add partial sums of the ranks under sequence parallelism: ``"fp32"`` (in rank order
            in fp32: the same bits on every run and over every backend) or ``"backend"`` (by the reduce-scatter that
            Megatron's own linears call; where they send in chunks, the exact sum).

    Raises:
        ValueError: an unknown ``grad_reduce``.
    """

    def __init__(self, grad_reduce: GradReduce = "fp32") -> None:
        self._exact = is_fp32(type(self).__name__, grad_reduce)

    def column_parallel_linear(self) -> type:
        return modules.ColumnParallelLinear if self._exact else modules.BackendColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return modules.RowParallelLinear if self._exact else modules.BackendRowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **_: Any) -> type:
        return modules.Norm

    def core_attention(self) -> type:
        return CoreAttention


def gpt_layer_spec(*, grad_reduce: GradReduce = "fp32", **options: Any) -> ModuleSpec:
    """A layer of GPT: ``get_gpt_layer_local_spec(**options)`` of the installed Megatron, with the provider above.

    The norm after the last layer is not part of it. Megatron uses its own there, which does not support sequence
    parallelism unless ``apply(["norm"])`` was called. ``gpt_block_spec`` includes it.

    Args:
        grad_reduce: how the linears add partial sums of the ranks; see ``ParallelOpsSpecProvider``.
        options: of ``get_gpt_layer_local_spec``.

    Raises:
        ValueError: an unknown ``grad_reduce``.
    """
    with _provided(grad_reduce):
        return _with_known_projections(gpt_layer_specs.get_gpt_layer_local_spec(**options))


def gpt_block_spec(
    config: Any, *, vp_stage: int | None = None, grad_reduce: GradReduce = "fp32", **options: Any
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the last norm, to give to ``GPTModel(transformer_layer_spec=...)``.

    Which layers have experts, and all else, is by ``config``: ``get_gpt_decoder_block_spec`` of the installed Megatron.

    Args:
        config: the ``TransformerConfig`` of the model.
        vp_stage: virtual pipeline stage of an interleaved schedule.
        grad_reduce: how the linears add partial sums of the ranks; see ``ParallelOpsSpecProvider``.
        options: of ``get_gpt_decoder_block_spec``; ``normalization`` and ``qk_l2_norm`` are by default from ``config``.

    Raises:
        ValueError: an unknown ``grad_reduce``.
    """
    options = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm, **options}
    with _provided(grad_reduce):
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, vp_stage=vp_stage, **options
        )
    for layer in spec.layer_specs:
        _with_known_projections(layer)
    spec.layer_norm = modules.Norm
    return spec


def _with_known_projections(layer: ModuleSpec) -> ModuleSpec:
    """Latent attention refuses any class but Megatron's own for its down-projections, also classes derived from it."""
    of_attention = layer.submodules.self_attention.submodules
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        if hasattr(of_attention, name):
            setattr(of_attention, name, ColumnParallelLinear)
    return layer


@contextlib.contextmanager
def _provided(grad_reduce: GradReduce) -> Iterator[None]:
    """Within the block Megatron's functions take this package's modules into local specs."""
    stock = gpt_layer_specs.LocalSpecProvider
    gpt_layer_specs.LocalSpecProvider = functools.partial(ParallelOpsSpecProvider, grad_reduce)
    try:
        yield
    finally:
        gpt_layer_specs.LocalSpecProvider = stock
