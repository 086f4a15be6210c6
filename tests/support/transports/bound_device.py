"""Which GPU torch 2.15 binds a group of NCCL to, without a GPU."""

import os
from typing import Any

import torch
import torch.distributed as dist


def bound_devices(monkeypatch: Any, gpus: int) -> list[torch.device]:
    """From now on ``init_process_group`` only adds the GPU that it would take on a node of so many to this list.

    As ``_nccl2_device`` of torch 2.15 has it, which makes a communicator on that GPU at once and refuses tensors of
    others. The lazy communicators before were of the GPU of their first tensor.
    """
    bound: list[torch.device] = []

    def init(backend: str, *, rank: int, device_id: torch.device | None = None, **_: Any) -> None:
        local = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else rank
        bound.append(device_id or torch.device("cuda", local % gpus))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: None)
    return bound
