"""The backward of ``route`` by PyTorch's ops; the formulas are in ``route.py``."""

import torch
from torch import Tensor

# Added to sums that are divided by, so that rows whose scores are all zero are defined, as DeepSeek-V3 has it.
TINY = 1e-20


def backward_by_torch(
    logits: Tensor, experts: Tensor, grad_weights: Tensor | None, grad_score_sums: Tensor | None,
    grad_z_sum: Tensor | None, sigmoid: bool, top_k_first: bool, normalize: bool, scale: float,
) -> Tensor:  # fmt: skip
    """The gradient of the logits by PyTorch's ops."""

    def centred(grad: Tensor, shares: Tensor) -> Tensor:  # through a division by the sum
        return grad - (grad * shares).sum(-1, keepdim=True)

    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = x.sigmoid() if sigmoid else x.softmax(-1)
    dscores, dx = torch.zeros_like(x), torch.zeros_like(x)
    if grad_weights is not None:
        grad = grad_weights * scale
        if top_k_first and not sigmoid:
            shares = x.gather(1, experts).softmax(-1)
            dx.scatter_(1, experts, shares * centred(grad, shares))
        else:
            chosen = scores.gather(1, experts)
            if normalize:
                total = chosen.sum(-1, keepdim=True) + TINY
                grad = centred(grad, chosen / total) / total
            dscores.scatter_(1, experts, grad)
    if grad_score_sums is not None:
        if sigmoid:
            total = scores.sum(-1, keepdim=True) + TINY
            dscores += centred(grad_score_sums, scores / total) / total
        else:
            dscores += grad_score_sums
    dx += dscores * scores * (1 - scores) if sigmoid else scores * centred(dscores, scores)
    if grad_z_sum is not None:
        dx += 2 * grad_z_sum * x.logsumexp(-1, keepdim=True) * x.softmax(-1)
    return dx.to(logits.dtype)
