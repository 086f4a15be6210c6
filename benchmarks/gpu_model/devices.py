"""Resources of GPUs. Every figure of ``devices.json`` names its source."""

import json
from dataclasses import dataclass
from pathlib import Path

# CUDA C++ Programming Guide, appendix on compute capabilities, technical specifications per multiprocessor: the same
# for 8.0, 9.0 and 10.0 but for shared memory, of which the runtime takes 1 KiB a block for itself.
REGISTERS = 65536
WARPS = 64
BLOCKS = 32
SHARED_MEMORY = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
_RESERVED_SHARED = 1024
# CUDA occupancy calculator: registers are given to warps in units of 256, shared memory in units of 128 bytes.
_REGISTER_UNIT = 256
_SHARED_UNIT = 128
# The same guide, throughput of arithmetic instructions: four schedulers of one instruction a cycle, and 16 results a
# cycle of reciprocals, square roots, exponentials and logarithms.
ISSUE_SLOTS = 4
SPECIAL_FUNCTIONS = 16 / 32

# A clone of a large tensor reached 89.6 % of the specified bandwidth of an H100 (quack, hadamard roofline analysis of
# 2026); the other GPUs are assumed to reach as much.
CLONE = 0.896
# Seconds from a load to its data when memory is busy, and from L2 when it is not. Assumed.
LATENCY = 700e-9
L2_LATENCY = 300e-9
# From the last program of a launch to the first of the next on the same stream, within 1 to 3 us. Assumed.
LAUNCH_GAP = 2e-6
# Bytes that L2 delivers to an SM a cycle: 5120 for the 108 of an A100 (its whitepaper); assumed elsewhere.
L2_BYTES = 5120 / 108


@dataclass(frozen=True)
class Device:
    name: str
    capability: int
    multiprocessors: int
    clock: float  # Hz
    bandwidth: float  # bytes a second, as specified
    l2: int  # bytes

    @property
    def clone_bandwidth(self) -> float:
        """Bytes that a clone reads and writes in a second."""
        return CLONE * self.bandwidth

    def resident(self, registers: int, warps: int, shared_bytes: int) -> int:
        """Programs that fit an SM at a time."""
        a_warp = -(-32 * registers // _REGISTER_UNIT) * _REGISTER_UNIT
        shared = -(-(shared_bytes + _RESERVED_SHARED) // _SHARED_UNIT) * _SHARED_UNIT
        return min(BLOCKS, WARPS // warps, REGISTERS // (a_warp * warps), SHARED_MEMORY[self.capability] // shared)


def load() -> list[Device]:
    data = json.loads(Path(__file__).with_name("devices.json").read_text())
    fields = ("multiprocessors", "clock", "bandwidth", "l2")
    for name, device in data["devices"].items():
        for field in fields:
            if device[field]["source"] not in data["sources"]:
                raise ValueError(f"devices.json: {field} of {name} has no source")
    return [
        Device(name, device["capability"], *(device[field]["value"] for field in fields))
        for name, device in data["devices"].items()
    ]
