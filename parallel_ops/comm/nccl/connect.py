"""Makes the communicator of a group, if all of its ranks can: they agree before NCCL would wait for one that cannot.

The ranks compare, as before any first call on CUDA: which NCCL they have, on which GPU. Rank 0 puts NCCL's unique id in
the group's store. Then they compare whether it worked. One that fails in between ends NCCL's own wait of the others
after the timeout.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel_ops._internal.compat import current_raw_stream, group_store, group_timeout
from parallel_ops.comm.consistency import CallSignature, check_consistency, shared_error
from parallel_ops.comm.errors import PeerError

# ncclMemAlloc, and the first release that is tested with the versions of torch that this package supports.
LEAST_VERSION = 21900

_OP = "transport"


# Why a rank cannot take part, as all ranks know it by its number.
_MISSPELT, _UNWANTED, _NOT_BUILT, _NOT_FOUND, _TOO_OLD, _FAILED = range(1, 7)
REASONS = (
    "",
    "PARALLEL_OPS_TRANSPORT must be nccl or c10d",
    "PARALLEL_OPS_TRANSPORT=c10d",
    "its NCCL binding is not built",
    "it found no NCCL",
    "its NCCL is too old",
    "it could not look for NCCL",
)


@dataclass(frozen=True)
class Ready:
    """What a rank has.

    Args:
        library: ``parallel_ops.comm.nccl.library.Library``; ``None`` if there is none.
        gpu: equal for two ranks that share a GPU.
        reason: why it cannot take part, in ``REASONS``; 0 if it can. detail: more, for this rank alone.
    """

    library: Any = None
    gpu: int = 0
    reason: int = 0
    detail: str = ""


def ready_on(device: torch.device) -> Ready:
    """What this rank has for a communicator on CUDA device ``device``."""
    try:
        from parallel_ops.comm.nccl.library import NotSupported, load_nccl
    except ImportError as error:
        return Ready(reason=_NOT_BUILT, detail=str(error))
    try:
        library = load_nccl()
    except NotSupported as error:
        return Ready(reason=_NOT_FOUND, detail=str(error))
    if library.version_code < LEAST_VERSION:
        return Ready(library, reason=_TOO_OLD, detail=f"{library.version}, from {library.path}; 2.19 is needed")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return Ready(library, int.from_bytes(hashlib.blake2b(uuid.encode(), digest_size=7).digest(), "little"))


def connect(
    group: ProcessGroup,
    device: torch.device,
    *,
    wanted: str = "nccl",
    ready: Callable[[torch.device], Ready] = ready_on,
    side: Callable[[torch.device], Any] = lambda device: torch.cuda.Stream(device, priority=-1),
    stream: Callable[[torch.device], Callable[[], int]] = current_raw_stream,
) -> tuple[Any, str]:
    """The ``NcclTransport`` of this rank, or ``None`` and the reason, on all ranks alike. Collective.

    Args:
        device: of this rank's tensors.
        wanted: ``"nccl"``, or ``"c10d"`` on a rank where the user does not want it.
        ready, side, stream: what this rank has, NCCL's stream, and the caller's; tests pass their own.

    Raises:
        ValueError: the ranks make different calls, or ``wanted`` is something else on one of them.
        PeerError: one is gone.
    """
    own = _own(device, wanted, ready)
    version = 0 if own.library is None else own.library.version_code
    ranks = _compare(group, device, "ready", (own.reason, version, own.gpu))
    for rank, (reason, *_) in enumerate(ranks):
        if reason == _MISSPELT:
            raise shared_error(group, f"{_OP}: rank {rank}: {REASONS[reason]}")
    if own.detail:
        return None, f"rank {group.rank()}: {REASONS[own.reason]}: {own.detail}"
    if why_not := _why_not(ranks):
        return None, why_not
    timeout = group_timeout(group, device)
    transport, why_not = None, ""
    try:
        unique_id = _shared_id(group, own.library, timeout)
        transport = _made(group, device, own.library, unique_id, side(device), stream(device), timeout)
    except Exception as error:  # whatever it is, the others must know
        why_not = f"rank {group.rank()} could not make its communicator: {error}"
    made, puts = int(transport is not None), int(transport is not None and transport.puts)
    ranks = _compare(group, device, "connected", (made, puts))
    for rank, (connected, _) in enumerate(ranks):
        if not connected:
            return None, why_not or f"rank {rank} could not make its communicator"
    assert transport is not None
    transport.use_puts(all(row[1] for row in ranks))  # or some would put and others send
    return transport, ""


def _own(device: torch.device, wanted: str, ready: Callable[[torch.device], Ready]) -> Ready:
    if wanted != "nccl":
        return Ready(reason=_UNWANTED if wanted == "c10d" else _MISSPELT)
    try:
        return ready(device)
    except Exception as error:  # whatever it is, the others must know
        return Ready(reason=_FAILED, detail=str(error))


def _compare(group: ProcessGroup, device: torch.device, step: str, own: tuple[int, ...]) -> list[list[int]]:
    call = CallSignature(_OP, ("nccl", step), f"the first call of a group on {device.type} ({step})", own)
    rows = check_consistency(group, call, device, known=False)
    assert rows is not None
    return rows


def _why_not(ranks: list[list[int]]) -> str:
    for rank, (reason, _, _) in enumerate(ranks):
        if reason:
            return f"rank {rank}: {REASONS[reason]}"
    versions = [version for _, version, _ in ranks]
    if len(set(versions)) > 1:
        return f"the ranks have different versions of NCCL: {versions}"
    gpus = [gpu for *_, gpu in ranks]
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) < rank:
            return f"ranks {first} and {rank} share a GPU"
    return ""


def _shared_id(group: ProcessGroup, library: Any, timeout: float) -> bytes:
    store, key = group_store(group), f"parallel_ops/nccl/{group.group_name}"
    if group.rank() == 0:
        try:
            store.set(key, library.unique_id())
        except Exception:
            store.set(key, b"")  # so that the others do not wait
            raise
    store.wait([key], timedelta(seconds=timeout))
    if not (unique_id := store.get(key)):
        raise PeerError("rank 0 has no unique id")
    return bytes(unique_id)


def _made(
    group: ProcessGroup, device: torch.device, library: Any, unique_id: bytes, side: Any, stream: Callable[[], int],
    timeout: float,
) -> Any:  # fmt: skip
    from parallel_ops._nccl import Communicator
    from parallel_ops.comm.nccl.transport import MAX_CTAS, NcclTransport

    size, rank = group.size(), group.rank()
    index = -1 if device.index is None else device.index
    # A rank that has failed waits in the comparison that follows, no longer than the group's timeout.
    connecting = timeout / 2
    with torch.cuda.device(index):  # NCCL takes the current one; nothing for a negative index
        native = Communicator(library, unique_id, size, rank, index, side.cuda_stream, MAX_CTAS, timeout, connecting)
    return NcclTransport(native, library, rank, size, device, stream, side=side)
