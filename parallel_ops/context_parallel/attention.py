"""Attention over a sequence that the ranks of a group share.

Each rank has some of the tokens and calls this with the queries, keys and values of these. Four ways lead to the same
result, and ``algorithm`` chooses one:

    ring         keys and values travel while blocks are computed, and each block is merged into a running result
    all_to_all   ranks change tokens for heads, attend to the whole sequence in their heads, and change back
    hybrid       neighbouring ranks do the latter, and the ring goes around what they are to each other
    gathered     all keys and values are fetched first, for few kv heads or many documents

Bytes that a rank sends, forward and backward, and the length above which a ring hides them: ``cost``. How it is done:
``_ring`` and ``_heads``. A step's result is merged in fp32 and a gradient of keys travels in fp32 to the rank whose
keys they are, so the error does not grow with the number of ranks. Sources: Liu et al., arXiv:2310.01889 (ring
attention); Jacobs et al., arXiv:2309.14509 (Ulysses); Fang and Zhao, arXiv:2405.07719 (their product); Dubey et al.,
arXiv:2407.21783 (gathered keys); zigzag is Zhu's, github.com/zhuzilin/ring-flash-attention.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm._agreement import Call, agree, agreed_error, announcing, sends
from parallel_ops.comm._arguments import check_tensor
from parallel_ops.comm._exchange import in_flight
from parallel_ops.comm._group import group_name, group_rank, group_size, resolve_group
from parallel_ops.comm._rates import rates_of
from parallel_ops.comm.collectives import all_gather
from parallel_ops.comm.transports import transport_of
from parallel_ops.context_parallel._blocks import Options
from parallel_ops.context_parallel._over_transport import Attention
from parallel_ops.context_parallel._places import LAYOUTS, lengths, runs, tokens
from parallel_ops.context_parallel.cost import AttentionShape, Choice, Link, Way, chosen
from parallel_ops.context_parallel.layouts import SequenceLayout
from parallel_ops.ops._attention_check import check_attention
from parallel_ops.ops._dropout import dropout_seed
from parallel_ops.ops._registration import register
from parallel_ops.ops.flash_attention import cast_attention, flash_attention, flash_attention_reference

_NAME = "ring_attention"

Layout = Literal["zigzag", "striped", "contiguous"]
Algorithm = Literal["auto", "ring", "all_to_all", "hybrid", "gathered"]
# What attention kernels reach of the rate of large products.
_OF_PRODUCTS = 0.75
# As many tokens a rank as a choice is made for where a graph is made.
_COMPILED_TOKENS = 8192

_ALGORITHMS = ("auto", "ring", "all_to_all", "hybrid", "gathered")


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    layout: Layout = "zigzag",
    algorithm: Algorithm = "auto",
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    first_head: int = 0,
    length: int | None = None,
    head_ranks: int | None = None,
) -> Tensor:
    """``flash_attention`` of the whole sequence, of which each rank has a part.

    ``functools.partial(ring_attention, group=group, layout=layout)`` is a core for ``ParallelSelfAttention``.

    Args:
        q: ``[s, b, heads, d]``, this rank's tokens, in the order of the sequence; float32, float16 or bfloat16, on CPU
            float64 too; any strides.
        k, v: ``[s, b, kv_heads, d]``, the same tokens; ``kv_heads`` divides ``heads``. Never repeated: what travels is
            these.
        group: the ranks that share the sequence; ``None``, or one rank, is ``flash_attention``.
        layout: which tokens a rank has; see ``SequenceLayout``, which splits and joins them.
        algorithm: ``"ring"``; ``"all_to_all"``, which needs kv heads that the ranks divide, or that divide the ranks:
            the rest is a ring; ``"hybrid"``: all-to-all among ``head_ranks`` neighbours, a ring around; ``"gathered"``;
            ``"auto"``: the fastest of them by ``cost.chosen`` (``ring_attention_choice`` says why).
        causal, scale, window, sink, softcap, dropout_p: as of ``flash_attention``; the same on every rank, sink too.
        seed: as of ``flash_attention``, the same on every rank, and the mask is that of one rank with the whole
            sequence. ``None`` draws it from the default generator, which must be in the same state on every rank.
        cu_seqlens: ``[documents + 1]``, int32 or int64, where documents begin in the whole sequence, from 0 to its
            length; the same on every rank. Documents may be empty, and lie across ranks as they come.
        first_head: where these heads begin among those of all ranks, which is what dropout draws by.
        length: tokens of the whole sequence; ``None`` where all ranks have as many. Otherwise ``s`` must be what the
            layout gives this rank, 0 for some if there are fewer tokens than ranks.
        head_ranks: for ``"hybrid"``: how many ranks share out the heads, a divisor of ``kv_heads`` and of the group's
            size; ``None`` for the largest below the group's size.

    Returns:
        ``[s, b, heads, d]``, the dtype of q. Under autocast q, k and v are cast to the autocast dtype.

    Raises:
        TypeError, ValueError: on every rank and before data moves, also where the ranks disagree. On CPU every call is
            compared, values of ``seed`` and ``cu_seqlens`` included; on CUDA the first one of its kind, without them.
        PeerError: a rank is gone or does not come within the transport's timeout.

    Sharding: q, k, v and the result S(0) over group, in the tokens of the layout. The gradients of q, k and v are
    complete. That of sink is what this rank's tokens give, so it is summed over group like that of any weight that is
    used on other tokens by every rank.
    """
    name = group_name(_NAME, group)
    if group is None or name is None:
        _check_placement(q, group, layout, algorithm, length, head_ranks)
        return flash_attention(
            q, k, v, causal=causal, scale=scale, window=window, sink=sink, softcap=softcap, dropout_p=dropout_p,
            seed=seed, cu_seqlens=cu_seqlens, first_head=first_head,
        )  # fmt: skip
    with announcing(_NAME, group, q, asks=True):
        check_tensor(_NAME, q, group)
        check_attention(_NAME, q, k, v, causal, scale, window, sink, softcap, cu_seqlens)
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"{_NAME}: k must have the {q.shape[0]} tokens of q, got {k.shape[0]}")
        if q.is_cuda and q.dtype is torch.float64:
            raise TypeError(f"{_NAME}: q must be float32, float16 or bfloat16 on a GPU, got {q.dtype}")
        drawn = dropout_seed(_NAME, "dropout_p", dropout_p, seed, "q", q)
        _check_placement(q, group, layout, algorithm, length, head_ranks)
        documents = cu_seqlens is not None
        way = _way(q, k, group, layout, algorithm, causal, window, documents, length, head_ranks)
    held = way.head_ranks * q.shape[0]
    if length is not None and way.head_ranks > 1:
        held = tokens(runs(layout, length, group.size(), group.rank(), way.head_ranks))
    whole = q.shape[0] * group.size() if length is None else length
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sink))
    sink = None if sink is None else sink.to(torch.promote_types(q.dtype, torch.float32))
    out, *_ = _op(
        q, k, v, sink, drawn, cu_seqlens, name, whole, held, layout, *way, causal,
        1 / math.sqrt(q.shape[3]) if scale is None else scale, window, softcap or 0.0,
        0.0 if drawn is None else dropout_p, first_head, gradients,
    )  # fmt: skip
    return out


def ring_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    layout: Layout = "zigzag",
    length: int | None = None,
    **options: Any,
) -> Tensor:
    """The same in plain PyTorch: everything is gathered, all scores are in memory. Second derivatives too."""
    size = group_size(group)
    whole = SequenceLayout(q.shape[0] * size if length is None else length, size, layout)
    gathered = (all_gather(t, group, sizes=whole.lengths).split(list(whole.lengths)) for t in (q, k, v))
    out = flash_attention_reference(*(whole.join(shards) for shards in gathered), **options)
    return whole.shard(out, group_rank(group))


def ring_attention_choice(
    q: Tensor,
    k: Tensor,
    *,
    group: ProcessGroup | None,
    layout: Layout = "zigzag",
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    length: int | None = None,
) -> Choice:
    """What ``ring_attention`` does with these arguments and ``algorithm="auto"``, and why. Nothing is sent.

    Returns:
        ``way``: ranks that share out the heads, and whether keys are gathered; ``why``: all ways with what each takes.
    """
    _check_placement(q, group, layout, "auto", length, None)
    shape = _shape(q, k, group, layout, causal, window, cu_seqlens is not None, length)
    return chosen(shape, _link(q, group))


def _check_placement(
    q: Tensor, group: ProcessGroup | None, layout: str, algorithm: str, length: int | None, head_ranks: int | None
) -> None:
    """What one rank can see to be wrong by itself, and is wrong on one rank too."""
    if layout not in LAYOUTS:
        raise ValueError(f"{_NAME}: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"{_NAME}: algorithm must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}")
    if head_ranks is not None:
        if not isinstance(head_ranks, int) or isinstance(head_ranks, bool):
            raise TypeError(f"{_NAME}: head_ranks must be an int or None, got {type(head_ranks).__name__}")
        if algorithm != "hybrid":
            raise ValueError(f'{_NAME}: head_ranks is for algorithm="hybrid", got {head_ranks} with {algorithm!r}')
    if length is None or torch.compiler.is_compiling():
        return
    if not isinstance(length, int) or isinstance(length, bool):
        raise TypeError(f"{_NAME}: length must be an int or None, got {type(length).__name__}")
    if length < 0:
        raise ValueError(f"{_NAME}: length must not be negative, got {length}")
    size, rank = group_size(group), group_rank(group)
    own = tokens(runs(layout, length, size, rank))
    if q.shape[0] != own:
        raise ValueError(
            f"{_NAME}: of length={length} tokens in {layout} layout rank {rank} of {size} has {own}, but q has "
            f"{q.shape[0]}; split them with split_sequence or SequenceLayout"
        )


def _shape(
    q: Tensor, k: Tensor, group: ProcessGroup | None, layout: str, causal: bool, window: int | None, documents: bool,
    length: int | None,
) -> AttentionShape:  # fmt: skip
    s, batch, heads, head_dim = q.shape
    size = group_size(group)
    return AttentionShape(
        length=s * size if length is None else length,
        ranks=size,
        batch=batch,
        heads=heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        itemsize=q.element_size(),
        layout=layout,
        causal=causal,
        window=window,
        documents=documents,
    )


def _link(q: Tensor, group: ProcessGroup | None) -> Link | None:
    """What is known of the device and of the group's links; ``None`` on a CPU."""
    rates = None if group is None else rates_of(q.device, q.dtype, group)
    if rates is None:
        return None
    return Link(_OF_PRODUCTS * rates.flops * rates.processors, rates.bandwidth, rates.latency)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _head_ranks_of_least_bytes(ranks: int, heads: int, kv_heads: int, causal: bool, window: int | None) -> int:
    """The choice where a graph is made, which must not depend on a length that the graph has as a symbol: by bytes,
    which grow with the length whatever the way."""
    shape = AttentionShape(
        length=ranks * _COMPILED_TOKENS, ranks=ranks, batch=1, heads=heads, kv_heads=kv_heads, head_dim=64, itemsize=2,
        causal=causal, window=window,
    )  # fmt: skip
    return chosen(shape, None).way.head_ranks


def _way(
    q: Tensor, k: Tensor, group: ProcessGroup, layout: str, algorithm: str, causal: bool, window: int | None,
    documents: bool, length: int | None, head_ranks: int | None,
) -> Way:  # fmt: skip
    size, heads = group.size(), k.shape[2]
    if algorithm == "auto":
        if torch.compiler.is_compiling():
            return Way(_head_ranks_of_least_bytes(size, q.shape[2], heads, causal, window), False)
        return chosen(_shape(q, k, group, layout, causal, window, documents, length), _link(q, group)).way
    if algorithm in ("ring", "gathered"):
        return Way(1, algorithm == "gathered")
    if algorithm == "all_to_all":
        head_ranks = min(size, heads)
        if size % head_ranks or heads % head_ranks:
            raise ValueError(
                f"{_NAME}: all_to_all needs kv heads that {size} ranks divide, or that divide these, got {heads}; "
                'use algorithm="hybrid", "ring" or "gathered"'
            )
        return Way(head_ranks, False)
    if head_ranks is None:
        found = [n for n in range(2, size) if size % n == 0 and heads % n == 0]
        if not found:
            raise ValueError(
                f"{_NAME}: hybrid needs head_ranks between 1 and {size} that divide {size} ranks and {heads} kv heads, "
                'and there are none; use algorithm="ring", "all_to_all" or "gathered"'
            )
        return Way(found[-1], False)
    if head_ranks < 1 or size % head_ranks or heads % head_ranks:
        raise ValueError(
            f"{_NAME}: head_ranks must divide the {size} ranks of the group and the {heads} kv heads, got {head_ranks}"
        )
    return Way(head_ranks, False)


class _Call(NamedTuple):
    """The arguments of the op that are not tensors, of the forward and the backward."""

    group: str
    length: int
    layout: str
    head_ranks: int
    gathered: bool
    causal: bool
    scale: float
    window: int | None
    softcap: float
    dropout_p: float
    first_head: int

    def attention(self, seed: Tensor | None, cu_seqlens: Tensor | None) -> Attention:
        options = Options(
            self.causal, self.window, self.scale, self.softcap, self.dropout_p, seed, cu_seqlens, self.first_head
        )
        way = Way(self.head_ranks, self.gathered)
        return Attention(_NAME, transport_of(resolve_group(self.group)), self.length, self.layout, way, options)

    def agree(
        self, q: Tensor, k: Tensor, sink: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, gradients: bool
    ) -> None:
        """The ranks make the same call: else all raise."""
        group = resolve_group(self.group)
        transport, size = transport_of(group), group.size()
        # Values can be read without waiting for a device on a CPU alone.
        documents = None if cu_seqlens is None or cu_seqlens.is_cuda else tuple(cu_seqlens.tolist())
        drawn = None if seed is None or seed.is_cuda else seed.item()
        way = Way(self.head_ranks, self.gathered).name(size)
        s, *rest = q.shape
        options = (*rest, k.shape[2], *self[1:], sink is None, cu_seqlens is None, gradients)
        # Cut off where the message ends, so with what differs most often first.
        text = (
            f"{way} in {self.layout} over {transport.capabilities.name}, q of {[s, *rest]} {q.dtype}, "
            f"{k.shape[2]} kv heads, length={self.length}, causal={self.causal}, window={self.window}, "
            f"requires_grad={gradients}, dropout_p={self.dropout_p:.4g}, seed={drawn}, documents={documents}, "
            f"sink={sink is not None}, softcap={self.softcap:.4g}, scale={self.scale:.4g}"
        )
        same = (q.dtype, *options, documents, drawn, transport.capabilities.name, in_flight(transport))
        answer = agree(group, Call(_NAME, same, text, (s,)), q.device)
        have = [s] if answer is None else [n for (n,) in answer]
        want = lengths(self.layout, self.length, size)
        if answer is not None and have != list(want):
            raise agreed_error(
                group,
                f"{_NAME}: the ranks have {have} tokens, but of length={self.length} in {self.layout} layout they have "
                f"{list(want)}",
            )
        if documents is not None and (
            documents[0] != 0 or documents[-1] != self.length or sorted(documents) != list(documents)
        ):
            raise agreed_error(
                group,
                f"{_NAME}: cu_seqlens must rise from 0 to {self.length}, the tokens of all ranks, got {documents}",
            )


@sends
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, group: str,
    length: int, held: int, *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *options, gradients = arguments
    call = _Call(group, length, *options)
    call.agree(q, k, sink, seed, cu_seqlens, gradients)
    return call.attention(seed, cu_seqlens).forward(q, k, v, sink)


@sends
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor | None,
    cu_seqlens: Tensor | None, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    attention = _Call(*arguments).attention(seed, cu_seqlens)
    *gradients, dsink = attention.backward(grad, q, k, v, sink, out, lse)
    return *gradients, lse.new_empty(0) if dsink is None else dsink


def _fake(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, group: str,
    length: int, held: int, layout: str, head_ranks: int, *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    s, b, h, d = q.shape
    lse = q.new_empty((b, h, s), dtype=torch.promote_types(q.dtype, torch.float32))
    kept = q.new_empty((held, b, (h + 2 * k.shape[2]) // head_ranks, d) if head_ranks > 1 else 0)
    return q.new_empty(q.shape), lse, kept


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor | None,
    cu_seqlens: Tensor | None, group: str, length: int, layout: str, head_ranks: int, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    s, b, _, d = grad.shape
    gradients = (t.new_empty((s, b, t.shape[2] * head_ranks, d)) for t in (q, k, v))
    return *gradients, lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, seed, cu_seqlens, group, length, _, *arguments, _ = inputs
    out, lse, kept = output
    ctx.mark_non_differentiable(lse, kept)
    ctx.set_materialize_grads(False)
    ctx.call = _Call(group, length, *arguments)
    u = ctx.call.head_ranks
    ctx.heads = [t.shape[2] // u for t in (q, k, v)]
    ctx.save_for_backward(*((q, k, v) if u == 1 else (kept,)), sink, out, lse, seed, cu_seqlens)


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * _ARGUMENTS
    if grad is None:
        return nothing
    *inputs, sink, out, lse, seed, cu_seqlens = ctx.saved_tensors
    q, k, v = inputs if ctx.call.head_ranks == 1 else inputs[0].split(ctx.heads, dim=2)
    dq, dk, dv, dsink = _backward_op(grad, q, k, v, sink, out, lse, seed, cu_seqlens, *ctx.call)
    return dq, dk, dv, None if sink is None else dsink, *nothing[4:]


_ARGUMENTS = len(torch.ops.parallel_ops.ring_attention.default._schema.arguments)
_backward_op = register(f"{_NAME}_backward", fake=_fake_backward, cpu=_backward, cuda=_backward)
_op = register(
    _NAME,
    fake=_fake,
    cpu=_forward,
    cuda=_forward,
    setup_context=_setup_context,
    backward=_autograd,
    differentiable=1,
    autocast=cast_attention,
)
