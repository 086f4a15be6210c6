"""Bounds of documents and ranges, made once for all layers of a model's call and for its backward.

They depend on ``cu_seqlens`` or ``key_ranges``, and on which tokens are queries and keys. A model gives each layer the
same tensor, so results made of it are kept as long as it lives and holds the same values.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

from parallel_ops._internal.distributed.compat import capturing, current_raw_stream, inductor_graphs

T = TypeVar("T")

# Tensors of which results are kept, the newest, among them those of micro-batches that are read ahead; and results of
# each: a few for each block of a ring and kind of layer.
_MOST_TENSORS, _MOST_RESULTS = 16, 4096
# By id: a reference to the tensor, its version and the stream on which its results were made; and those.
_made: "dict[int, tuple[weakref.ref[Tensor], tuple[int, int], dict[Hashable, object]]]" = {}


def once(source: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """``make()``, or what it returned for the same tensor and ``key``.

    Args:
        key: all that the result depends on beside the values of ``source``.
    """
    if _changes_unseen(source):
        return make()
    found = _made.get(id(source))
    state = source._version, _stream(source)
    if found is None or found[0]() is not source or found[1] != state:
        _made.pop(id(source), None)
        while len(_made) >= _MOST_TENSORS:
            _made.pop(next(iter(_made)), None)
        found = _made[id(source)] = weakref.ref(source, functools.partial(_forget, id(source))), state, {}
    results = found[2]
    if key not in results:
        if len(results) >= _MOST_RESULTS:
            results.clear()
        results[key] = _lasting(source, make) if state[1] and inductor_graphs() else make()
    return results[key]  # type: ignore[return-value]


def _lasting(source: Tensor, make: Callable[[], T]) -> T:
    """``make()`` on a side stream, which may be that of Inductor's CUDA graphs: their pool may hold nothing that is
    kept."""
    from parallel_ops.triton_kernels.memory import lasting

    return lasting(source.device, make)


def _forget(key: int, dead: "weakref.ref[Tensor]", made: dict[int, Any] = _made) -> None:
    found = made.get(key)  # as an argument: an interpreter that ends clears the names of modules
    if found is not None and found[0] is dead:
        del made[key]


def on_host(t: Tensor) -> Tensor:
    """The values of ``t`` on the CPU, copied once."""
    known = known_on_host(t)
    return once(t, "host", t.cpu) if known is None else known


def known_on_host(t: Tensor) -> Tensor | None:
    """The values of ``t`` on the CPU, if they are known there without waiting for a device."""
    if t.is_cpu or _changes_unseen(t):
        return t if t.is_cpu else None
    of, host = getattr(t.untyped_storage(), "_values_on_host", (None, None))
    return host if of == _values(t) else None


def know_on_host(t: Tensor, host: Tensor) -> None:
    """Lets ``on_host(t)`` be ``host``, of which ``t`` is a copy, so that nothing waits for the device. Tensors of the
    same storage, as recomputation makes them, know it too."""
    if not (t.is_cpu or _changes_unseen(t)):
        t.untyped_storage()._values_on_host = _values(t), host  # type: ignore[attr-defined]


def _values(t: Tensor) -> tuple[object, ...]:
    """All that the values of a tensor depend on beside its storage."""
    return t._version, t.storage_offset(), t.shape, t.stride()


def _changes_unseen(t: Tensor) -> bool:
    """Whether values may be others when the result is used again: those of inference tensors, which have no version,
    of fake ones, and of a graph that is being captured."""
    if type(t) is not Tensor or t.is_inference():
        return True
    return capturing(t)


def _stream(t: Tensor) -> int:
    return current_raw_stream(t.device)() if t.is_cuda else 0
