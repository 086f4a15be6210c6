"""Losses of post-training from log-probabilities of tokens (``linear_log_probs``), in plain PyTorch.

    DPO     - log sigmoid(beta ((pi_c - pi_r) - (ref_c - ref_r)))           Rafailov et al., arXiv:2305.18290
    GRPO    - min(r A, clip(r, 1 - low, 1 + high) A) + k KL                 Shao et al., arXiv:2402.03300
            r = exp(pi - old),  KL = exp(ref - pi) - (ref - pi) - 1         Schulman's estimator, never negative

Separate clip bounds and the mean over all tokens are DAPO's (Yu et al., arXiv:2503.14476).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The mean loss of direct preference optimisation.

    Args:
        chosen, rejected: ``[b]``, floating: log-probabilities of whole answers under the policy, sums over tokens.
        reference_chosen, reference_rejected: ``[b]``, the same under the reference model.
        beta: scale of the rewards; above 0.
        label_smoothing: the share of preferences that are assumed to be the wrong way round, in [0, 0.5): TRL's for
            ``"sigmoid"`` (conservative DPO), not for ``"robust"``.

    Returns:
        A scalar. No gradient flows to the reference.

    Raises:
        ValueError: shapes that differ, a ``beta`` or ``label_smoothing`` outside its range.

    Sharding: all over the batch; the mean of shards of equal size is the mean over ranks.

    Examples:
        >>> import torch
        >>> from parallel_ops import dpo_loss
        >>> chosen, rejected = torch.tensor([-4.0]), torch.tensor([-6.0])
        >>> bool(dpo_loss(chosen, rejected, chosen, rejected) == torch.tensor(2.0).log())
        True
    """
    for name, t in (
        ("rejected", rejected), ("reference_chosen", reference_chosen), ("reference_rejected", reference_rejected)
    ):  # fmt: skip
        _check_shape("dpo_loss", name, t, "chosen", chosen)
    if not beta > 0.0:
        raise ValueError(f"dpo_loss: beta must be above 0, got {beta}")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"dpo_loss: label_smoothing must be from 0 to below 0.5, got {label_smoothing}")
    margin = beta * ((chosen - rejected) - (reference_chosen - reference_rejected).detach())
    return (-(1.0 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)).mean()


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_weight: float = 0.0,
    mean: Literal["token", "sequence"] = "token",
    token_dim: int = 0,
) -> Tensor:
    """The mean loss of group relative policy optimisation.

    Args:
        log_probs: ``[s, b]`` (or ``[b, s]`` with ``token_dim=1``), floating: the policy's, of each token.
        old_log_probs: in the same shape, under the policy that drew the tokens.
        advantages: ``[b]``, one for each sequence, or in the shape of ``log_probs``.
        mask: bool, in the same shape: tokens that count; ``None`` for all.
        reference_log_probs: in the same shape, under the reference model; needed with ``kl_weight``.
        clip_low, clip_high: the ratio of probabilities is clipped to ``[1 - clip_low, 1 + clip_high]``.
        kl_weight: weight of the KL divergence from the reference.
        mean: over all tokens that count, or over sequences of their means (a sequence without tokens counts as 0).
        token_dim: 0 or 1, the dimension of tokens.

    Returns:
        A scalar; 0 if no token counts. Gradients flow to ``log_probs`` alone.

    Raises:
        ValueError: shapes that differ, options outside their range.

    Sharding: all over the batch; the mean over tokens of shards needs the number of tokens of all ranks.

    Examples:
        >>> import torch
        >>> from parallel_ops import grpo_loss
        >>> log_probs = torch.randn(5, 2)
        >>> bool(torch.isclose(grpo_loss(log_probs, log_probs, torch.tensor([1.0, 3.0])), torch.tensor(-2.0)))
        True
    """
    op = "grpo_loss"
    if log_probs.dim() != 2 or token_dim not in (0, 1):
        raise ValueError(
            f"{op}: log_probs must have two dimensions and token_dim must be 0 or 1, got {list(log_probs.shape)} and "
            f"{token_dim}"
        )
    for name, t in (("old_log_probs", old_log_probs), ("mask", mask), ("reference_log_probs", reference_log_probs)):
        if t is not None:
            _check_shape(op, name, t, "log_probs", log_probs)
    if mask is not None and mask.dtype is not torch.bool:
        raise ValueError(f"{op}: mask must be bool, got {mask.dtype}")
    if advantages.dim() == 1 and advantages.shape[0] == log_probs.shape[1 - token_dim]:
        advantages = advantages.unsqueeze(token_dim)
    else:
        _check_shape(op, "advantages", advantages, "log_probs (or one a sequence)", log_probs)
    if mean not in ("token", "sequence"):
        raise ValueError(f"{op}: mean must be 'token' or 'sequence', got {mean!r}")
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0 and kl_weight >= 0.0):
        raise ValueError(
            f"{op}: clip_low must be from 0 to 1, clip_high and kl_weight at least 0, got {clip_low}, {clip_high}, "
            f"{kl_weight}"
        )
    if kl_weight and reference_log_probs is None:
        raise ValueError(f"{op}: kl_weight needs reference_log_probs")
    kept = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    # Masked first: a difference of what does not count may overflow, and 0 times infinity is NaN.
    ratio = torch.where(kept, log_probs - old_log_probs.detach(), 0.0).exp()
    advantages = advantages.detach()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    if kl_weight and reference_log_probs is not None:
        further = torch.where(kept, reference_log_probs.detach() - log_probs, 0.0)
        loss = loss + kl_weight * (further.exp() - further - 1.0)
    loss = torch.where(kept, loss, 0.0)
    if mean == "token":
        return loss.sum() / kept.sum().clamp(min=1)
    of_sequences = loss.sum(token_dim) / kept.sum(token_dim).clamp(min=1)
    return of_sequences.sum() / max(1, of_sequences.numel())  # of no sequence the mean is NaN


def _check_shape(op: str, name: str, t: Tensor, other_name: str, other: Tensor) -> None:
    if t.shape != other.shape:
        raise ValueError(f"{op}: {name} must have the shape of {other_name}, {list(other.shape)}, got {list(t.shape)}")
