"""GPUs that map each other's memory, on the CPU: lanes are queues of steps, executed in an order that a seed decides.

The hosts of the ranks run over loopback. Whenever a host waits for an event, the devices go on until none can.
"""

import random
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from support.loopback import LoopbackTransport

Step = tuple[Callable[[], bool], Callable[[], None]]  # (may it go on?, what it does)


class Devices:
    """The memory and the queues of ``size`` devices.

    Args:
        one_queue: every device executes all its lanes in the order of enqueuing, as with
            CUDA_DEVICE_MAX_CONNECTIONS=1.
    """

    def __init__(self, size: int, slot_bytes: int, seed: int, one_queue: bool) -> None:
        self.size, self.slot_bytes, self.one_queue = size, slot_bytes, one_queue
        self.slots = torch.zeros(size, size, 2, slot_bytes, dtype=torch.uint8)
        self.flags = [[0] * (2 * size) for _ in range(size)]
        self.queues: list[list[Step]] = []
        self._random = random.Random(seed)
        self._running = threading.Lock()

    def run(self) -> None:
        """Until every queue is empty or waits."""
        with self._running:
            while able := [q for q in self.queues if q and q[0][0]()]:
                _, do = self._random.choice(able).pop(0)
                do()


def void(_: object) -> None:
    pass


class _Event:
    def __init__(self, lane: "_Lane") -> None:
        self._memory, self._passed = lane.memory, False
        lane.enqueue(lambda: True, self._pass)

    def _pass(self) -> None:
        self._passed = True

    def done(self) -> bool:
        self._memory.devices.run()
        return self._passed

    def wait(self) -> None:
        self._memory.host.wait_until(self.done, "device", "for an event")

    def keep(self, tensor: Tensor) -> None:
        self._memory.kept.append(tensor)


class _Lane:
    def __init__(self, memory: "FakeMemory", queue: list[Step]) -> None:
        self.memory, self._queue = memory, queue

    def enqueue(self, ready: Callable[[], bool], do: Callable[[], None]) -> None:
        self._queue.append((ready, do))

    def begin(self) -> None:
        pass  # the host of this device computes in place: what it has enqueued is done

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.enqueue(lambda: True, lambda: void(target.copy_(source)))

    def set_flag(self, rank: int, index: int, value: int) -> None:
        self.enqueue(lambda: True, lambda: self.memory.devices.flags[rank].__setitem__(index, value))

    def wait_flag(self, index: int, value: int) -> None:
        own = self.memory.devices.flags[self.memory.rank]
        # As the driver compares: cyclic, as signed 32-bit numbers.
        self.enqueue(lambda: (own[index] - value) % 2**32 < 2**31, lambda: None)

    def event(self) -> _Event:
        return _Event(self)


class FakeMemory:
    device = torch.device("cpu")

    def __init__(self, devices: Devices, host: LoopbackTransport) -> None:
        self.devices, self.host = devices, host
        self.rank, self.size, self.slot_bytes = host.rank, host.size, devices.slot_bytes
        self._queue: list[Step] | None = None
        self.released = 0
        self.kept: list[Tensor] = []

    def slot(self, owner: int, peer: int, index: int) -> Tensor:
        return self.devices.slots[owner, peer, index]

    def lane(self) -> _Lane:
        if self._queue is None or not self.devices.one_queue:
            self._queue = []
            self.devices.queues.append(self._queue)
        return _Lane(self, self._queue)

    def flags(self) -> list[int]:
        return list(self.devices.flags[self.rank])

    def release(self, values: list[int]) -> None:
        self.devices.flags[self.rank][:] = values
        self.released += 1
