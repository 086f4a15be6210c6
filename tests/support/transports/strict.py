"""Runs functions in gloo processes whose calls of c10d return and end when NCCL's would.

    results = strict.run(4, function, *args, eager=False)

Every call of a process group is reported to a referee in the test process, which applies ``nccl_rules`` and holds the
rank back: a call until its host would have it behind it, a wait until the GPU would. Data move over gloo. When all
ranks wait for each other, all raise ``Deadlock`` at once. A rank here stands in each wait, where on CUDA its stream
would: what passes here passes there, since a GPU's order of calls waits for less.

Not seen are collectives that torch starts in C++ (functional ones, of DTensor's redistribution).
"""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from parallel_ops.comm import call_messages, consistency
from parallel_ops.pipeline_parallel import pipeline
from support.ranks.distributed import Raised, ranks
from support.transports.nccl_rules import Message, Operation, Rules

# Methods of a process group by their names in torch 2.11 and 2.13; of the first, all ranks give the same sizes.
_SAME_SIZE = (
    "allreduce", "_allgather_base", "all_gather_single", "allgather", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter", "broadcast", "reduce",
)  # fmt: skip
_COLLECTIVES = (*_SAME_SIZE, "alltoall_base", "all_to_all_single", "alltoall", "barrier", "gather", "scatter")
# Calls that never end, such as one that waits in a store, end the run after so many seconds.
_SECONDS = 60


class Deadlock(Exception):
    """Every rank that is left waits for another, or ranks make different calls."""


def outcomes(size: int, function: Callable[..., Any], *args: Any, eager: bool) -> list[Any]:
    """What ``function(rank, *args)`` returned on each rank, or the ``Raised`` that it ended with."""
    with Referee(size, eager=eager) as referee:
        return ranks(size).outcomes(_strictly, referee.address, function, args)


def run(size: int, function: Callable[..., Any], *args: Any, eager: bool) -> list[Any]:
    """As ``outcomes``, of functions that must not raise."""
    results = outcomes(size, function, *args, eager=eager)
    raised = [result for result in results if isinstance(result, Raised)]
    if raised:
        ranks(size).close()  # messages may be on their way
        raise AssertionError(raised[0].trace)
    return results


class Referee:
    """A thread that holds ranks back."""

    def __init__(self, size: int, *, eager: bool) -> None:
        self._size, self._eager = size, eager
        self._folder = tempfile.TemporaryDirectory()
        self.address = str(Path(self._folder.name, "referee"))
        self._listener = Listener(self.address, "AF_UNIX")
        self._ended = threading.Event()
        self._ranks: dict[int, Connection] = {}
        self._start()

    def _start(self) -> None:
        self._rules, self._operations = Rules(eager=self._eager), dict[int, Operation]()
        # What each rank waits for: to return from a call, or its end.
        self._blocked: dict[int, tuple[Operation, str]] = {}
        self._live, self._problem = set(range(self._size)), ""

    def __enter__(self) -> "Referee":
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._listener.close()
        self._folder.cleanup()

    def _serve(self) -> None:
        socket: Any = self._listener._listener._socket  # type: ignore[attr-defined]
        connections: list[Connection] = []
        while not self._ended.is_set():
            for ready in wait([socket, *connections], 0.1):
                if ready is socket:
                    connections.append(self._listener.accept())
                    continue
                assert isinstance(ready, Connection)
                try:
                    self._hear(ready, *ready.recv())
                except EOFError:
                    connections.remove(ready)

    def _hear(self, connection: Connection, rank: int, what: str, *details: Any) -> None:
        if what == "begin":
            if rank in self._ranks:  # the ranks run once more
                self._ranks = {}
                self._start()
            self._ranks[rank] = connection
            connection.send(("", None))
            return
        if what == "end":
            self._live.discard(rank)
        elif self._problem:
            connection.send((self._problem, None))
        elif what == "post":
            try:
                operation = self._rules.post(rank, *details)
            except Exception as error:
                self._blocked[rank] = Operation(rank, "", (), "", ()), "done"
                self._stop(f"{type(error).__name__}: {error}")
                return
            self._operations[id(operation)] = operation
            self._blocked[rank] = operation, "may_return"
        elif what == "wait":
            self._blocked[rank] = self._operations[details[0]], "done"
        else:
            connection.send(("", self._operations[details[0]].done))
        self._answer()

    def _answer(self) -> None:
        for rank, (operation, until) in list(self._blocked.items()):
            if getattr(operation, until):
                del self._blocked[rank]
                self._ranks[rank].send(("", id(operation)))
        if self._blocked and set(self._blocked) == self._live:
            self._stop(f"ranks {sorted(self._live)} wait for each other")

    def _stop(self, why: str) -> None:
        first = "; ".join(f"rank {operation.rank}: {operation}" for operation in self._rules.pending())
        self._problem = f"{why}: {first}"
        for rank in self._blocked:
            self._ranks[rank].send((self._problem, None))
        self._blocked = {}


class _Rank:
    """What a rank says to the referee."""

    def __init__(self, address: str, rank: int) -> None:
        self._connection, self._rank, self._lock = Client(address, "AF_UNIX"), rank, threading.Lock()

    def __call__(self, what: str, *details: Any) -> Any:
        with self._lock:
            self._connection.send((self._rank, what, *details))
            if what == "end":
                return None
            if not self._connection.poll(_SECONDS):
                raise Deadlock(f"{what} {details} did not end within {_SECONDS} s")
            problem, answer = self._connection.recv()
        if problem:
            raise Deadlock(problem)
        return answer


class _Work(dist.Work):
    def __init__(self, rank: _Rank, number: int, works: list[Any]) -> None:
        super().__init__()
        self._rank, self._number, self._works = rank, number, works

    def wait(self, *timeout: Any) -> bool:
        self._rank("wait", self._number)
        while self._works:  # gloo's work of a message can be waited for once, NCCL's any number of times
            self._works.pop().wait(*timeout)
        return True

    def is_completed(self) -> bool:
        return bool(self._rank("done", self._number)) and all(work.is_completed() for work in self._works)


def _strictly(rank: int, address: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    referee = _Rank(address, rank)
    referee("begin")
    # As on CUDA: a call is compared the first time, by an all-gather, and pipelines have channels.
    once, checked = (lambda group, device: True), type(consistency._checked)()
    try:
        with (
            _reporting(referee), mock.patch.object(consistency, "_checks_once", once),
            mock.patch.object(consistency, "_checked", checked),
            mock.patch.object(call_messages, "_has_tags", return_value=False),
            mock.patch.object(pipeline, "MATCHED_BY_RANK", ()),
        ):  # fmt: skip
            return function(rank, *args)
    finally:
        referee("end")


@contextlib.contextmanager
def _reporting(referee: _Rank) -> Iterator[None]:
    batch, others = False, set[str]()  # groups that are gloo's on GPUs too

    def post(group: Any, name: str, messages: Sequence[Message] = (), *, batch: bool = False) -> int:
        members = tuple(dist.get_process_group_ranks(group))
        number: int = referee("post", group.group_name, members, name, messages, batch)
        return number

    def message(group: Any, tensors: Sequence[Tensor], peer: int, receives: bool) -> Message:
        return Message(dist.get_global_rank(group, peer), receives, sum(t.nbytes for t in tensors))

    def reporting(name: str) -> Any:
        original = getattr(dist.ProcessGroup, name)

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            if batch or group.group_name in others:
                return original(group, *args, **kwargs)
            if name in ("send", "recv"):
                number = post(group, name, [message(group, *args[:2], name == "recv")])
            else:
                number = post(group, f"{name} of {_bytes(args[0])} bytes" if name in _SAME_SIZE else name)
            return _Work(referee, number, [original(group, *args, **kwargs)])

        return mock.patch.object(dist.ProcessGroup, name, method)

    batched, new_group = dist.batch_isend_irecv, dist.new_group

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        nonlocal batch
        group = operations[0].group
        messages = [message(group, [o.tensor], o.group_peer, o.op is dist.irecv) for o in operations]
        number, batch = post(group, "batch", messages, batch=True), True
        try:
            return [_Work(referee, number, list(batched(operations)))]
        finally:
            batch = False

    def formed(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        group = new_group(*args, backend=backend, **kwargs)
        if backend == "gloo":
            others.add(group.group_name)
        return group

    with contextlib.ExitStack() as stack:
        for name in (*_COLLECTIVES, "send", "recv"):
            if hasattr(dist.ProcessGroup, name):
                stack.enter_context(reporting(name))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch_isend_irecv))
        stack.enter_context(mock.patch.object(dist, "new_group", formed))
        yield


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else sum(map(_bytes, value))
