"""``apply``, and the names of Megatron-core that each op replaces."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import megatron.core
import torch

from parallel_ops.integrations.megatron import attention, determinism, experts, functions, rotary, weight_gradient
from parallel_ops.integrations.megatron._rebind import MISSING, Binding, Replaced, find, holders
from parallel_ops.integrations.megatron._unreplaced import unreplaced_in

_FUSIONS = "megatron.core.fusions"
_DROPOUT = f"{_FUSIONS}.fused_bias_dropout:bias_dropout_add"
_ROPE = "megatron.core.models.common.embeddings.rope_utils"
_NORM = "megatron.core.transformer.torch_norm"
_LAYERS = "megatron.core.tensor_parallel.layers"
_MOE = "megatron.core.transformer.moe.moe_utils"
_EXTENSION = "fused_weight_gradient_mlp_cuda"

# By op: the places of Megatron's names, and what builds their replacements.
_REPLACEMENTS: dict[str, dict[str, Callable[[Any, bool], Any]]] = {
    "bias_gelu": {f"{_FUSIONS}.fused_bias_gelu:bias_gelu_impl": functions.bias_gelu},
    "bias_swiglu": {
        f"{_FUSIONS}.fused_bias_swiglu:bias_swiglu_impl": functions.bias_swiglu,
        f"{_FUSIONS}.fused_bias_swiglu:weighted_bias_swiglu_impl": functions.weighted_bias_swiglu,
    },
    "bias_geglu": {
        f"{_FUSIONS}.fused_bias_geglu:bias_geglu_impl": functions.bias_geglu,
        f"{_FUSIONS}.fused_bias_geglu:weighted_bias_quick_geglu_impl": functions.weighted_bias_quick_geglu,
    },
    # The functions that get_bias_dropout_add returns, so that specs and models that hold it need no change.
    "bias_dropout_add": {
        f"{_DROPOUT}_unfused": functions.bias_dropout_add_unfused,
        f"{_DROPOUT}_fused_train": functools.partial(functions.bias_dropout_add, True),
        f"{_DROPOUT}_fused_inference": functools.partial(functions.bias_dropout_add, False),
    },
    "attention": {
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward": attention.core_attention,
    },
    "softmax": {f"{_FUSIONS}.fused_softmax:FusedScaleMaskSoftmax.forward": functions.scale_mask_softmax},
    "norm": {f"{_NORM}:WrappedTorchNorm.__new__": functions.torch_norm, f"{_NORM}:L2Norm.forward": functions.l2_norm},
    "rotary": {
        f"{_ROPE}:_apply_rotary_pos_emb_bshd": rotary.rotary,
        f"{_ROPE}:_apply_rotary_pos_emb_thd": rotary.packed_rotary,
    },
    "cross_entropy": {
        "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy": functions.vocab_parallel_loss,
        f"{_FUSIONS}.fused_cross_entropy:fused_vocab_parallel_cross_entropy": functions.fused_vocab_parallel_loss,
    },
    "router": {f"{_MOE}:topk_routing_with_score_function": experts.topk_routing},
    "permute": {f"{_MOE}:permute": experts.permute, f"{_MOE}:unpermute": experts.unpermute},
    "weight_gradient": {},  # without Apex Megatron has no name to replace; see _bindings
}

OPS = tuple(_REPLACEMENTS)

_in_force: list[Replaced] = []


class Applied(Replaced):
    """The names that ``apply`` replaced, and ``undo``; see ``Replaced``."""

    def __init__(self, package: str, bindings: list[Binding], ops: Sequence[str], deterministic: bool) -> None:
        restore = determinism.start() if deterministic else None
        try:
            super().__init__(package, bindings)
        except BaseException:
            if restore is not None:
                restore()
            raise
        self._ops, self._restore = ops, restore

    def undo(self) -> None:
        if self._restore is not None:
            self._restore()
        self._restore = None
        super().undo()

    def unreplaced(self, model: torch.nn.Module) -> dict[str, str]:
        """The modules and configuration fields of a Megatron model that keep it on its own code, and the reasons; with
        ``deterministic``, also what may give other bits on another run."""
        return unreplaced_in(model, self._ops, deterministic=self._restore is not None)


def apply(ops: str | Sequence[str] = "all", exact_megatron: bool = False, *, deterministic: bool = False) -> Applied:
    """Replaces Megatron-core's fused functions by this package's ops, in models built before or after.

    Args:
        ops: ``"all"``, or one or several of ``OPS``:
            ``"bias_gelu"``, ``"bias_swiglu"`` (weighted too), ``"bias_geglu"`` (quick too): the fused activations of
            the MLP and of experts, with ``bias_activation_fusion`` in the configuration;
            ``"bias_dropout_add"``: with ``bias_dropout_fusion`` and without it;
            ``"attention"``: the core attention of the local spec, without scores in memory unless a mask is given;
            ``"softmax"``: ``FusedScaleMaskSoftmax``, on CPU and GPU, any length, for other core attentions;
            ``"norm"``: ``L2Norm``, and ``WrappedTorchNorm`` in models built later, which then supports sequence
            parallelism, zero-centred weights and the flags of Apex's kernels;
            ``"rotary"``: with ``apply_rope_fusion`` off;
            ``"cross_entropy"``: ``vocab_parallel_cross_entropy`` and the fused one;
            ``"router"``: the choice of experts, with ``moe_router_fusion`` off;
            ``"permute"``: tokens by expert and back, with ``moe_permute_fusion`` off;
            ``"weight_gradient"``: ``gradient_accumulation_fusion`` without Apex.
        exact_megatron: run Megatron's own code wherever its convention differs from that of these ops. The differences:

            ===================== =================================== ==============================================
            op                    default                             Megatron (``exact_megatron=True``)
            ===================== =================================== ==============================================
            bias_dropout_add      wider dtype of x and residual       0.16: that of x
            \\                     own masks, 8 bytes saved            torch's masks
            attention             own dropout masks, 8 bytes saved    torch's masks
            attention, softmax    rows without a visible key: zeros   uniform, if a mask is given
            softmax with sinks    reads the scores                    writes the mask over them
            quick GeGLU           clamped after the bias              before it, unlike its own unfused MLP
            rotary                angles in fp32                      rounded to the dtype of the heads
            router                16-bit logits: scores in fp32       rounded before the choice, through 0.17
            permute               16-bit rows added in fp32           rounded after each addition
            cross_entropy         no loss outside the vocabulary      log sum exp(x - max x), and its gradient
            \\                     label smoothing over the            over each rank's part, so that the ranks'
            \\                     vocabulary                          losses differ
            \\                     gradient in the dtype of logits     the fused one rounds it to bfloat16
            ===================== =================================== ==============================================

            In both: GeLU is the tanh form of Megatron's fusion, also if the configuration names ``F.gelu``; sums in
            another order differ by rounding.
        deterministic: the same bits on every run, until ``undo``: torch's deterministic algorithms, and on CUDA
            ``CUBLAS_WORKSPACE_CONFIG``, ``NCCL_ALGO`` and ``NVTE_ALLOW_NONDETERMINISTIC_ALGO``. Unlike under
            Megatron's own mode the fused cross-entropy and the overlap of tensor parallelism (of ``gpt_block_spec``)
            stay on. Set ``deterministic_mode`` in the model's configuration, too. See ``docs/megatron.md``.

    Returns:
        A mapping of the replaced names with ``undo()``, also a context manager. Its ``unreplaced(model)`` lists the
        parts of a model that are not replaced, and why.

    Raises:
        ValueError: unknown ops; or with ``deterministic`` a variable of the environment that is not deterministic, or
            that CUDA or the process group has been started without.
        RuntimeError: applied already and not undone; or this version of Megatron-core lacks a name that the ops
            replace. Then nothing is replaced.
    """
    chosen = OPS if ops == "all" else ([ops] if isinstance(ops, str) else list(ops))
    unknown = [op for op in chosen if op not in _REPLACEMENTS]
    if unknown:
        raise ValueError(f"apply: ops has {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, OPS))}")
    if any(len(replaced) for replaced in _in_force):
        raise RuntimeError("apply: applied already; call undo() of what that call returned first")
    bindings = _bindings(chosen, exact_megatron)
    applied = Applied("megatron", bindings, tuple(dict.fromkeys(chosen)), deterministic)
    _in_force[:] = [applied]
    return applied


def _bindings(chosen: Sequence[str], exact: bool) -> list[Binding]:
    found = {place: (find(place), build) for op in chosen for place, build in _REPLACEMENTS[op].items()}
    layers = find(f"{_LAYERS}:_grad_accum_fusion_available")
    missing = [place.replace(":", ".") for place, (at, _) in found.items() if at is None]
    if "weight_gradient" in chosen and layers is None:
        missing.append(f"{_LAYERS}._grad_accum_fusion_available")
    if missing:
        raise RuntimeError(
            f"apply: megatron-core {megatron.core.__version__} has no {', '.join(missing)}; 0.16 to 0.19 are "
            "supported. Leave out the ops that replace them"
        )
    bindings: list[Binding] = []
    for at, build in found.values():
        assert at is not None
        new = build(at[2], exact)
        if new is not None:
            bindings += [Binding(*at, new)] if isinstance(at[0], type) else holders("megatron", at[2], new)
    if "weight_gradient" in chosen and layers is not None:
        module, flag, available = layers
        extension = weight_gradient.extension
        bindings += [
            Binding(module, flag, available, True),
            Binding(module, _EXTENSION, vars(module).get(_EXTENSION, MISSING), extension),
            Binding(sys.modules, _EXTENSION, sys.modules.get(_EXTENSION, MISSING), extension),
        ]
    return bindings
