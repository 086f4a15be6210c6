"""Attention over a sequence that the ranks of a group share.

Each rank has some of the tokens and passes their queries, keys and values. Four algorithms give the same result:

    ring         keys and values travel while blocks are computed, and each block is merged into a running result
    all_to_all   ranks exchange tokens for heads, attend to the whole sequence in their heads, and exchange back
    hybrid       all-to-all in groups of ``ulysses_degree`` ranks, and a ring across the groups
    all_gather   all keys and values are gathered first, for few kv heads or many documents

Over several nodes, by ``LOCAL_WORLD_SIZE``, keys and their gradients cross the link between them once a node.

The bytes that a rank sends, and the length above which a ring hides them, are in ``cost.py``; the schedules in
``schedule/``. Results of steps are merged in fp32, and gradients of keys are sent to their owner in fp32, so the error
does not grow with the number of ranks (of torch's kernels, see ``backend``, the parts are rounded first). Sources:
Liu et al., arXiv:2310.01889 (ring attention); Jacobs et al., arXiv:2309.14509 (Ulysses); Fang and Zhao,
arXiv:2405.07719 (hybrid); Dubey et al., arXiv:2407.21783 (all-gather);
zigzag: github.com/zhuzilin/ring-flash-attention.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from parallel_ops._internal.dispatch.registration import cast_first, register
from parallel_ops._internal.distributed.compat import resolve_group
from parallel_ops._internal.distributed.groups import check_tensor, group_name, group_rank, group_size
from parallel_ops._internal.gradients.split_backward import kept_parameter, requested
from parallel_ops._internal.tensor_format import TensorFormat, from_sbhd, to_sbhd
from parallel_ops.comm.collectives import all_gather
from parallel_ops.comm.consistency import CallSignature, check_consistency, communicates, propagate_errors
from parallel_ops.comm.transport.registry import transport_of
from parallel_ops.context_parallel.algorithm import ranks_per_node, select_algorithm
from parallel_ops.context_parallel.calls import AlgorithmName, balanced_for, check_calls, check_placement
from parallel_ops.context_parallel.layouts import Layout, SequenceLayout, named_layout
from parallel_ops.context_parallel.schedule.ulysses import (
    NAME,
    Placement,
    attention_backward,
    attention_forward,
    tensors_of,
)
from parallel_ops.context_parallel.token_ranges import count_tokens, shard_ranges
from parallel_ops.ops.attention.backends import check_backend
from parallel_ops.ops.attention.flash_attention import flash_attention
from parallel_ops.ops.attention.flops import attention_flops
from parallel_ops.ops.attention.options import (
    AttentionArguments,
    AttentionOptions,
    BackendName,
    KeyRanges,
    attention_options,
    check_tensors,
)
from parallel_ops.ops.attention.reference import flash_attention_reference

# Arguments of the registered op after q, k and v.
_OPTIONS, _PLACEMENT = len(AttentionOptions._fields), len(Placement._fields)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    cp_layout: Layout | SequenceLayout = "zigzag",
    algorithm: AlgorithmName = "auto",
    causal: bool | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_ranges: KeyRanges | None = None,
    first_head: int = 0,
    length: int | None = None,
    ulysses_degree: int | None = None,
    tensor_format: TensorFormat = "sbhd",
    backend: BackendName = "auto",
) -> Tensor:
    """``flash_attention`` over a sequence sharded over ``group``.

    ``functools.partial(ring_attention, group=group, cp_layout=cp_layout)`` can be the ``core_attention`` of
    ``ParallelSelfAttention``.

    Args:
        q: ``[s, b, heads, d]``, or as ``tensor_format`` says, this rank's tokens, in the order of the sequence;
            float32, float16 or bfloat16, on CPU float64 too; any strides.
        k, v: ``[s, b, kv_heads, d]`` and ``[s, b, kv_heads, d_v]``, the same tokens; ``kv_heads`` divides ``heads``.
            They are sent as they are, not repeated for each query head.
        group: the ranks that share the sequence; ``None``, or one rank, is ``flash_attention``.
        cp_layout: which tokens a rank has: ``"zigzag"``, ``"striped"``, ``"contiguous"``, or ``"balanced"`` by the
            area of this mask; see ``SequenceLayout``, which splits and joins them. A ``SequenceLayout`` for one that
            several masks share.
        algorithm: ``"ring"``; ``"all_to_all"``, which needs kv heads that are a multiple or a divisor of the ranks, and
            with fewer kv heads than ranks continues with a ring; ``"hybrid"``: all-to-all in groups of
            ``ulysses_degree`` ranks, a ring across them; ``"all_gather"``; ``"auto"``: the fastest of them, which
            ``ring_attention_algorithm`` returns.
        causal, softmax_scale, window_size, sink, softcap, dropout_p: as in ``flash_attention``; the same on every rank,
            sink too.
        dropout_seed: as in ``flash_attention``, the same on every rank; the dropout mask is that of a single rank.
            ``None`` draws it from the default generator, which must be in the same state on every rank.
        cu_seqlens: ``[documents + 1]``, int32 or int64, where documents begin in the whole sequence, from 0 to its
            length; the same on every rank. Documents may be empty and may cross ranks.
        key_ranges: as in ``flash_attention``, of all queries of the whole sequence, in its order, and the same on every
            rank: int32 ``[2, length]``, first and last key.
        first_head: the index of the first of these heads among those of all ranks, for dropout.
        length: tokens of the whole sequence; ``None`` if all ranks have the same number. Otherwise ``s`` must be the
            number that the layout gives this rank, which is 0 on some ranks if there are fewer tokens than ranks.
        ulysses_degree: for ``"hybrid"``, the number of ranks that exchange heads for tokens: a divisor of ``kv_heads``
            and of the group's size; ``None`` for the largest below the group's size.
        tensor_format: as in ``flash_attention``.
        backend: as in ``flash_attention``, for each block of keys that it can do; the others, such as those of the
            striped layout with documents or ranges, are computed by this package's kernels, and so is the backward
            where ranks exchange heads for tokens. torch's kernels round each block's result and gradients to the dtype
            of q.

    Returns:
        ``[s, b, heads, d_v]``, the dtype of q. Under autocast q, k and v are cast to the autocast dtype.

    Raises:
        TypeError, ValueError: on every rank and before data moves, also if the calls of the ranks differ. On CPU every
            call is compared, with the values of ``dropout_seed``, ``cu_seqlens`` and ``key_ranges``; on CUDA the first
            of its kind, without.
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
    layout, length = named_layout(NAME, cp_layout, length, group)
    arguments: AttentionArguments = {
        "causal": causal, "softmax_scale": softmax_scale, "window_size": window_size, "sink": sink, "softcap": softcap,
        "dropout_p": dropout_p, "dropout_seed": dropout_seed, "cu_seqlens": cu_seqlens, "key_ranges": key_ranges,
        "first_head": first_head, "backend": backend,
    }  # fmt: skip
    if group is None or name is None:
        check_tensors(NAME, q, k, v, tensor_format)
        check_placement(to_sbhd(q, tensor_format), group, layout, algorithm, length, ulysses_degree)
        return flash_attention(q, k, v, tensor_format=tensor_format, **arguments)
    with propagate_errors(NAME, group, q, checked=True):
        check_tensor(NAME, q, group)
        check_tensors(NAME, q, k, v, tensor_format)
        q, k, v = (to_sbhd(t, tensor_format) for t in (q, k, v))
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"{NAME}: k must have the {q.shape[0]} tokens of q, got {k.shape[0]}")
        if q.is_cuda and q.dtype is torch.float64:
            raise TypeError(f"{NAME}: q must be float32, float16 or bfloat16 on a GPU, got {q.dtype}")
        check_placement(q, group, layout, algorithm, length, ulysses_degree)
        whole = q.shape[0] * group.size() if length is None else length
        options = attention_options(NAME, q, k, v, length=whole, **arguments)
        check_backend(NAME, options, q, k, v)
        if layout == "balanced":
            layout = balanced_for(options, whole, group.size())
        selected = select_algorithm(q, k, group, layout, algorithm, options, length, ulysses_degree)
    head_tokens = selected.ulysses_degree * q.shape[0]
    if length is not None and selected.ulysses_degree > 1:
        head_tokens = count_tokens(shard_ranges(layout, length, group.size(), group.rank(), selected.ulysses_degree))
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sink))
    out, *_ = _op(q, k, v, *options, *Placement(name, whole, layout, *selected), head_tokens, gradients)
    return from_sbhd(out, tensor_format)


def ring_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    cp_layout: Layout | SequenceLayout = "zigzag",
    length: int | None = None,
    tensor_format: TensorFormat = "sbhd",
    **arguments: Unpack[AttentionArguments],
) -> Tensor:
    """The same in plain PyTorch: gathers everything, keeps all scores in memory, and has second derivatives."""
    size = group_size(group)
    layout, length = named_layout(NAME, cp_layout, length, group)
    q, k, v = (to_sbhd(t, tensor_format) for t in (q, k, v))
    length = q.shape[0] * size if length is None else length
    if layout == "balanced":
        layout = balanced_for(attention_options(NAME, q, k, v, length=length, **arguments), length, size)
    whole = SequenceLayout(length, size, layout)
    q, k, v = (whole.join(all_gather(t, group, sizes=whole.lengths).split(list(whole.lengths))) for t in (q, k, v))
    out = flash_attention_reference(q, k, v, **arguments)
    return from_sbhd(whole.shard(out, group_rank(group)), tensor_format)


@communicates
def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    options, placement = _split(arguments)
    group = resolve_group(placement.group)
    transport, nodes = transport_of(group, q.device), ranks_per_node(group)
    check_calls(q, k, v, options, placement, transport, nodes, arguments[-1])
    return attention_forward(placement, transport, options, q, k, v, ranks_per_node=nodes)


@communicates
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    options, placement = _split(arguments)
    group = resolve_group(placement.group)
    same = (grad.dtype, grad.shape[1:], *options[4:], *placement[1:], options.sink is None)
    text = f"gradient of {list(grad.shape)} {grad.dtype} in {placement.layout}, length={placement.length}"
    check_consistency(group, CallSignature(f"backward of {NAME}", same, text), grad.device)
    transport = transport_of(group, q.device)
    *gradients, dsink = attention_backward(
        placement, transport, options, grad, q, k, v, out, statistics, ranks_per_node=ranks_per_node(group)
    )
    return *gradients, statistics.new_empty(0) if dsink is None else dsink


def _split(arguments: tuple[Any, ...]) -> tuple[AttentionOptions, Placement]:
    return AttentionOptions(*arguments[:_OPTIONS]), Placement(*arguments[_OPTIONS : _OPTIONS + _PLACEMENT])


def _outputs(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    (s, b, h, d), (kv_heads, d_v) = q.shape, v.shape[2:]
    statistics = q.new_empty((2, b, h, s), dtype=torch.promote_types(q.dtype, torch.float32))
    u, head_tokens = _split(arguments)[1].ulysses_degree, arguments[-2]
    width = (h * d + kv_heads * (d + d_v)) // u
    qkv = q.new_empty((head_tokens, b, width) if u > 1 else 0)
    return q.new_empty(s, b, h, d_v), statistics, qkv


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    options, placement = _split(arguments)
    shapes = ((*grad.shape[:2], t.shape[2] * placement.ulysses_degree, t.shape[3]) for t in (q, k, v))
    dsink = statistics.new_empty(0) if options.sink is None else torch.empty_like(options.sink)
    return *(q.new_empty(shape) for shape in shapes), dsink


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *tensors = inputs[:7]
    out, statistics, qkv = output
    ctx.mark_non_differentiable(statistics, qkv)
    ctx.set_materialize_grads(False)
    ctx.arguments = inputs[7:-2]
    u = ctx.ulysses_degree = _split(inputs[3:])[1].ulysses_degree
    ctx.shapes = [(t.shape[2] // u, t.shape[3]) for t in (q, k, v)]
    ctx.save_for_backward(out, statistics, *tensors, *((q, k, v) if u == 1 else (qkv,)))


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * _ARGUMENTS
    out, statistics, sink, *tensors = ctx.saved_tensors
    inputs = tensors[3:]
    q, k, v = inputs if ctx.ulysses_degree == 1 else tensors_of(inputs[0], *ctx.shapes)
    if sink is not None:
        sink = kept_parameter(ctx, NAME, "sink", sink, 3, requested(ctx))
    dq, dk, dv, dsink = _backward_op(grad, q, k, v, out, statistics, sink, *tensors[:3], *ctx.arguments)
    return dq, dk, dv, None if sink is None else dsink, *(None,) * (_ARGUMENTS - 4)


def _flops(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> int:
    """This rank's share if all have as many tokens: its queries against all keys, or as many pairs with ulysses."""
    options, placement = _split(arguments)
    return attention_flops(q.shape, placement.length, v.shape[3], options.cu_seqlens)


def _flops_of_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, *arguments: Any
) -> int:
    options, placement = _split(arguments)
    shape = (*grad.shape[:3], q.shape[3])
    return attention_flops(shape, placement.length, v.shape[3], options.cu_seqlens, backward=True)


_ARGUMENTS = len(torch.ops.parallel_ops.ring_attention.default._schema.arguments)
_backward_op = register(f"{NAME}_backward", outputs=_gradients, cpu=backward, cuda=backward, flops=_flops_of_backward)
_op = register(
    NAME,
    outputs=_outputs,
    cpu=forward,
    cuda=forward,
    setup_context=setup_context,
    backward=_autograd,
    differentiable=1,
    autocast=cast_first(3),
    flops=_flops,
)
