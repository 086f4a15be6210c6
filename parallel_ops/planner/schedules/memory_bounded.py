"""ZB-2p: a zero-bubble schedule for given times under a bound on activations.

The heuristic of Qi et al., arXiv:2401.10241, section 3.1, as a simulation in which each rank chooses its next pass when
it becomes free:

    - before its first I: F as far as memory allows (variant: only while F does not delay that I);
    - then F and I in turn, or the one that can run;
    - W if the rank would wait for longer than W takes, or if memory is full;
    - W in a shorter wait too if the rank would otherwise have the longest idle time (variant: never).

The best of the four combinations of variants is returned. The default bound is 2p micro-batches: beyond it the paper
finds that more memory hardly helps.
"""

import heapq
import itertools
import math

from parallel_ops.planner.schedules.action import Action, Kind, Schedule
from parallel_ops.planner.schedules.times import Times

# Relative tolerance of times: sums in another order differ in the last bits.
_TOLERANCE = 1e-9


def zb_2p(pp: int, micro_batches: int, times: Times, memory_limit: float, retained: float = 1.0) -> Schedule:
    """The best of the heuristic's schedules. Arguments: see ``parallel_ops.planner.schedules.schedule.actions``."""
    if not memory_limit >= 1:  # NaN neither
        raise ValueError(f"zb-2p: memory_limit must be at least 1 micro-batch, got {memory_limit}")
    if not 0 <= retained <= 1:
        raise ValueError(f"zb-2p: retained must be between 0 and 1, got {retained}")
    if times.pair is not None:
        raise ValueError("zb-2p: has no pairs; leave out the time of a pair")
    best: Schedule = []
    shortest = math.inf
    built: list[_Builder] = []
    for delay_first, fill in itertools.product((False, True), repeat=2):
        if any(other.same_with(delay_first, fill) for other in built):
            continue
        builder = _Builder(pp, micro_batches, times, memory_limit, retained, delay_first, fill)
        schedule = builder.build()
        built.append(builder)
        if (step := builder.step_time()) < shortest - builder.tolerance:
            best, shortest = schedule, step
    return best


class _Builder:
    """One variant. Events are processed in the order of time, so all passes that began before one are in the order."""

    def __init__(
        self,
        pp: int,
        micro_batches: int,
        times: Times,
        memory_limit: float,
        retained: float,
        delay_first: bool,
        fill: bool,
    ) -> None:
        self.pp, self.micro_batches = pp, micro_batches
        self.durations: dict[Kind, list[float]] = {
            "F": times.per_stage("forward", pp),
            "I": times.per_stage("input_grad", pp),
            "W": times.per_stage("weight_grad", pp),
        }
        self.link = times.per_stage("link", pp - 1)
        self.memory_limit, self.retained = memory_limit + _TOLERANCE, retained
        self.delay_first, self.fill = delay_first, fill
        # Whether the other value of each would have changed a choice.
        self.delay_matters = self.fill_matters = False
        self.tolerance = _TOLERANCE * max(1.0, *(max(times) for times in self.durations.values()))
        # Per rank: ends of F and of I, number of W, time at which it is free, idle time so far.
        self.forward_ends: list[list[float]] = [[] for _ in range(pp)]
        self.input_grad_ends: list[list[float]] = [[] for _ in range(pp)]
        self.weight_grads = [0] * pp
        self.free = [0.0] * pp
        self.idled = [0.0] * pp
        self.most_idled = 0.0
        self.order: Schedule = [[] for _ in range(pp)]

    def same_with(self, delay_first: bool, fill: bool) -> bool:
        """Whether the schedule with these options is known to be the one that was built."""
        return (not self.delay_matters or delay_first == self.delay_first) and (
            not self.fill_matters or fill == self.fill
        )

    def build(self) -> Schedule:
        events = [(0.0, rank) for rank in range(self.pp)]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.free[rank] - self.tolerance or self.weight_grads[rank] == self.micro_batches:
                continue
            kind, wake = self._choose(rank, now)
            if kind is None:
                if wake < math.inf:
                    heapq.heappush(events, (wake, rank))
                continue
            end = self._run(rank, kind, now)
            heapq.heappush(events, (end, rank))
            # The neighbour that waits for this pass can be scheduled now.
            neighbour = {"F": rank + 1, "I": rank - 1}.get(kind, -1)
            if 0 <= neighbour < self.pp:
                heapq.heappush(events, (max(now, self.free[neighbour]), neighbour))
        return self.order

    def step_time(self) -> float:
        """Seconds from the first to the last pass of the slowest rank."""
        each = zip(*self.durations.values(), strict=True)
        return max(idled + self.micro_batches * sum(own) for idled, own in zip(self.idled, each, strict=True))

    def _choose(self, rank: int, now: float) -> tuple[Kind | None, float]:
        """The next pass of a free rank; or ``None`` and the time to try again, infinite until a neighbour has run."""
        forward, backward = self._forward_arrival(rank), self._input_grad_arrival(rank)
        forwards, input_grads = len(self.forward_ends[rank]), len(self.input_grad_ends[rank])
        soon = now + self.tolerance
        held = forwards - input_grads + (input_grads - self.weight_grads[rank]) * self.retained
        room = held + 1 <= self.memory_limit
        can_forward = forward <= soon and room
        if not input_grads and can_forward and backward > soon:
            in_time = backward >= soon + self.durations["F"][rank] - 2 * self.tolerance
            self.delay_matters |= not in_time
            can_forward = in_time or self.delay_first
        if backward <= soon and not (can_forward and input_grads and self.order[rank][-1].kind == "I"):
            return "I", now
        if can_forward:
            return "F", now
        wake = backward if backward > soon else math.inf
        if room and soon < forward < wake:
            wake = forward
        if self.weight_grads[rank] < input_grads:
            wait = wake - now
            full = forward <= soon and not room
            if full or wait >= self.durations["W"][rank] - self.tolerance:
                return "W", now
            if self.idled[rank] + wait > self.most_idled - self.tolerance:
                self.fill_matters = True
                if self.fill:
                    return "W", now
        return None, wake

    def _run(self, rank: int, kind: Kind, now: float) -> float:
        order = self.order[rank]
        if order:
            self.idled[rank] += max(0.0, now - self.free[rank])
            self.most_idled = max(self.most_idled, self.idled[rank])
        end = now + self.durations[kind][rank]
        if kind == "W":
            order.append(Action("W", self.weight_grads[rank], rank))
            self.weight_grads[rank] += 1
        else:
            ends = self.forward_ends[rank] if kind == "F" else self.input_grad_ends[rank]
            order.append(Action(kind, len(ends), rank))
            ends.append(end)
        self.free[rank] = end
        return end

    def _forward_arrival(self, rank: int) -> float:
        """Time at which the input of the rank's next F arrives; infinite if not determined yet."""
        mb = len(self.forward_ends[rank])
        if mb == self.micro_batches:
            return math.inf
        if rank == 0:
            return 0.0
        before = self.forward_ends[rank - 1]
        return before[mb] + self.link[rank - 1] if mb < len(before) else math.inf

    def _input_grad_arrival(self, rank: int) -> float:
        """The same for its next I."""
        mb = len(self.input_grad_ends[rank])
        if mb >= len(self.forward_ends[rank]):
            return math.inf
        own = self.forward_ends[rank][mb]
        if rank == self.pp - 1:
            return own
        behind = self.input_grad_ends[rank + 1]
        return max(own, behind[mb] + self.link[rank]) if mb < len(behind) else math.inf
