"""What a capture of ``fake_graphs`` records, and how a replay runs it.

An op is recorded with the memory that it reads and writes, a collective with its wait, a matmul of experts as the one
kernel that it is on GPUs.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.transports.fake_memory import Memory, destroy
from support.transports.fake_streams import NotCapturable, now, refuse

_READS = (
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "allclose",
)  # fmt: skip
_BLOCKING = ("barrier", "monitored_barrier")


@contextlib.contextmanager
def inside() -> Iterator[None]:
    now.inside += 1
    try:
        yield
    finally:
        now.inside -= 1


class CUDAGraph:
    """What was captured, as functions, and the memory that they read and write."""

    replays = 0  # of all graphs

    def __init__(self) -> None:
        self._steps: list[Callable[[], Any]] = []
        self._before: dict[int, tuple[Any, Any]] = {}
        self.memory = Memory()

    def add(self, step: Callable[[], Any]) -> None:
        now.stream.launch()
        self._steps.append(step)

    def resizes(self, memory: Any, step: Callable[[], Any]) -> None:
        """Memory that is taken from, or given back to, the graph's pool."""
        self.memory.made(memory)
        self._steps.append(step)

    def will_write(self, tensors: Any) -> None:
        """Keeps memory that the capture must leave as it is."""
        for t in tree_leaves(tensors):
            if isinstance(t, Tensor) and (memory := t.untyped_storage())._cdata not in self._before:
                with inside():
                    self._before[memory._cdata] = memory, memory.clone()

    def wrote(self, results: list[Tensor], given: Any) -> None:
        """Memory of results that is not memory of the arguments is undefined until a replay."""
        known = {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, Tensor)}
        for t in results:
            memory = t.untyped_storage()
            if memory._cdata not in known:
                self._before.setdefault(memory._cdata, (memory, None))
                self.memory.made(memory)

    def end(self) -> None:
        """Takes back what the capture computed."""
        for memory, before in self._before.values():
            if before is None:
                destroy(memory)
            elif memory.size() == before.size():
                memory.copy_(before)
        self._before.clear()
        self.memory.end()

    @torch.no_grad()
    def replay(self) -> None:
        refuse("a replay")
        assert self._steps, "nothing was captured"
        with self.memory.replayed():
            for step in self._steps:
                step()
        CUDAGraph.replays += 1

    def reset(self) -> None:
        self._steps.clear()


class Recorder(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, nn.Parameter) for kind in types):  # its own ops come here
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        if now.inside or namespace == "prim" or name in ("detach", "alias"):
            return func(*args, **kwargs)
        _check(namespace, name, args, kwargs)
        capture = now.capture
        assert capture is not None
        if func._schema.is_mutable:
            capture.will_write((args, kwargs))
        with inside():
            out = func(*args, **kwargs)
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if any(type(t) not in (Tensor, nn.Parameter) or t.is_meta for t in results):
            return out
        capture.wrote(results, (args, kwargs))
        held_args, held_kwargs, held = capture.memory.aliases((args, kwargs, results))

        def again() -> None:
            with inside():
                new = func(*held_args, **held_kwargs)
                for old, value in zip(held, (t for t in tree_leaves(new) if isinstance(t, Tensor)), strict=True):
                    if namespace == "_c10d_functional":
                        torch.ops._c10d_functional.wait_tensor(value)
                    if value.data_ptr() != old.data_ptr():
                        old.detach().copy_(value)

        capture.add(again)
        return out


def _check(namespace: str, name: str, args: Any, kwargs: Any) -> None:
    if namespace != "aten":
        return
    indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
    masks = any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in indices)
    counted = name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3
    if name in _READS or masks or counted:
        raise NotCapturable(f"the host reads what {name} computes")
    if name == "lift_fresh":
        raise NotCapturable("data of the host become a tensor")


class _Work(dist.Work):
    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def wait(self, *timeout: Any) -> bool:
        if now.capture is not None and not now.inside:
            now.capture.add(self._wait)
        return self._wait(*timeout)

    def _wait(self, *timeout: Any) -> bool:
        with inside():  # gloo copies to the result here
            return bool(self.work.wait(*timeout))

    def is_completed(self) -> bool:
        refuse("a collective is queried")
        return bool(self.work.is_completed())


def collective(name: str) -> Any:
    original = getattr(dist.ProcessGroup, name)

    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        if now.capture is None or now.inside:
            return original(group, *args, **kwargs)
        if name in _BLOCKING:
            raise NotCapturable(f"the host waits in a {name}")
        now.capture.will_write(args)
        with inside():
            work = _Work(original(group, *args, **kwargs))
        held = now.capture.memory.aliases(args)

        def again() -> None:
            with inside():
                work.work = original(group, *held, **kwargs)

        now.capture.add(again)
        return work

    return mock.patch.object(dist.ProcessGroup, name, method)


def grouped(original: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Matmuls of experts, which are one kernel on GPUs; on CPUs the host reads where groups end."""

    def method(*args: Any) -> Tensor | None:
        capture = now.capture
        if capture is None or now.inside:
            return original(*args)
        capture.will_write(args[0])
        with inside():
            out = original(*args)
        capture.wrote([] if out is None else [out], args)
        held, result = capture.memory.aliases((args, out))

        def again() -> None:
            with inside():
                new = original(*held)
                if result is not None and new is not None:
                    result.copy_(new)

        capture.add(again)
        return out

    return method
