"""The oracle of the tests of context parallelism, and what each rank does in them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.context_parallel.batch_layout import layout_for
from parallel_ops.context_parallel.layouts import SequenceLayout
from parallel_ops.context_parallel.schedule.ulysses import (
    Placement,
    attention_backward,
    attention_forward,
    tensors_of,
)
from parallel_ops.context_parallel.token_ranges import layout_of
from parallel_ops.ops.attention.block import Dropout, dropout_keep_mask
from parallel_ops.ops.attention.options import AttentionOptions

SEED = 1234567
KINDS = ("zigzag", "striped", "contiguous")
ANY = (*KINDS, "balanced", "scattered")


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention and how it is shared out."""

    length: int
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 4
    head_dim_v: int | None = None  # of values, if other than those of keys
    causal: bool = True
    window: int | None = None
    sink: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    documents: tuple[int, ...] | None = None  # their lengths
    ranges: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # first and last key of each query
    layout: str = "zigzag"
    ulysses_degree: int = 1
    all_gather: bool = False
    ranks_per_node: int = 1
    backend: str = "auto"

    @property
    def scale(self) -> float:
        return 0.7 / math.sqrt(self.head_dim)

    @property
    def cu_seqlens(self) -> Tensor | None:
        if self.documents is None:
            return None
        return torch.tensor([0, *self.documents], dtype=torch.int32).cumsum(0).to(torch.int32)

    def shared_by(self, size: int) -> SequenceLayout:
        """Of kind ``"scattered"``: three chunks a rank in any order."""
        if self.layout == "scattered":
            owners = [
                n % size for n in torch.randperm(3 * size, generator=torch.Generator().manual_seed(size)).tolist()
            ]
            return SequenceLayout(self.length, size, layout_of(owners))
        o = self.options()
        return layout_for(self.length, size, self.layout, ((o.left, o.right, 1),), key_ranges=o.ranges(self.length))

    def tensors(self, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
        """q, k, v, sink and the gradient of the output, of the whole sequence."""
        generator = torch.Generator().manual_seed(self.length)
        d, d_v = self.head_dim, self.head_dim_v or self.head_dim
        shapes = [(self.heads, d), (self.kv_heads, d), (self.kv_heads, d_v)]
        q, k, v = (torch.randn(self.length, self.batch, *shape, generator=generator).to(dtype) for shape in shapes)
        sink = torch.randn(self.heads, generator=generator).to(dtype) if self.sink else None
        return [q, k, v, sink, torch.randn(*q.shape[:3], d_v, generator=generator).to(dtype)]

    def options(self, sink: Tensor | None = None) -> AttentionOptions:
        return AttentionOptions(
            sink=sink,
            cu_seqlens=self.cu_seqlens,
            key_ranges=None if self.ranges is None else torch.tensor(self.ranges, dtype=torch.int32),
            dropout_seed=torch.tensor([SEED]) if self.dropout_p else None,
            softmax_scale=self.scale,
            left=None if self.window is None else self.window - 1,
            right=0 if self.causal else None,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            backend=self.backend,
        )


def full_attention(case: Case, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
    """All scores at once, in plain torch."""
    group = case.heads // case.kv_heads
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * case.scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    i, j = torch.arange(case.length)[:, None], torch.arange(case.length)
    sees = torch.ones(case.length, case.length, dtype=torch.bool)
    if case.causal:
        sees &= j <= i
    if case.window is not None:
        sees &= j > i - case.window
    if case.documents is not None:
        of = torch.repeat_interleave(torch.arange(len(case.documents)), torch.tensor(case.documents))
        sees &= of[:, None] == of
    if case.ranges is not None:
        first, last = torch.tensor(case.ranges)
        sees &= (j >= first[:, None]) & (j <= last[:, None])
    scores = scores.masked_fill(~sees, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    p = scores.softmax(-1).nan_to_num()  # of rows that see nothing
    p = p[..., : case.length]
    if case.dropout_p:
        places = TokenRange(0, case.length)
        mask = dropout_keep_mask(Dropout(case.dropout_p, torch.tensor([SEED]), places, places), *p.shape)
        p = p * mask / (1 - case.dropout_p)
    return torch.einsum("bhqk,kbhd->qbhd", p, v)


def oracle(case: Case, tensors: list[Tensor | None]) -> list[Tensor]:
    """(O, dq, dk, dv, dsink), in fp64."""
    *inputs, grad = [None if t is None else t.double() for t in tensors]
    leaves = [None if t is None else t.clone().requires_grad_() for t in inputs]
    out = full_attention(case, *leaves)
    out.backward(grad)
    return [out.detach(), *(t.grad for t in leaves if t is not None)]


def shared(
    case: Case, transport: Any, tensors: list[Tensor | None], between: Callable[[], object] = lambda: None,
    options: AttentionOptions | None = None,
) -> list[Tensor]:  # fmt: skip
    """(O, dq, dk, dv, dsink) of this rank's tokens, over any transport; ``between`` is called before the backward."""
    layout = case.shared_by(transport.size)
    q, k, v, sink, grad = tensors
    q, k, v, grad = (layout.shard(t, transport.rank) for t in (q, k, v, grad))
    placement = Placement("test", case.length, layout.cp_layout, case.ulysses_degree, case.all_gather)
    rest = placement, transport, options or case.options(sink)
    out, statistics, held = attention_forward(*rest, q, k, v, ranks_per_node=case.ranks_per_node)
    if case.ulysses_degree > 1:
        q, k, v = tensors_of(held, *((t.shape[2] // case.ulysses_degree, t.shape[3]) for t in (q, k, v)))
    between()
    *gradients, dsink = attention_backward(*rest, grad, q, k, v, out, statistics, ranks_per_node=case.ranks_per_node)
    return [out, *gradients, *([] if dsink is None else [dsink])]


def joined(case: Case, results: list[list[Tensor]]) -> list[Tensor]:
    """The whole from the results of all ranks; their sum for the sink."""
    layout = case.shared_by(len(results))
    columns = list(zip(*results, strict=True))
    return [*(layout.join(column) for column in columns[:4]), *(torch.stack(column).sum(0) for column in columns[4:])]


def inputs(
    rank: int, s: int = 4, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32, d_v: int = 6
) -> list[Tensor]:
    """Leaves q, k and v of one rank."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(s, 2, *shape) for shape in ((heads, 8), (kv_heads, 8), (kv_heads, d_v))]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def cases(draw):
    """Any attention, shared out in any way: (case, ranks)."""
    size = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16]))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    ulysses_degree = draw(st.sampled_from([n for n in divisors(size) if kv_heads % n == 0]))
    length = draw(st.integers(0, 40))
    documents = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
        documents = tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
    ranges = None
    if documents is None and draw(st.booleans()):
        bounds = st.lists(st.integers(0, length), min_size=length, max_size=length)
        first, end = sorted(draw(bounds)), sorted(draw(bounds))
        ranges = tuple(first), tuple(n - 1 for n in end)
    causal = draw(st.booleans())
    case = Case(
        length,
        batch=draw(st.sampled_from([1, 2])),
        heads=kv_heads * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        head_dim_v=draw(st.sampled_from([None, 3, 6])),
        causal=causal,
        window=draw(st.one_of(st.none(), st.integers(1, 45))) if causal else None,
        sink=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        dropout_p=draw(st.sampled_from([0.0, 0.3])),
        documents=documents,
        ranges=ranges,
        layout=draw(st.sampled_from(ANY)),
        ulysses_degree=ulysses_degree,
        all_gather=ulysses_degree == 1 and draw(st.booleans()),
        ranks_per_node=draw(st.sampled_from(divisors(size))),
    )
    return case, size
