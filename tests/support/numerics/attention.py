"""The oracle of block attention, the maths of ``ops/attention/block.py`` in plain PyTorch, and random masks."""

import random
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from parallel_ops._internal.philox import kept_scale
from parallel_ops.ops.attention.ranges import MaskBounds, dense_mask


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


# Kinds of spans of ``random_spans``; convex: the queries that see a key are adjacent too.
CONVEX_SPANS = ("rising", "few edges", "documents")
SPANS = (*CONVEX_SPANS, "any")


def random_spans(draw: random.Random, sq: int, sk: int, kinds: Sequence[str] = SPANS) -> Tensor:
    """First key and end of what each query sees, int32 ``[2, sq]``.

    rising        no bound decreases from query to query; some spans are empty
    few edges     the same, with few different bounds, so that many queries in the middle see no key
    documents     adjacent queries see one document of keys, in any order of documents
    any           any bounds, some of one key, some that end before they begin
    """
    kind = draw.choice(kinds)
    if kind == "documents":
        count = draw.randint(1, 5)
        edges = [[0, *sorted(draw.randint(0, n) for _ in range(count - 1)), n] for n in (sq, sk)]
        bounds: list[tuple[int, int]] = []
        for length, of in zip(numpy.diff(edges[0]), draw.sample(range(count), count), strict=True):
            bounds += [(edges[1][of], edges[1][of + 1])] * int(length)
        return torch.tensor(bounds, dtype=torch.int32).T.contiguous()
    choices = range(sk + 1) if kind != "few edges" else [draw.randint(0, sk) for _ in range(draw.randint(1, 4))]
    first, end = ([draw.choice(choices) for _ in range(sq)] for _ in range(2))
    if kind != "any":
        return torch.tensor([sorted(first), sorted(end)], dtype=torch.int32)
    for i in range(sq):
        if draw.random() < 0.3:
            first[i] = min(first[i], sk - 1)
            end[i] = first[i] + 1
    return torch.tensor([first, end], dtype=torch.int32)


def spans_from_keys(spans: Tensor, sk: int) -> MaskBounds:
    """The mask with the spans of the keys; of a mask that is not convex these mean nothing."""
    here = dense_mask(MaskBounds(spans=spans), spans.shape[1], sk, spans.device)
    first, after = here.int().argmax(0), spans.shape[1] - here.flip(0).int().argmax(0)
    return MaskBounds(spans=spans, query_spans=(torch.stack([first, after]) * here.any(0)).int())
