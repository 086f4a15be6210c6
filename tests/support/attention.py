"""The oracle of block attention: the maths of ops/_attention_block.py in plain PyTorch, in the dtype of its inputs."""

import torch
from torch import Tensor

from parallel_ops._internal.philox import kept_scale


def attention(
    q: Tensor, k: Tensor, v: Tensor, here: Tensor, *, scale: float, softcap: float, kept: Tensor | None, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(out, lse) where ``here[i, j]`` says whether query i sees key j; one that sees nothing has 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    s = torch.einsum("ibhd,jbhd->bhij", q, k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    some = here.any(-1, keepdim=True)
    s = s.masked_fill(~here & some, float("-inf"))  # rows that see nothing get something finite, and drop it
    lse = torch.logsumexp(s.detach().float() if s.dtype.itemsize == 2 else s.detach(), -1)
    share = torch.softmax(s, -1) * some
    if kept is not None:
        share = share * kept * kept_scale(p)
    return torch.einsum("bhij,jbhd->ibhd", share, v), lse.masked_fill(~some[:, 0], float("-inf"))
