"""Attention over a sequence that the ranks of a group share.

Each rank has some of the tokens and passes their queries, keys and values. Four algorithms give the same result:

    ring         keys and values travel while blocks are computed, and each block is merged into a running result
    all_to_all   ranks exchange tokens for heads, attend to the whole sequence in their heads, and exchange back
    hybrid       all-to-all in groups of ``ulysses_degree`` ranks, and a ring across the groups
    all_gather   all keys and values are gathered first, for few kv heads or many documents

The bytes that a rank sends, and the length above which a ring hides them, are in ``cost.py``; the schedules in
``schedule/``. Results of steps are merged in fp32, and gradients of keys are sent to their owner in fp32, so the error
does not grow with the number of ranks (of torch's kernels, see ``backend``, the parts are rounded first). Sources:
Liu et al., arXiv:2310.01889 (ring attention); Jacobs et al., arXiv:2309.14509 (Ulysses); Fang and Zhao,
arXiv:2405.07719 (hybrid); Dubey et al., arXiv:2407.21783 (all-gather);
zigzag: github.com/zhuzilin/ring-flash-attention.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from parallel_ops._internal.dispatch.registration import cast_first, register
from parallel_ops._internal.distributed.group_checks import check_tensor
from parallel_ops._internal.distributed.groups import group_name, group_rank, group_size, resolve_group
from parallel_ops._internal.dropout import dropout_seed
from parallel_ops._internal.gradients.split_backward import kept_parameter, requested
from parallel_ops.comm.collectives import all_gather
from parallel_ops.comm.consistency import CallSignature, check_consistency, communicates, propagate_errors, shared_error
from parallel_ops.comm.transport.exchange import in_flight
from parallel_ops.comm.transport.registry import transport_of
from parallel_ops.context_parallel.algorithm import NAME, AlgorithmName, Layout, check_placement, select_algorithm
from parallel_ops.context_parallel.cost import Algorithm
from parallel_ops.context_parallel.layouts import SequenceLayout
from parallel_ops.context_parallel.schedule.blocks import Options
from parallel_ops.context_parallel.schedule.transport import Attention
from parallel_ops.context_parallel.schedule.ulysses import tensors_of
from parallel_ops.context_parallel.token_ranges import count_tokens, lengths, shard_ranges
from parallel_ops.ops.attention.backends import BackendName, check_backend
from parallel_ops.ops.attention.checks import check_attention
from parallel_ops.ops.attention.flash_attention import (
    AttentionArguments,
    flash_attention,
    flash_attention_reference,
)
from parallel_ops.ops.attention.flops import attention_flops


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    layout: Layout = "zigzag",
    algorithm: AlgorithmName = "auto",
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
    backend: BackendName = "auto",
) -> Tensor:
    """``flash_attention`` over a sequence sharded over ``group``.

    ``functools.partial(ring_attention, group=group, layout=layout)`` can be the ``core_attention`` of
    ``ParallelSelfAttention``.

    Args:
        q: ``[s, b, heads, d]``, this rank's tokens, in the order of the sequence; float32, float16 or bfloat16, on CPU
            float64 too; any strides.
        k, v: ``[s, b, kv_heads, d]`` and ``[s, b, kv_heads, d_v]``, the same tokens; ``kv_heads`` divides ``heads``.
            They are sent as they are, not repeated for each query head.
        group: the ranks that share the sequence; ``None``, or one rank, is ``flash_attention``.
        layout: which tokens a rank has: ``"zigzag"``, ``"striped"`` or ``"contiguous"``; see ``SequenceLayout``, which
            splits and joins them.
        algorithm: ``"ring"``; ``"all_to_all"``, which needs kv heads that are a multiple or a divisor of the ranks, and
            with fewer kv heads than ranks continues with a ring; ``"hybrid"``: all-to-all in groups of
            ``ulysses_degree`` ranks, a ring across them; ``"all_gather"``; ``"auto"``: the fastest of them, which
            ``ring_attention_algorithm`` returns.
        causal, scale, window, sink, softcap, dropout_p: as in ``flash_attention``; the same on every rank, sink too.
        seed: as in ``flash_attention``, the same on every rank; the dropout mask is that of a single rank. ``None``
            draws it from the default generator, which must be in the same state on every rank.
        cu_seqlens: ``[documents + 1]``, int32 or int64, where documents begin in the whole sequence, from 0 to its
            length; the same on every rank. Documents may be empty and may cross ranks.
        first_head: the index of the first of these heads among those of all ranks, for dropout.
        length: tokens of the whole sequence; ``None`` if all ranks have the same number. Otherwise ``s`` must be the
            number that the layout gives this rank, which is 0 on some ranks if there are fewer tokens than ranks.
        ulysses_degree: for ``"hybrid"``, the number of ranks that exchange heads for tokens: a divisor of ``kv_heads``
            and of the group's size; ``None`` for the largest below the group's size.
        backend: as in ``flash_attention``, for each block of keys that it can do; the others, such as those of the
            striped layout or with documents, are computed by this package's kernels, and so is the backward where ranks
            exchange heads for tokens. torch's kernels round each block's result and gradients to the dtype of q.

    Returns:
        ``[s, b, heads, d_v]``, the dtype of q. Under autocast q, k and v are cast to the autocast dtype.

    Raises:
        TypeError, ValueError: on every rank and before data moves, also if the calls of the ranks differ. On CPU every
            call is compared, with the values of ``seed`` and ``cu_seqlens``; on CUDA the first of its kind, without.
        PeerError: a rank failed or did not respond within the transport's timeout.

    Sharding: q, k, v and the result S(0) over group, in the tokens of the layout. The gradients of q, k and v are
    complete. The gradient of sink is partial: that of this rank's tokens, to be summed over group.

    Examples:
        >>> import torch
        >>> from parallel_ops import ring_attention
        >>> q = torch.randn(128, 2, 8, 32)  # this rank's tokens: [s, b, heads, d]
        >>> k, v = torch.randn(128, 2, 4, 32), torch.randn(128, 2, 4, 32)
        >>> ring_attention(q, k, v, group=None).shape  # group=mesh["cp"].get_group() under torchrun
        torch.Size([128, 2, 8, 32])
    """
    name = group_name(NAME, group)
    if group is None or name is None:
        check_placement(q, group, layout, algorithm, length, ulysses_degree)
        return flash_attention(
            q, k, v, causal=causal, scale=scale, window=window, sink=sink, softcap=softcap, dropout_p=dropout_p,
            seed=seed, cu_seqlens=cu_seqlens, first_head=first_head, backend=backend,
        )  # fmt: skip
    with propagate_errors(NAME, group, q, checked=True):
        check_tensor(NAME, q, group)
        check_attention(NAME, q, k, v, causal, scale, window, sink, softcap, cu_seqlens)
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"{NAME}: k must have the {q.shape[0]} tokens of q, got {k.shape[0]}")
        if q.is_cuda and q.dtype is torch.float64:
            raise TypeError(f"{NAME}: q must be float32, float16 or bfloat16 on a GPU, got {q.dtype}")
        check_backend(
            NAME, backend, q, k, v, causal=causal, scale=scale, window=window, documents=cu_seqlens is not None,
            softcap=softcap, dropout_p=dropout_p,
        )  # fmt: skip
        drawn = dropout_seed(NAME, "dropout_p", dropout_p, seed, "q", q)
        check_placement(q, group, layout, algorithm, length, ulysses_degree)
        documents = cu_seqlens is not None
        selected = select_algorithm(q, k, group, layout, algorithm, causal, window, documents, length, ulysses_degree)
    head_tokens = selected.ulysses_degree * q.shape[0]
    if length is not None and selected.ulysses_degree > 1:
        head_tokens = count_tokens(shard_ranges(layout, length, group.size(), group.rank(), selected.ulysses_degree))
    whole = q.shape[0] * group.size() if length is None else length
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sink))
    sink = None if sink is None else sink.to(torch.promote_types(q.dtype, torch.float32))
    out, *_ = _op(
        q, k, v, sink, drawn, cu_seqlens, name, whole, head_tokens, layout, *selected, causal,
        1 / math.sqrt(q.shape[3]) if scale is None else scale, window, softcap or 0.0,
        0.0 if drawn is None else dropout_p, first_head, backend, gradients,
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
    **options: Unpack[AttentionArguments],
) -> Tensor:
    """The same in plain PyTorch: gathers everything, keeps all scores in memory, and has second derivatives."""
    size = group_size(group)
    whole = SequenceLayout(q.shape[0] * size if length is None else length, size, layout)
    q, k, v = (whole.join(all_gather(t, group, sizes=whole.lengths).split(list(whole.lengths))) for t in (q, k, v))
    out = flash_attention_reference(q, k, v, **options)
    return whole.shard(out, group_rank(group))


class _Call(NamedTuple):
    """The arguments of the op that are not tensors, of the forward and the backward."""

    group: str
    length: int
    layout: str
    ulysses_degree: int
    all_gather: bool
    causal: bool
    scale: float
    window: int | None
    softcap: float
    dropout_p: float
    first_head: int
    backend: str

    @property
    def algorithm(self) -> Algorithm:
        return Algorithm(self.ulysses_degree, self.all_gather)

    def attention(self, q: Tensor, seed: Tensor | None, cu_seqlens: Tensor | None) -> Attention:
        options = Options(
            self.causal, self.window, self.scale, self.softcap, self.dropout_p, seed, cu_seqlens, self.first_head,
            self.backend,
        )  # fmt: skip
        transport = transport_of(resolve_group(self.group), q.device)
        return Attention(NAME, transport, self.length, self.layout, self.algorithm, options)

    def check_consistency(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None,
        gradients: bool,
    ) -> None:  # fmt: skip
        """Raises on all ranks unless all make the same call."""
        group = resolve_group(self.group)
        transport, size = transport_of(group, q.device), group.size()
        # Only on a CPU can values be read without waiting for a device.
        documents = None if cu_seqlens is None or cu_seqlens.is_cuda else tuple(cu_seqlens.tolist())
        drawn = None if seed is None or seed.is_cuda else seed.item()
        s, *rest = q.shape
        call = self._replace(group="")  # the name may differ between ranks
        options = (*rest, k.shape[2], v.shape[3], call, sink is None, cu_seqlens is None, gradients)
        of_values = "" if v.shape[3] == q.shape[3] else f" with values of {v.shape[3]}"
        # The message is cut off at a maximal length, so the arguments that differ most often come first.
        text = (
            f"{self.algorithm.name(size)} in {self.layout} over {transport.capabilities.name}, "
            f"q of {[s, *rest]} {q.dtype}, {k.shape[2]} kv heads{of_values}, length={self.length}, "
            f"causal={self.causal}, window={self.window}, requires_grad={gradients}, "
            f"dropout_p={self.dropout_p:.4g}, seed={drawn}, documents={documents}, sink={sink is not None}, "
            f"softcap={self.softcap:.4g}, scale={self.scale:.4g}, backend={self.backend}"
        )
        same = (q.dtype, *options, documents, drawn, transport.capabilities.name, in_flight(transport))
        answer = check_consistency(group, CallSignature(NAME, same, text, (s,)), q.device)
        have = [s] if answer is None else [n for (n,) in answer]
        want = lengths(self.layout, self.length, size)
        if answer is not None and have != list(want):
            raise shared_error(
                group,
                f"{NAME}: the ranks have {have} tokens, but length={self.length} in {self.layout} layout gives them "
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
    length: int, head_tokens: int, *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *options, gradients = arguments
    call = _Call(group, length, *options)
    call.check_consistency(q, k, v, sink, seed, cu_seqlens, gradients)
    return call.attention(q, seed, cu_seqlens).forward(q, k, v, sink)


@communicates
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, statistics: Tensor,
    seed: Tensor | None, cu_seqlens: Tensor | None, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _Call(*arguments)
    same = (grad.dtype, grad.shape[1:], call._replace(group=""), sink is None)
    text = f"gradient of {list(grad.shape)} {grad.dtype} in {call.layout}, length={call.length}"
    check_consistency(resolve_group(call.group), CallSignature(f"backward of {NAME}", same, text), grad.device)
    attention = call.attention(q, seed, cu_seqlens)
    *gradients, dsink = attention.backward(grad, q, k, v, sink, out, statistics)
    return *gradients, statistics.new_empty(0) if dsink is None else dsink


def _fake(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, group: str,
    length: int, head_tokens: int, layout: str, ulysses_degree: int, *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (s, b, h, d), (kv_heads, d_v) = q.shape, v.shape[2:]
    statistics = q.new_empty((2, b, h, s), dtype=torch.promote_types(q.dtype, torch.float32))
    width = (h * d + kv_heads * (d + d_v)) // ulysses_degree
    qkv = q.new_empty((head_tokens, b, width) if ulysses_degree > 1 else 0)
    return q.new_empty(s, b, h, d_v), statistics, qkv


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, statistics: Tensor,
    seed: Tensor | None, cu_seqlens: Tensor | None, group: str, length: int, layout: str, ulysses_degree: int,
    *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    gradients = (t.new_empty((*grad.shape[:2], t.shape[2] * ulysses_degree, t.shape[3])) for t in (q, k, v))
    return *gradients, statistics.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, seed, cu_seqlens, group, length, _, *arguments, _ = inputs
    out, statistics, qkv = output
    ctx.mark_non_differentiable(statistics, qkv)
    ctx.set_materialize_grads(False)
    ctx.call = _Call(group, length, *arguments)
    u = ctx.call.ulysses_degree
    ctx.shapes = [(t.shape[2] // u, t.shape[3]) for t in (q, k, v)]
    ctx.save_for_backward(*((q, k, v) if u == 1 else (qkv,)), sink, out, statistics, seed, cu_seqlens)


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * _ARGUMENTS
    *inputs, sink, out, statistics, seed, cu_seqlens = ctx.saved_tensors
    q, k, v = inputs if ctx.call.ulysses_degree == 1 else tensors_of(inputs[0], *ctx.shapes)
    if sink is not None:
        sink = kept_parameter(ctx, NAME, "sink", sink, 3, requested(ctx))
    dq, dk, dv, dsink = _backward_op(grad, q, k, v, sink, out, statistics, seed, cu_seqlens, *ctx.call)
    return dq, dk, dv, None if sink is None else dsink, *(None,) * (_ARGUMENTS - 4)


def _flops(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, group: str,
    length: int, *_: Any,
) -> int:  # fmt: skip
    """This rank's share if all have as many tokens: its queries against all keys, or as many pairs with ulysses."""
    return attention_flops(q.shape, length, v.shape[3], cu_seqlens)


def _flops_of_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, statistics: Tensor,
    seed: Tensor | None, cu_seqlens: Tensor | None, group: str, length: int, *_: Any,
) -> int:  # fmt: skip
    shape = (*grad.shape[:3], q.shape[3])
    return attention_flops(shape, length, v.shape[3], cu_seqlens, backward=True)


_ARGUMENTS = len(torch.ops.parallel_ops.ring_attention.default._schema.arguments)
_backward_op = register(
    f"{NAME}_backward", fake=_fake_backward, cpu=_backward, cuda=_backward, flops=_flops_of_backward
)
_op = register(
    NAME,
    fake=_fake,
    cpu=_forward,
    cuda=_forward,
    setup_context=_setup_context,
    backward=_autograd,
    differentiable=1,
    autocast=cast_first(3),
    flops=_flops,
)
