"""Options of an attention: checked once at the public functions, then passed on whole."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device, check_same_dtype, has_values
from parallel_ops._internal.dropout import dropout_seed as drawn_seed
from parallel_ops._internal.tensor_format import FORMATS, TensorFormat, check_format, described
from parallel_ops._internal.token_range import TokenRange, rises
from parallel_ops.ops.attention.cache import known_on_host, on_host, once
from parallel_ops.ops.attention.ranges import document_ranges, intersect_ranges, range_error
from parallel_ops.ops.softmaxes.shared import check_scale

BackendName = Literal["auto", "triton", "cudnn", "flash", "fa4"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
KeyRanges = Tensor | tuple[Tensor, Tensor]


class AttentionArguments(TypedDict, total=False):
    """Keyword arguments of ``flash_attention`` and ``ring_attention`` that become ``AttentionOptions``."""

    causal: bool | None
    softmax_scale: float | None
    window_size: tuple[int, int] | None
    sink: Tensor | None
    softcap: float | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    cu_seqlens: Tensor | None
    key_ranges: KeyRanges | None
    first_head: int
    backend: BackendName


class AttentionOptions(NamedTuple):
    """Checked options, in the order in which the registered ops take them.

    Attributes:
        sink: ``[heads]``, at least fp32.
        cu_seqlens: documents; ``None`` where ``key_ranges`` hold them.
        key_ranges: int32 ``[2, queries of the whole sequence]``: see ``ranges``.
        dropout_seed: one int64 element; ``None`` if nothing is dropped.
        left, right: keys before and after a query's own place that it sees; ``None`` for all. Causal: ``right`` is 0.
        softcap, dropout_p: 0 for none.
        first_head: index of the first query head among those of all ranks, for dropout.
    """

    sink: Tensor | None = None
    cu_seqlens: Tensor | None = None
    key_ranges: Tensor | None = None
    dropout_seed: Tensor | None = None
    softmax_scale: float = 1.0
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    first_head: int = 0
    backend: str = "auto"

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def packed(self) -> bool:
        """True if ``left`` and ``right`` are not the whole mask."""
        return self.cu_seqlens is not None or self.key_ranges is not None

    @property
    def known_on_host(self) -> bool:
        """True if ``limits`` waits for no device."""
        return all(t is None or known_on_host(t) is not None for t in (self.cu_seqlens, self.key_ranges))

    def ranges(self, length: int) -> Tensor | None:
        """First and last key of each of the ``length`` queries, before ``left`` and ``right`` cut them."""
        cu_seqlens = self.cu_seqlens
        if self.key_ranges is not None or cu_seqlens is None:
            return self.key_ranges
        return once(cu_seqlens, ("ranges", length), lambda: document_ranges(cu_seqlens, causal=False, length=length))

    def limits(self, queries: tuple[TokenRange, ...]) -> tuple[tuple[int, int], ...]:
        """First and last key that any query of each of these token ranges sees, before ``left`` and ``right`` cut them.
        Of a GPU's values those that ``on_host`` has, at these places alone."""
        source = self.cu_seqlens if self.key_ranges is None else self.key_ranges
        assert source is not None
        host = on_host(source)

        def read() -> tuple[tuple[int, int], ...]:
            places = [[part.start for part in queries], [part.last for part in queries]]
            first, last = torch.tensor(places, dtype=torch.int64)
            if self.key_ranges is None:
                edges = host.to(torch.int64)
                first = edges[torch.searchsorted(edges, first, right=True) - 1]
                last = edges[torch.searchsorted(edges, last, right=True)] - 1
            else:
                first, last = host[0, first], host[1, last]
            return tuple(zip(first.tolist(), last.tolist(), strict=True))

        return once(host, ("limits", queries), read)


def attention_options(
    op: str, q: Tensor, k: Tensor, v: Tensor, *, length: int | None = None, causal: bool | None = None,
    softmax_scale: float | None = None, window_size: tuple[int, int] | None = None, sink: Tensor | None = None,
    softcap: float | None = None, dropout_p: float = 0.0, dropout_seed: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None, key_ranges: KeyRanges | None = None, first_head: int = 0,
    backend: BackendName = "auto",
) -> AttentionOptions:  # fmt: skip
    """The options of a call, whose tensors ``check_tensors`` has seen.

    Args:
        q, k, v: ``[s, b, heads, d]``.
        length: tokens of the whole sequence, where ranks share it.

    Raises:
        TypeError, ValueError: before any kernel starts; they name op and argument.
    """
    sq, sk = (q.shape[0], k.shape[0]) if length is None else (length, length)
    if causal is None:
        causal = key_ranges is None
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal must be a bool, got {type(causal).__name__}")
    if causal and sq > sk:
        raise ValueError(
            f"{op}: q has {sq} queries for the {sk} keys of k, so the first would see no key; causal attention needs "
            "at least as many keys as queries"
        )
    if softmax_scale is not None:
        check_scale(op, softmax_scale, "softmax_scale")
    left, right = (None, None) if window_size is None else _window(op, window_size)
    if sink is not None:
        sink = _checked_sink(op, q, sink)
    if softcap is not None:
        _check_softcap(op, softcap)
    if cu_seqlens is not None:
        _check_documents(op, q, sq, sk, cu_seqlens)
        if length is None and has_values(cu_seqlens):
            _check_bounds(op, sq, cu_seqlens)  # ranks that share a sequence compare theirs first
    if key_ranges is not None:
        key_ranges = _checked_ranges(op, q, sq, sk, key_ranges)
        if cu_seqlens is not None:
            key_ranges = intersect_ranges(key_ranges, document_ranges(cu_seqlens, causal=False, length=sq))
            cu_seqlens = None
    seed = None
    if type(dropout_p) is not float or dropout_p != 0.0 or dropout_seed is not None:
        seed = drawn_seed(op, "dropout_p", dropout_p, dropout_seed, "q", q)
    return AttentionOptions(
        sink, cu_seqlens, key_ranges, seed, 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale,
        left, 0 if causal else right, softcap or 0.0, 0.0 if seed is None else dropout_p, first_head, backend,
    )  # fmt: skip


def check_tensors(op: str, q: Tensor, k: Tensor, v: Tensor, tensor_format: TensorFormat = "sbhd") -> None:
    """Raises unless q, k and v fit each other in ``tensor_format``."""
    check_format(op, tensor_format)
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_floating(op, name, t)
        if t is not q:
            check_same_device(op, name, t, "q", q)
            check_same_dtype(op, name, t, "q", q)
        if t.dim() != 4:
            raise ValueError(f"{op}: {name} must be {described(tensor_format)}, got {list(t.shape)}")
    wrong = _misfit(q, k, v, tensor_format)
    if wrong is not None:
        fit = [name for name in FORMATS if name != tensor_format and _misfit(q, k, v, name) is None]
        alike = [name for name in fit if q.shape[name.index("s")] == k.shape[name.index("s")]]
        advice = " or ".join(repr(name) for name in alike or fit)
        raise ValueError(
            f"{op}: {wrong}, in {described(tensor_format)}"
            + (f"; the shapes fit tensor_format={advice}" if advice else "")
        )


def _misfit(q: Tensor, k: Tensor, v: Tensor, tensor_format: str) -> str | None:
    b, h = (1, 2) if tensor_format == "sbhd" else (tensor_format.index("b"), tensor_format.index("h"))
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    heads, kv_heads = of_q[h], of_k[h]
    if of_k[b] != of_q[b] or of_k[3] != of_q[3]:
        return f"k must have the batch {of_q[b]} and the d {of_q[3]} of q, got {list(of_k)}"
    if kv_heads == 0 or heads % kv_heads:
        return f"k has {kv_heads} heads, which do not divide the {heads} heads of q"
    if of_v[:3] != of_k[:3]:
        return f"v must have the shape of k, {list(of_k)}, but for d, got {list(of_v)}"
    if of_q[3] == 0 or of_v[3] == 0:
        return f"the last dimension of {'v' if of_q[3] else 'q'} must be at least 1, got 0"
    return None


def _checked_sink(op: str, q: Tensor, sink: Tensor) -> Tensor:
    check_floating(op, "sink", sink)
    check_same_device(op, "sink", sink, "q", q)
    if sink.shape != (q.shape[2],):
        raise ValueError(f"{op}: sink must have shape [{q.shape[2]}], one for each head of q, got {list(sink.shape)}")
    return sink.to(torch.promote_types(q.dtype, torch.float32))


def _check_softcap(op: str, softcap: float) -> None:
    if isinstance(softcap, bool) or not isinstance(softcap, (float, int)):
        raise TypeError(f"{op}: softcap must be a Python float or None, got {type(softcap).__name__}")
    if not 0 < softcap < math.inf:
        raise ValueError(f"{op}: softcap must be finite and above 0 (None for no cap), got {softcap}")


def _window(op: str, window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    if isinstance(window_size, int):
        raise TypeError(
            f"{op}: window_size must be (left, right), as FlashAttention counts it, got {window_size}; a causal window "
            f"of {window_size} tokens, the query's own included, is ({window_size - 1}, 0)"
        )
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        raise TypeError(f"{op}: window_size must be a pair of ints (left, right) or None, got {window_size!r}")
    for n in window_size:
        if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
            raise TypeError(f"{op}: window_size must be a pair of ints (left, right), got {window_size!r}")
        if n < -1:
            raise ValueError(f"{op}: window_size must be at least 0, or -1 for no limit, got {tuple(window_size)}")
    left, right = window_size
    return None if left == -1 else left, None if right == -1 else right


def _check_documents(op: str, q: Tensor, sq: int, sk: int, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{op}: cu_seqlens must be an int32 or int64 tensor, got {got}")
    check_same_device(op, "cu_seqlens", cu_seqlens, "q", q)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{op}: cu_seqlens must have shape [documents + 1] with at least one document, got {list(cu_seqlens.shape)}"
        )
    if sq != sk:
        raise ValueError(f"{op}: cu_seqlens needs as many queries as keys, got {sq} in q and {sk} in k")


def _check_bounds(op: str, length: int, cu_seqlens: Tensor) -> None:
    bounds = once(cu_seqlens, "bounds", cu_seqlens.tolist)
    if not rises(bounds, length):
        raise ValueError(f"{op}: cu_seqlens must rise from 0 to {length}, the tokens of q, got {bounds}")


def _checked_ranges(op: str, q: Tensor, sq: int, sk: int, key_ranges: KeyRanges) -> Tensor:
    if not isinstance(key_ranges, Tensor):
        if not isinstance(key_ranges, Sequence) or len(key_ranges) != 2:
            raise TypeError(f"{op}: key_ranges must be (first, last) or a tensor [2, {sq}], got {key_ranges!r}")
        for row in key_ranges:
            if not isinstance(row, Tensor) or row.dim() != 1 or row.shape != key_ranges[0].shape:
                raise ValueError(f"{op}: key_ranges must be two tensors [{sq}], first and last")
        key_ranges = torch.stack(tuple(key_ranges))
    if key_ranges.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: key_ranges must be int32, got {key_ranges.dtype}")
    check_same_device(op, "key_ranges", key_ranges, "q", q)
    if key_ranges.shape != (2, sq):
        raise ValueError(
            f"{op}: key_ranges must be [2, {sq}], first and last key of each query of the whole sequence, got "
            f"{list(key_ranges.shape)}"
        )
    if has_values(key_ranges):
        given = key_ranges
        wrong = once(given, ("error", sk), lambda: range_error(given, sk))
        if wrong is not None:
            raise ValueError(f"{op}: key_ranges: {wrong}")
    return key_ranges if key_ranges.dtype is torch.int32 else key_ranges.to(torch.int32)
