"""Makes the package's own communicator of a group.

The ranks compare, as before any first call on CUDA, which NCCL they have. One that has none, or another version, is
named on all of them. Rank 0 puts NCCL's unique id in the group's store, under a nonce that it drew for the comparison:
group names start again after ``destroy_process_group``, and a store may outlive it. A rank that fails to connect ends
NCCL's own wait of the others after the group's timeout.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import current_raw_stream, group_store, group_timeout
from parallel_ops.comm.consistency import CallSignature, check_consistency, shared_error
from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.transport.base import Transport

_OP = "transport"
# From this release on ranks may share a GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1.
_SHARED_GPUS = 23000

# NCCL registers the buffers that a graph captures. Replays then crash or stand with ``expandable_segments``
# (pytorch/pytorch#158029), and receives may stand across nodes (NVIDIA/nccl#2389).
CAPTURES = {"NCCL_GRAPH_REGISTER": "0"}
# Two communicators on a GPU must start their kernels in one order on all ranks, which is that of the host's calls only
# if NCCL is told so (2.26).
TWO_COMMUNICATORS = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", **CAPTURES}


def set_environment(variables: Mapping[str, str]) -> None:
    """Sets NCCL's variables, read with the first communicator of the process, unless the user has set them."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def load_library() -> Any:
    """NCCL; raises ImportError or RuntimeError, with the reason, where there is none that can be used."""
    from parallel_ops.comm.nccl.library import load_nccl

    return load_nccl()


def gpu_of(device: torch.device) -> int:
    """A number of the GPU, equal for two ranks that share it."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return int.from_bytes(hashlib.blake2b(uuid.encode(), digest_size=7).digest(), "little")


def connect(
    group: ProcessGroup,
    device: torch.device,
    *,
    library: Callable[[], Any] = load_library,
    gpu: Callable[[torch.device], int] = gpu_of,
    stream: Callable[[torch.device], Callable[[], int]] = current_raw_stream,
) -> Transport:
    """The ``NcclTransport`` of this rank. Collective.

    Args:
        device: of this rank's tensors.
        library, gpu, stream: this rank's NCCL, GPU, and the caller's stream; tests pass their own.

    Raises:
        ValueError: a rank has no NCCL that can be used, or another version, or shares its GPU; on all ranks.
        PeerError: a rank is gone, or failed to connect.
    """
    nonce, found, problem = secrets.randbits(62), None, ""
    try:
        found = library()
        own = gpu(device)
        text = f"PARALLEL_OPS_TRANSPORT=nccl over NCCL {found.version}"
    except Exception as error:  # whatever it is, the others must know
        own, problem = 0, str(error)
        text = f"PARALLEL_OPS_TRANSPORT=nccl cannot be: {problem}"
    version = 0 if problem or found is None else found.version_code
    # Ranks of which one has none make different calls, so all raise.
    rows = check_consistency(group, CallSignature(_OP, (version,), text, (own, nonce)), device, known=False)
    assert rows is not None
    if not version:
        raise shared_error(group, f"{_OP}: {text}")
    gpus = [row[0] for row in rows]
    if len(set(gpus)) < len(gpus) and not _may_share(version):
        raise shared_error(group, f"{_OP}: PARALLEL_OPS_TRANSPORT=nccl cannot be: ranks share a GPU")
    timeout = group_timeout(group, device)
    unique_id = _shared_id(group, found, rows[0][1], timeout)
    return _made(group, device, found, unique_id, stream(device), timeout)


def _may_share(version: int) -> bool:
    return version >= _SHARED_GPUS and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def _shared_id(group: ProcessGroup, library: Any, nonce: int, timeout: float) -> bytes:
    store, key = group_store(group), f"parallel_ops/nccl/{group.group_name}/{nonce}"
    if group.rank() == 0:
        try:
            store.set(key, library.unique_id())
        except Exception:
            store.set(key, b"")  # so that the others do not wait
            raise
    store.wait([key], timedelta(seconds=timeout))
    if not (unique_id := store.get(key)):
        raise PeerError(f"{_OP}: rank 0 has no unique id")
    return bytes(unique_id)


def _made(
    group: ProcessGroup, device: torch.device, library: Any, unique_id: bytes, stream: Callable[[], int], timeout: float
) -> Transport:
    from parallel_ops._nccl import Communicator, NcclError
    from parallel_ops.comm.nccl.transport import MAX_CTAS, NcclTransport

    size, rank = group.size(), group.rank()
    index = -1 if device.index is None else device.index
    try:
        native = Communicator(library, unique_id, size, rank, index, MAX_CTAS, timeout)
    except NcclError as error:
        raise PeerError(f"{_OP}: {error}") from error
    return NcclTransport(native, rank, size, device, stream)
