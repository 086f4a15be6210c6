"""The time of a launch by what limits it, and the share of the speed of a clone."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu_model.devices import (
    ISSUE_SLOTS,
    L2_BYTES,
    L2_LATENCY,
    LATENCY,
    LAUNCH_GAP,
    SPECIAL_FUNCTIONS,
    Device,
)
from benchmarks.gpu_model.facts import Facts

_KEPT = 0.75  # of L2, before what is read again has been evicted. Assumed.
# Memory and SMs that work beside each other do not hide each other wholly: their times are added to this
# power. Where both take as long, the launch takes 1.26 times that; where one needs two thirds of the other, 1.09 times.
# Chosen by what was measured on an H100; see ``docs/gpu/model.md``.
OVERLAP = 3.0


def beside(one: float, other: float) -> float:
    """Seconds of what runs beside each other."""
    return float((one**OVERLAP + other**OVERLAP) ** (1 / OVERLAP))


@dataclass(frozen=True)
class Launch:
    """Seconds that each resource needs for one launch."""

    facts: Facts
    resident: int
    waves: float
    wave_efficiency: float
    bytes: float  # moved by memory
    seconds: dict[str, float]  # bytes, issue, special, l2, latency

    @property
    def limit(self) -> str:
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def rest(self) -> str:
        """The resource that takes longest beside moving bytes."""
        return max((name for name in self.seconds if name != "bytes"), key=self.seconds.__getitem__)

    @property
    def together(self) -> float:
        """With work for all SMs."""
        return beside(self.seconds.get("bytes", 0.0), self.seconds[self.rest])

    @property
    def total(self) -> float:
        return self.together / self.wave_efficiency


@dataclass(frozen=True)
class Prediction:
    launches: tuple[Launch, ...]
    least: int  # bytes that the op must move
    elements: int
    device: Device

    @property
    def clone(self) -> float:
        """Seconds of a clone that moves the least bytes; it waits for its first loads, as the op does."""
        return LATENCY + self.least / self.device.clone_bandwidth

    @property
    def gaps(self) -> float:
        """Seconds between the op's own launches."""
        return LAUNCH_GAP * sum(not x.facts.waits for x in self.launches[1:])

    @property
    def total(self) -> float:
        return LATENCY + sum(x.total for x in self.launches) + self.gaps

    @property
    def share(self) -> float:
        """Share of the speed of a clone."""
        return self.clone / self.total

    @property
    def lost(self) -> dict[str, float]:
        """Seconds beyond a clone's by cause: more bytes than the least, what does not hide behind them, SMs
        without work, sums finished at the end, gaps between launches."""
        workers = [x for x in self.launches if not x.facts.waits]
        lost = dict.fromkeys(("bytes", "waves", "sums", "launches"), 0.0)
        lost["bytes"] = sum(x.seconds["bytes"] for x in workers) - self.least / self.device.clone_bandwidth
        for x in workers:
            lost[x.rest] = lost.get(x.rest, 0.0) + x.together - x.seconds["bytes"]
            lost["waves"] += x.total - x.together
        lost["sums"] = sum(x.total for x in self.launches if x.facts.waits)
        lost["launches"] = self.gaps
        return lost

    @property
    def main(self) -> Launch:
        return max(self.launches, key=lambda x: x.total)

    @property
    def limit(self) -> str:
        """The resource that the longest launch waits for; waves, where they cost more than a tenth."""
        main = self.main
        return "waves" if main.limit == "bytes" and main.wave_efficiency < 0.9 else main.limit

    @property
    def bytes(self) -> float:
        return sum(x.bytes for x in self.launches)

    @property
    def instructions(self) -> float:
        """Machine instructions an element."""
        return 32 * sum(x.facts.instructions * x.facts.warps * x.facts.programs for x in self.launches) / self.elements

    @property
    def issue_share(self) -> float:
        """Share of the issue slots, at the speed of a clone."""
        return sum(x.seconds["issue"] for x in self.launches) / (self.least / self.device.clone_bandwidth)


def wave_efficiency(programs: int, multiprocessors: int, resident: int) -> float:
    """The share of the time that SMs have work, if all programs take as long and start together."""
    if programs > multiprocessors * resident:  # as one ends the next begins; see ``launch`` for the last ones
        return 1.0
    return programs / (multiprocessors * -(-programs // multiprocessors))


def _memory_bytes(facts: Facts, device: Device, resident: int) -> float:
    """Bytes that miss L2. Programs share an operand that fits; one finds what it read before, if all that run fit."""
    kept = _KEPT * device.l2
    running = min(facts.programs, device.multiprocessors * resident)
    # Written bytes take the place of what has been read for the last time.
    in_use = running * sum(o.by_program for o in facts.operands if not o.stored) / facts.programs / facts.rounds
    missed = max(0.0, 1 - kept / in_use) if in_use else 0.0
    total = 0.0
    for o in facts.operands:
        shared_between = o.by_program - o.once
        # Neighbours share the sectors where one's row ends and the other's begins.
        lost = shared_between if o.size > kept and shared_between > 0.1 * o.once else 0.0
        again = 0.0 if o.stored else max(0.0, o.requested - o.by_program) * missed
        total += o.once + lost + again
    return total


def _finishing(facts: Facts, device: Device, resident: int) -> Launch:
    """Programs that have waited for the last worker: they see its number, and add what is in L2."""
    cycle = 1 / device.clock
    rounds = -(-facts.programs // (device.multiprocessors * resident))
    # The first phase is a program's beginning, the second one the wait.
    one = (facts.phases - 2) * L2_LATENCY + facts.instructions * max(1.0, facts.warps / ISSUE_SLOTS) * cycle
    issued = facts.instructions * facts.warps * facts.programs
    seconds = {
        "latency": 2 * L2_LATENCY + rounds * one,  # a worker's number goes to L2 and comes from there
        "issue": issued * cycle / (device.multiprocessors * ISSUE_SLOTS),
        "L2": sum(o.requested for o in facts.operands) * cycle / (device.multiprocessors * L2_BYTES),
    }
    return Launch(facts, resident, facts.programs / (device.multiprocessors * resident), 1.0, 0.0, seconds)


def launch(facts: Facts, device: Device) -> Launch:
    resident = device.resident(facts.registers, facts.warps, facts.shared_bytes)
    if resident == 0:
        raise ValueError(f"{facts.kernel} does not fit a multiprocessor of {device.name}")
    if facts.waits:
        return _finishing(facts, device, resident)
    slots = device.multiprocessors * resident
    moved = _memory_bytes(facts, device, resident)
    cycle = 1 / device.clock
    issued = facts.instructions * facts.warps * facts.programs
    special = facts.special * facts.warps * facts.programs
    # One program alone: its loads one after the other, and its instructions on its schedulers.
    alone = facts.phases * LATENCY + facts.instructions * max(1.0, facts.warps / ISSUE_SLOTS) * cycle
    seconds = {
        "bytes": moved / device.clone_bandwidth,
        "issue": issued * cycle / (device.multiprocessors * ISSUE_SLOTS),
        "special": special * cycle / (device.multiprocessors * SPECIAL_FUNCTIONS),
        "L2": sum(o.requested for o in facts.operands) * cycle / (device.multiprocessors * L2_BYTES),
        "latency": max(1.0, facts.programs / slots) * alone - LATENCY,  # the first wait is not the launch's alone
    }
    efficiency = wave_efficiency(facts.programs, device.multiprocessors, resident)
    if facts.programs > slots:  # the last programs run while nothing else does
        longest = max(seconds.values())
        efficiency = longest / (longest + alone)
    elif facts.programs <= device.multiprocessors:  # idle SMs do not make latency longer
        seconds["latency"] *= efficiency
    return Launch(facts, resident, facts.programs / slots, efficiency, moved, seconds)


def predict(launches: Sequence[Facts], device: Device, least: int, elements: int) -> Prediction:
    return Prediction(tuple(launch(f, device) for f in launches), least, elements, device)
