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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.dropout import dropout_seed
from parallel_ops._internal.group_checks import check_tensor
from parallel_ops._internal.groups import group_name, group_rank, group_size, resolve_group
from parallel_ops._internal.registration import register
from parallel_ops._internal.split_backward import kept_parameter, requested
from parallel_ops.comm.collectives import all_gather
from parallel_ops.comm.consistency import CallSignature, check_consistency, communicates, propagate_errors, shared_error
from parallel_ops.comm.transport.exchange import in_flight
from parallel_ops.comm.transport.registry import transport_of
from parallel_ops.context_parallel.algorithm import NAME, Algorithm, Layout, check_placement, way_of
from parallel_ops.context_parallel.cost import Way
from parallel_ops.context_parallel.layouts import SequenceLayout
from parallel_ops.context_parallel.schedule.blocks import Options
from parallel_ops.context_parallel.schedule.transport import Attention
from parallel_ops.context_parallel.token_ranges import lengths, runs, tokens
from parallel_ops.ops.attention.checks import check_attention
from parallel_ops.ops.attention.flash_attention import cast_attention, flash_attention, flash_attention_reference


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
    ulysses_degree: int | None = None,
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
            the rest is a ring; ``"hybrid"``: all-to-all among ``ulysses_degree`` neighbours, a ring around;
            ``"gathered"``; ``"auto"``: the fastest of them by ``cost.chosen`` (``ring_attention_choice`` says why).
        causal, scale, window, sink, softcap, dropout_p: as of ``flash_attention``; the same on every rank, sink too.
        seed: as of ``flash_attention``, the same on every rank, and the mask is that of one rank with the whole
            sequence. ``None`` draws it from the default generator, which must be in the same state on every rank.
        cu_seqlens: ``[documents + 1]``, int32 or int64, where documents begin in the whole sequence, from 0 to its
            length; the same on every rank. Documents may be empty, and lie across ranks as they come.
        first_head: where these heads begin among those of all ranks, which is what dropout draws by.
        length: tokens of the whole sequence; ``None`` where all ranks have as many. Otherwise ``s`` must be what the
            layout gives this rank, 0 for some if there are fewer tokens than ranks.
        ulysses_degree: for ``"hybrid"``: how many ranks share out the heads, a divisor of ``kv_heads`` and of the
            group's size; ``None`` for the largest below the group's size.

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
    name = group_name(NAME, group)
    if group is None or name is None:
        check_placement(q, group, layout, algorithm, length, ulysses_degree)
        return flash_attention(
            q, k, v, causal=causal, scale=scale, window=window, sink=sink, softcap=softcap, dropout_p=dropout_p,
            seed=seed, cu_seqlens=cu_seqlens, first_head=first_head,
        )  # fmt: skip
    with propagate_errors(NAME, group, q, checked=True):
        check_tensor(NAME, q, group)
        check_attention(NAME, q, k, v, causal, scale, window, sink, softcap, cu_seqlens)
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"{NAME}: k must have the {q.shape[0]} tokens of q, got {k.shape[0]}")
        if q.is_cuda and q.dtype is torch.float64:
            raise TypeError(f"{NAME}: q must be float32, float16 or bfloat16 on a GPU, got {q.dtype}")
        drawn = dropout_seed(NAME, "dropout_p", dropout_p, seed, "q", q)
        check_placement(q, group, layout, algorithm, length, ulysses_degree)
        documents = cu_seqlens is not None
        way = way_of(q, k, group, layout, algorithm, causal, window, documents, length, ulysses_degree)
    held = way.ulysses_degree * q.shape[0]
    if length is not None and way.ulysses_degree > 1:
        held = tokens(runs(layout, length, group.size(), group.rank(), way.ulysses_degree))
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


class _Call(NamedTuple):
    """The arguments of the op that are not tensors, of the forward and the backward."""

    group: str
    length: int
    layout: str
    ulysses_degree: int
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
        way = Way(self.ulysses_degree, self.gathered)
        return Attention(NAME, transport_of(resolve_group(self.group)), self.length, self.layout, way, options)

    def check_consistency(
        self, q: Tensor, k: Tensor, sink: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, gradients: bool
    ) -> None:
        """The ranks make the same call: else all raise."""
        group = resolve_group(self.group)
        transport, size = transport_of(group), group.size()
        # Values can be read without waiting for a device on a CPU alone.
        documents = None if cu_seqlens is None or cu_seqlens.is_cuda else tuple(cu_seqlens.tolist())
        drawn = None if seed is None or seed.is_cuda else seed.item()
        way = Way(self.ulysses_degree, self.gathered).name(size)
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
        answer = check_consistency(group, CallSignature(NAME, same, text, (s,)), q.device)
        have = [s] if answer is None else [n for (n,) in answer]
        want = lengths(self.layout, self.length, size)
        if answer is not None and have != list(want):
            raise shared_error(
                group,
                f"{NAME}: the ranks have {have} tokens, but of length={self.length} in {self.layout} layout they have "
                f"{list(want)}",
            )
        if documents is not None and (
            documents[0] != 0 or documents[-1] != self.length or sorted(documents) != list(documents)
        ):
            raise shared_error(
                group,
                f"{NAME}: cu_seqlens must rise from 0 to {self.length}, the tokens of all ranks, got {documents}",
            )


@communicates
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, group: str,
    length: int, held: int, *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *options, gradients = arguments
    call = _Call(group, length, *options)
    call.check_consistency(q, k, sink, seed, cu_seqlens, gradients)
    return call.attention(seed, cu_seqlens).forward(q, k, v, sink)


@communicates
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, statistics: Tensor,
    seed: Tensor | None, cu_seqlens: Tensor | None, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    attention = _Call(*arguments).attention(seed, cu_seqlens)
    *gradients, dsink = attention.backward(grad, q, k, v, sink, out, statistics)
    return *gradients, statistics.new_empty(0) if dsink is None else dsink


def _fake(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, group: str,
    length: int, held: int, layout: str, ulysses_degree: int, *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    s, b, h, d = q.shape
    statistics = q.new_empty((2, b, h, s), dtype=torch.promote_types(q.dtype, torch.float32))
    kept = q.new_empty((held, b, (h + 2 * k.shape[2]) // ulysses_degree, d) if ulysses_degree > 1 else 0)
    return q.new_empty(q.shape), statistics, kept


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, statistics: Tensor,
    seed: Tensor | None, cu_seqlens: Tensor | None, group: str, length: int, layout: str, ulysses_degree: int,
    *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    s, b, _, d = grad.shape
    gradients = (t.new_empty((s, b, t.shape[2] * ulysses_degree, d)) for t in (q, k, v))
    return *gradients, statistics.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, seed, cu_seqlens, group, length, _, *arguments, _ = inputs
    out, statistics, kept = output
    ctx.mark_non_differentiable(statistics, kept)
    ctx.set_materialize_grads(False)
    ctx.call = _Call(group, length, *arguments)
    u = ctx.call.ulysses_degree
    ctx.heads = [t.shape[2] // u for t in (q, k, v)]
    ctx.save_for_backward(*((q, k, v) if u == 1 else (kept,)), sink, out, statistics, seed, cu_seqlens)


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * _ARGUMENTS
    if grad is None:
        return nothing
    *inputs, sink, out, statistics, seed, cu_seqlens = ctx.saved_tensors
    q, k, v = inputs if ctx.call.ulysses_degree == 1 else inputs[0].split(ctx.heads, dim=2)
    if sink is not None:
        sink = kept_parameter(ctx, NAME, "sink", sink, 3, requested(ctx))
    dq, dk, dv, dsink = _backward_op(grad, q, k, v, sink, out, statistics, seed, cu_seqlens, *ctx.call)
    return dq, dk, dv, None if sink is None else dsink, *nothing[4:]


_ARGUMENTS = len(torch.ops.parallel_ops.ring_attention.default._schema.arguments)
_backward_op = register(f"{NAME}_backward", fake=_fake_backward, cpu=_backward, cuda=_backward)
_op = register(
    NAME,
    fake=_fake,
    cpu=_forward,
    cuda=_forward,
    setup_context=_setup_context,
    backward=_autograd,
    differentiable=1,
    autocast=cast_attention,
)
