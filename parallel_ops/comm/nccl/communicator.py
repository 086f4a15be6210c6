"""NCCL called directly, through communicators separate from torch's.

In addition to torch's process groups it offers sends and receives in one launch on a stream that the caller chooses;
settings per communicator (how many CTAs it may take, for example); and calls that end when a peer has failed. A
communicator is non-blocking: NCCL works in the background, and every call here waits for it up to a timeout, then
aborts the communicator and raises. A thread does the same for work on the GPU.

    communicator = Communicator(group, config=Config(max_ctas=4))
    communicator.enqueue("exchange", [send(x, right), receive(y, left)])

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html. How the library is found:
``parallel_ops.comm.nccl.library``. CUDA graph capture raises: launches come from a thread of NCCL's.
"""

import atexit
import time
import weakref
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from parallel_ops import _nccl
from parallel_ops.comm._capture import refuse_capture
from parallel_ops.comm.nccl.config import Config, CtaPolicy
from parallel_ops.comm.nccl.library import Library, NcclError, NotSupported, load_nccl
from parallel_ops.comm.nccl.operations import Operation, to_call
from parallel_ops.comm.nccl.rendezvous import (
    check_timeout,
    cuda_device,
    exchange_unique_id,
    native_config,
)
from parallel_ops.comm.nccl.watchdog import Event, Watchdog

__all__ = ["Communicator", "Config", "CtaPolicy", "NcclError", "NotSupported", "load_nccl"]

# As torch's default for its NCCL process groups.
DEFAULT_TIMEOUT = 600.0
_TIMEOUT_CODE = 8  # ncclTimeout


class Communicator:
    """This rank's end of an NCCL communicator over the ranks of ``group``. Collective.

    Args:
        group: a process group of torch, of any backend; it carries NCCL's unique id to the ranks, and nothing after.
        config: settings; the ranks may differ.
        device: the CUDA device of this rank; the current one by default.
        timeout: seconds that the other ranks have to join, to launch, and to finish what was launched.

    A communicator that is dropped is aborted: close it, or use it in a ``with`` block, when its work shall be finished.

    Raises:
        TypeError, ValueError: the arguments of this rank are wrong.
        NotSupported: a rank has no CUDA device or no NCCL, or one that is too old for its ``config``; the ranks have
            different versions of NCCL; another rank rejected its arguments.
        NcclError: NCCL failed, or a rank did not join in time.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        config: Config | None = None,
        device: torch.device | int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"Communicator: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
        # A rank that cannot take part tells the others instead of raising while they wait.
        try:
            check_timeout(timeout)
            own_device = cuda_device(device)
            library = load_nccl()
            settings = native_config("Communicator", config, library)
        except Exception as error:
            exchange_unique_id(group, error)
            raise
        unique_id = exchange_unique_id(group, library)
        with torch.cuda.device(own_device):
            native = _nccl.Communicator(library, unique_id, group.size(), group.rank(), settings, timeout)
        self._adopt(native, library, own_device, timeout)

    def _adopt(self, native: _nccl.Communicator, library: Library, device: torch.device, timeout: float) -> None:
        self._native, self._library, self._device, self._timeout = native, library, device, timeout
        self._watchdog = Watchdog(native, timeout, device)
        _alive.add(self)

    @classmethod
    def from_native(
        cls, native: _nccl.Communicator, library: Library, device: torch.device, timeout: float
    ) -> "Communicator":
        """Around a communicator of the binding that exists."""
        self = cls.__new__(cls)
        self._adopt(native, library, device, timeout)
        return self

    @property
    def rank(self) -> int:
        return self._native.rank

    @property
    def size(self) -> int:
        return self._native.size

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def library(self) -> Library:
        return self._library

    @property
    def timeout(self) -> float:
        """Seconds."""
        return self._timeout

    @property
    def alive(self) -> bool:
        """False once it was closed or aborted."""
        return self._native.alive()

    def enqueue(self, op: str, operations: Sequence[Operation], stream: torch.cuda.Stream | None = None) -> Event:
        """Enqueues all operations as one launch, on the current stream or on ``stream``.

        Returns when they are enqueued, with an event after them. On another stream than the current one the caller
        orders the streams. Unless they are done within the timeout, the communicator is aborted.

        Args:
            op: named in errors.
            operations: from ``parallel_ops.comm.nccl.operations``.
            stream: of this communicator's device.

        Raises:
            TypeError, ValueError: an operation is wrong; none was started.
            NotSupported: NCCL is too old for one of them; none was started.
            NcclError: this or an earlier operation failed or was not enqueued in time. The communicator is aborted.
            RuntimeError: the stream is being captured in a CUDA graph.
        """
        calls = [to_call(op, operation, self._device, self.size) for operation in operations]
        self.refuse_capture(op, stream)
        if stream is not None:
            # The caching allocator must not hand the memory out again before that stream is done with it, nor after
            # a launch that failed half-way.
            for operation in operations:
                for tensor in (operation.input, operation.output):
                    if tensor is not None and tensor.is_cuda:
                        tensor.record_stream(stream)
        self._native.launch(op, calls, _stream_handle(stream, self._device), self._timeout)
        event = _record(stream, self._device)
        self._watchdog.watch(op, event)
        return event

    def refuse_capture(self, op: str, stream: torch.cuda.Stream | None = None) -> None:
        """RuntimeError if ``stream``, by default the current one, is being captured in a CUDA graph."""
        refuse_capture(op, self._device.type, "this communicator cannot be captured in a CUDA graph", stream)

    def check(self, op: str) -> None:
        """Raises NcclError if something enqueued before has failed since. Does not wait."""
        self._native.check(op)

    def wait(self, op: str, event: Event) -> None:
        """The host waits until ``event`` has completed. Raises NcclError after an error or the timeout."""
        end = time.monotonic() + self._timeout
        pause = 20e-6
        while not event.query():
            self.check(op)
            if time.monotonic() > end:
                reason = f"{op}: rank {self.rank} of {self.size}: not done on the GPU within {self._timeout:g} s"
                self.abort(reason)
                error = NcclError(reason)
                error.code = _TIMEOUT_CODE
                raise error
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        self.check(op)

    def abort(self, reason: str) -> None:
        """Ends what it does on the GPU, now; every later call raises NcclError with this reason."""
        self._watchdog.close()
        self._native.abort(f"it was aborted: {reason}")

    def close(self) -> None:
        """Waits until all ranks have finished their work, then frees the communicator. Collective."""
        if self.alive:
            self._native.finalize(self._timeout)
        self._watchdog.close()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort(f"an error left its block: {error}")


def _stream_handle(stream: torch.cuda.Stream | None, device: torch.device) -> int:
    return (torch.cuda.current_stream(device) if stream is None else stream).cuda_stream


def _record(stream: torch.cuda.Stream | None, device: torch.device) -> Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device) if stream is None else stream)
    return event


# Aborted before the process ends, since CUDA may be gone by the time that Python drops them.
_alive: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _abort_all() -> None:
    for communicator in list(_alive):
        if communicator.alive:
            communicator.abort("the process ends")
