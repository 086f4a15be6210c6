"""Resources of GPUs."""

from dataclasses import dataclass

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


# Sources, all of NVIDIA. A100: architecture whitepaper (2020) and datasheet (2021), SXM 80 GB. H100: architecture
# whitepaper (2022); bandwidths by the datasheet (2023). H200: datasheet (2024); the chip is that of the H100, L2 by
# cudaGetDeviceProperties. The clock of both SXM parts is their highest, which memory-bound kernels keep. B200:
# datasheet of the HGX B200 (2024), an eighth of the board; SMs and L2 by cudaGetDeviceProperties; its clock is assumed,
# below that of the H100.
DEVICES = (
    Device("A100", 80, multiprocessors=108, clock=1.41e9, bandwidth=2.039e12, l2=40 << 20),
    Device("H100 PCIe", 90, multiprocessors=114, clock=1.755e9, bandwidth=2.0e12, l2=50 << 20),
    Device("H100 SXM", 90, multiprocessors=132, clock=1.98e9, bandwidth=3.35e12, l2=50 << 20),
    Device("H200", 90, multiprocessors=132, clock=1.98e9, bandwidth=4.8e12, l2=60 << 20),
    Device("B200", 100, multiprocessors=148, clock=1.755e9, bandwidth=8.0e12, l2=132644864),
)
