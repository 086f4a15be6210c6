"""Activations in host memory between forward and backward.

    forward     block 0    block 1    block 2    ...          backward   block 2    block 1    block 0
    copies      .......... 0 to host  1 to host  ...                     1 to GPU   0 to GPU   ......

What autograd saves in a block passes through torch's ``saved_tensors_hooks``. Copies are enqueued on a stream of their
own; the blocks that have just ended, ``in_flight`` of them, stay on the device until they are copied, and as many are
copied back before the backward needs them. So a device holds at most ``2 * in_flight + 1`` blocks of a micro-batch.

A host copy lives as long as autograd holds what it stands for: a graph that is walked twice finds it twice, and one
that is dropped leaves nothing. Backwards of pipelines begin with any micro-batch: ``expect`` copies its last blocks
back.
Weight gradients that a schedule computes apart keep on the device what the input half has read.

Stays on the device: parameters and buffers, views and casts of parameters, tensors that several blocks share (inputs
without a gradient, such as rotary tables), small tensors. Without CUDA the two memories are both the host's, and
everything else is the same.

Sources: Rajbhandari et al., arXiv:2104.07857 (ZeRO-Infinity); ``torch.autograd.graph.save_on_cpu``, which copies on the
stream of the computation; torchtune's ``OffloadActivations``, which has one copy stream.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from parallel_ops._internal.distributed.compat import in_backward

Offload = Literal["none", "inputs", "all"]
# A copy of less is not worth two transfers, of about 10 us each.
LEAST_BYTES = 1 << 20

# Nodes whose result is a parameter in another form.
_FORMS = ("ToCopy", "T", "Transpose", "View", "UnsafeView", "Slice", "Select", "Split", "Expand", "Permute",
          "_ToLocal", "Alias", "Detach", "Unsqueeze", "Squeeze")  # fmt: skip


class CopyEngine:
    """Copies between device and host in order, behind the computation: on CUDA a stream, else at once."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, target: Tensor, source: Tensor) -> Any:
        """Enqueues a copy of what has been computed so far; returns what ``wait`` takes."""
        device = source.device if source.is_cuda else target.device
        if device.type != "cuda":
            target.copy_(source)
            return None
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Any) -> None:
        """Makes what is computed from now on wait for a copy; the host does not."""
        if event is not None:
            event.wait()


class _Entry:
    """The memory of tensors, as bytes, and where it is."""

    def __init__(self, owner: "ActivationOffload", call: "_Call", source: Tensor) -> None:
        self._owner, self.call, self.device = owner, call, source.device
        self.on_device: Tensor | None = source
        self.host = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        self._leaving = owner.engine.start(self.host, source)
        self._returning: tuple[Any] | None = None
        self.copied = False
        owner.host_bytes += self.host.nbytes

    def leave(self) -> None:
        """Frees the memory of the device; what is computed from now on waits for the copy."""
        if not self.copied and self.on_device is not None:
            self._owner.engine.wait(self._leaving)
            self.copied, self._leaving = True, None
        self._arrived()
        self.on_device = None

    def fetch(self) -> None:
        """Starts the copy back."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self._returning = (self._owner.engine.start(self.on_device, self.host),)

    def get(self) -> Tensor:
        self.fetch()
        self._arrived()
        assert self.on_device is not None
        return self.on_device

    def _arrived(self) -> None:
        if self._returning is not None:
            self._owner.engine.wait(self._returning[0])
            self._returning = None

    def __del__(self) -> None:
        if not hasattr(self, "host"):  # of which there was no memory
            return
        self._arrived()  # before its memory is used again
        self._owner.host_bytes -= self.host.nbytes


class _Call:
    """One forward of a block, and those before it of the same micro-batch."""

    def __init__(self, before: "_Call | None") -> None:
        self.before: ReferenceType[_Call] | None = None if before is None else ref(before)
        # Entries hold their call; both end when autograd lets go of what it has saved.
        self.entries: list[ReferenceType[_Entry]] = []

    def alive(self) -> Iterator[_Entry]:
        return (entry for entry in (each() for each in self.entries) if entry is not None)

    def earlier(self, count: int) -> Iterator["_Call"]:
        """This call and some before it, the latest first."""
        call: _Call | None = self
        while call is not None and count >= 0:
            yield call
            call, count = None if call.before is None else call.before(), count - 1


class ActivationOffload:
    """What ``offload_activations`` returns.

    Attributes:
        host_bytes: Bytes that are in host memory now; 0 between steps.
        moved_bytes: Bytes that have gone to host memory since the beginning.
    """

    def __init__(self, kind: str, in_flight: int, least_bytes: int) -> None:
        self.kind, self.in_flight, self.least_bytes = kind, in_flight, least_bytes
        self.engine = CopyEngine()
        self.host_bytes = self.moved_bytes = 0
        self._leaving: deque[_Call] = deque()
        self._arrived: deque[_Call] = deque()
        self._key: Hashable = None
        self._last: dict[Hashable, ReferenceType[_Call]] = {}

    def begin(self, key: Hashable) -> None:
        """Blocks that are called from now on belong to the micro-batch, or the stage of one, of this key."""
        self._key = key

    def expect(self, key: Hashable) -> None:
        """Starts to copy back what the backward of a micro-batch reads first."""
        if (found := self._last.get(key)) is not None and (call := found()) is not None:
            self._fetch(call.earlier(self.in_flight - 1))

    def wrap(self, block: nn.Module) -> None:
        """Applies it to a block, in place."""
        forward = block.forward

        @functools.wraps(forward)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            # A block that is computed again for a backward is needed at once.
            if not torch.is_grad_enabled() or in_backward():
                return forward(*args, **kwargs)
            with self._hooks(block, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]):
                return forward(*args, **kwargs)

        block.forward = offloaded

    @contextlib.contextmanager
    def _hooks(self, block: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
        before = self._last.get(self._key)
        call = _Call(None if before is None else before())
        self._last = {key: each for key, each in self._last.items() if each() is not None} | {self._key: ref(call)}
        self._leaving.append(call)
        while len(self._leaving) > self.in_flight:
            self._release(self._leaving.popleft())
        moved = {_memory(t) for t in inputs if t.requires_grad}
        staying = {_memory(t) for t in (*block.parameters(), *block.buffers())}
        staying |= {_memory(t) for t in inputs if not t.requires_grad}
        # Their parameters are gathered later, in the block.
        nested = [m for m in block.modules() if isinstance(m, FSDPModule) and m is not block]
        seen: dict[Any, _Entry] = {}

        def pack(t: Tensor) -> Any:
            if type(t) is not Tensor or t.layout is not torch.strided or t.nbytes < self.least_bytes:
                return t
            storage, memory = t.untyped_storage(), _memory(t)
            if memory in staying or (self.kind == "inputs" and memory not in moved) or _is_parameter(t):
                return t
            # An expanded tensor, and a part of a larger one, whose memory would not become free.
            if not t.nbytes <= storage.nbytes() <= 4 * t.nbytes:
                return t
            if any(memory == _memory(p) for m in nested for p in m.parameters()):
                return t
            entry = seen.get((memory, t._version))
            if entry is None or entry.on_device is None:
                whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
                entry = seen[memory, t._version] = _Entry(self, call, whole)
                call.entries.append(ref(entry))
                self.moved_bytes += entry.host.nbytes
            return entry, (t.dtype, t.storage_offset(), t.shape, t.stride())

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            entry, form = packed
            self._fetch(entry.call.earlier(self.in_flight))
            dtype, *place = form
            whole = entry.get()
            return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), *place)

        with saved_tensors_hooks(pack, unpack):
            yield
        seen.clear()  # later tensors may have the same memory

    def _fetch(self, calls: Iterable[_Call]) -> None:
        """Copies calls back, and frees those that came back before them."""
        for call in calls:
            if call in self._arrived:
                continue
            self._arrived.append(call)
            for entry in call.alive():
                entry.fetch()
            while len(self._arrived) > self.in_flight + 1:
                self._release(self._arrived.popleft())

    def _release(self, call: _Call) -> None:
        for entry in call.alive():
            entry.leave()


def _memory(t: Tensor) -> int:
    own = t._local_tensor if isinstance(t, DTensor) else t
    return own.untyped_storage().data_ptr() if own.layout is torch.strided else 0


def _is_parameter(t: Tensor) -> bool:
    """A parameter, or one in another form: transposed, or cast by autocast."""
    node: Any = t.grad_fn
    while node is not None and node.name().removesuffix("Backward0").removesuffix("Backward") in _FORMS:
        before = [each for each, _ in node.next_functions if each is not None]
        if before and all(hasattr(each, "variable") for each in before):
            return True
        node = before[0] if len(before) == 1 else None
    return node is not None and hasattr(node, "variable")


def offload_activations(
    model: nn.Module, names: Sequence[str], kind: Offload = "inputs", *, in_flight: int = 2,
    least_bytes: int = LEAST_BYTES,
) -> ActivationOffload:  # fmt: skip
    """Keeps activations of blocks in host memory, pinned on CUDA, from the forward until the backward needs them.

    Gradients are the same bit by bit. Apply it after recomputation and before ``fully_shard``.

        names = [f"layers.{number}" for number in range(len(model.layers))]
        recompute(model, names, "full")
        offload_activations(model, names)

    Args:
        names: Names of the blocks in ``model.named_modules()``, in the order in which they are called.
        kind: ``"inputs"``: the blocks' inputs, all that remains of a block that is recomputed; ``"all"``: everything
            that autograd saves in them.
        in_flight: Blocks that are on their way to the host at a time, and back.
        least_bytes: Smaller tensors stay on the device.

    Raises:
        ValueError: ``kind`` is unknown, a name is that of no module, ``in_flight`` is below 1 or ``least_bytes`` below
            0.
    """
    if kind not in (known := get_args(Offload)):
        raise ValueError(f"offload_activations: kind must be one of {', '.join(map(repr, known))}, got {kind!r}")
    if in_flight < 1:
        raise ValueError(f"offload_activations: in_flight must be at least 1, got {in_flight}")
    if least_bytes < 0:
        raise ValueError(f"offload_activations: least_bytes must be at least 0, got {least_bytes}")
    modules = dict(model.named_modules())
    if missing := [name for name in names if name not in modules]:
        raise ValueError(f"offload_activations: the model has no module {missing[0]!r}")
    found = ActivationOffload(kind, in_flight, least_bytes)
    if kind != "none":
        for name in names:
            found.wrap(modules[name])
    return found
