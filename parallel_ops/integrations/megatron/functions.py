"""Replacements of Megatron-core's fused functions, with Megatron's names and arguments.

Each function below takes the original and ``exact`` (see ``apply``) and returns the replacement, or ``None`` if
``exact`` leaves nothing to replace. A replacement calls the original for what the op does not support: options of newer
versions, storage of inputs in fp8, offloading.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import attention_mask_func
from torch import Tensor

from parallel_ops import ops
from parallel_ops.integrations.megatron._options import given
from parallel_ops.tensor_parallel import vocab_parallel_cross_entropy

Function = Callable[..., Any]


def bias_gelu(original: Function, exact: bool) -> Function:
    """The tanh form, as in Megatron's own fusion, whatever activation the configuration names."""

    def bias_gelu_impl(input: Tensor, bias: Tensor) -> Tensor:
        return ops.bias_gelu(input, bias)

    return bias_gelu_impl


def bias_swiglu(original: Function, exact: bool) -> Function:
    def bias_swiglu_impl(input: Tensor, bias: Tensor | None, *storage: Any, **options: Any) -> Tensor:
        if any(storage) or given(options):
            return original(input, bias, *storage, **options)
        return ops.bias_swiglu(input, bias)

    return bias_swiglu_impl


def weighted_bias_swiglu(original: Function, exact: bool) -> Function:
    def weighted_bias_swiglu_impl(
        input: Tensor, bias: Tensor | None, weights: Tensor, *storage: Any, **options: Any
    ) -> Tensor:
        a_row = weights.shape in (input.shape[:-1], (*input.shape[:-1], 1))
        if bias is not None or not a_row or any(storage) or given(options):
            return original(input, bias, weights, *storage, **options)
        return ops.bias_swiglu(input, None, weights=weights)

    return weighted_bias_swiglu_impl


def bias_geglu(original: Function, exact: bool) -> Function:
    def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
        gate, up = (input if bias is None else input + bias).chunk(2, dim=-1)
        return ops.gelu_mul(gate, up)

    return bias_geglu_impl


def weighted_bias_quick_geglu(original: Function, exact: bool) -> Function:
    """Clamped after the bias is added, as in Megatron's unfused MLP; its fusion clamps before."""

    def weighted_bias_quick_geglu_impl(
        input: Tensor,
        bias: Tensor | None,
        weights: Tensor,
        fp8_input_store: bool = False,
        linear_offset: float = 0.0,
        clamp_value: float | None = None,
    ) -> Tensor:
        fits = weights.shape in (input.shape[:-1], (*input.shape[:-1], 1)) and (bias is None or bias.dim() == 1)
        if not fits or fp8_input_store or (exact and bias is not None and clamp_value is not None):
            return original(input, bias, weights, fp8_input_store, linear_offset, clamp_value)
        return ops.bias_swiglu(
            input, bias, weights=weights, alpha=1.702, limit=clamp_value, up_offset=float(linear_offset)
        )

    return weighted_bias_quick_geglu_impl


def bias_dropout_add(training: bool, original: Function, exact: bool) -> Function:
    """The replacement for one value of ``training``."""
    narrows = _narrows()

    def bias_dropout_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        fits = x.shape == residual.shape and (bias is None or bias.dim() == 1)
        # Megatron draws torch's masks; its result dtype depends on its version.
        drops = training and prob > 0.0
        if not fits or (exact and (drops or x.dtype != residual.dtype)):
            return original(x_with_bias, residual, prob)
        if narrows and x.dtype != residual.dtype and _stages() > 1:
            # The next pipeline stage of 0.16 expects the original's dtype.
            return original(x_with_bias, residual, prob)
        # In place where the original is: callers do not use x again.
        over = not training and torch.promote_types(x.dtype, residual.dtype) is x.dtype and x.is_contiguous()
        over = over and not any(t is not None and t.requires_grad for t in (x, bias, residual))
        return ops.bias_dropout_add(x, bias, residual, prob, training=training, inplace=over)

    return bias_dropout_add


def _stages() -> int:
    group = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
    return 1 if group is None else group.size()


def bias_dropout_add_unfused(original: Function, exact: bool) -> Function:
    by_training = {training: bias_dropout_add(training, original(training), exact) for training in (True, False)}

    def bias_dropout_add_unfused(training: bool) -> Function:
        return by_training[bool(training)]

    return bias_dropout_add_unfused


def _narrows() -> bool:
    """True if the original returns the dtype of x, as 0.16 does."""
    from megatron.core.fusions import fused_bias_dropout

    x, residual = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    return fused_bias_dropout._bias_dropout_add_func((x, None), residual, 0.0, True).dtype is torch.bfloat16


def scale_mask_softmax(original: Function, exact: bool) -> Function:
    """``FusedScaleMaskSoftmax.forward``. A row without a visible key is zeros (uniform in the original), and a mask is
    applied beside a window too (the original ignores it, through 0.19)."""

    def forward(self: Any, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        scale, (sq, sk) = 1.0 if self.scale is None else float(self.scale), input.shape[-2:]
        causal = self.attn_mask_type == AttnMaskType.causal
        window = self.window_size
        # The original writes the mask over the scores, which its callers can see.
        if exact and (softmax_offset is not None or (window is not None and mask is not None)):
            return original(self, input, mask, softmax_offset)
        known = mask is None or (self.mask_func is attention_mask_func and not exact)
        if softmax_offset is not None:
            softmax_offset = softmax_offset.to(input.device)
        if window is not None and mask is None and window[1] == 0 and window[0] >= 0 and sq <= sk:
            probs = ops.scaled_causal_softmax(input, scale, window=window[0] + 1, sink=softmax_offset)
        elif window is None and mask is None and causal and sq == sk:
            probs = ops.scaled_causal_softmax(input, scale, sink=softmax_offset)
        elif window is None and mask is None and (not causal or sq == 1):
            probs = ops.scaled_masked_softmax(input, None, scale, sink=softmax_offset)
        elif window is not None and known and min(window) >= 0 and sq <= sk:
            probs = ops.scaled_masked_softmax(input, mask, scale, window=tuple(window), sink=softmax_offset)
        elif window is None and mask is not None and known:
            probs = ops.scaled_masked_softmax(input, mask, scale, sink=softmax_offset)
        else:
            return original(self, input, mask, softmax_offset)
        if self.input_in_float16 and self.softmax_in_fp32:
            return probs.to(torch.float16 if self.input_in_fp16 else torch.bfloat16)
        return probs

    return forward


def vocab_parallel_loss(original: Function, exact: bool) -> Function | None:
    """Both vocab-parallel losses. The gradient is written over the logits, as the original does with fp32 logits.

    Label smoothing gives every class but the target the original's share, over the whole vocabulary for any number of
    ranks. Targets outside the vocabulary have no loss and no gradient.
    """
    if exact:
        return None

    def loss(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        tp_group: torch.distributed.ProcessGroup | None = None,
    ) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group
        ranks = group.size()
        if label_smoothing:
            vocab = vocab_parallel_logits.shape[-1] * ranks
            label_smoothing *= vocab / (vocab - 1)
        return vocab_parallel_cross_entropy(
            vocab_parallel_logits,
            target,
            group=None if ranks == 1 else group,
            label_smoothing=label_smoothing,
            ignore_out_of_range=True,
            reduction="none",
            inplace_backward=True,
        )

    return loss


def fused_vocab_parallel_loss(original: Function, exact: bool) -> Function | None:
    loss = vocab_parallel_loss(original, exact)
    if loss is None:
        return None

    def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
        return loss(vocab_parallel_logits, target, 0.0, tp_group)

    return fused_vocab_parallel_cross_entropy


def l2_norm(original: Function, exact: bool) -> Function:
    def forward(self: Any, x: Tensor) -> Tensor:
        return ops.rms_norm(x, None, self.eps)

    return forward


def torch_norm(original: Any, exact: bool) -> Any:
    """``WrappedTorchNorm.__new__``."""
    from parallel_ops.integrations.megatron.modules import Norm

    return staticmethod(lambda cls, *args, **kwargs: Norm(*args, **kwargs))
