"""A schedule as a program that can be run with any times of its passes.

A rank runs its actions in order, each as soon as the rank is free and its inputs have arrived. A message between ranks
takes the time of its link and occupies neither rank; between stages on the same rank it takes no time. The result is
exact, and the cost is linear in the number of actions.
"""

from collections import deque
from collections.abc import Sequence

from parallel_ops.planner.schedules.action import Action
from parallel_ops.planner.schedules.times import Times


def check_complete(actions: Sequence[Sequence[Action]]) -> tuple[int, int, list[int]]:
    """Checks that a schedule is complete. Returns the numbers of stages and micro-batches and the rank of each stage.

    Raises:
        ValueError: a pass is missing or doubled, a stage is on two ranks, a pair is not F and B, or a rank has nothing.
    """
    if not actions or not all(actions):
        raise ValueError("simulate: every rank needs at least one action")
    stages = 1 + max(action.stage for order in actions for action in order)
    micro_batches = 1 + max(action.micro_batch for order in actions for action in order)
    owners = [-1] * stages
    seen = {kind: bytearray(stages * micro_batches) for kind in "FIW"}
    for rank, order in enumerate(actions):
        for position, action in enumerate(order):
            kind, micro_batch, stage, paired = action
            if stage < 0 or micro_batch < 0 or kind not in ("F", "I", "W", "B"):
                raise ValueError(f"simulate: rank {rank} has {action}; kinds are F, I, W, B and numbers start at 0")
            if owners[stage] not in (-1, rank):
                raise ValueError(f"simulate: stage {stage} is on rank {owners[stage]} and on rank {rank}")
            owners[stage] = rank
            for one in "IW" if kind == "B" else kind:
                if seen[one][stage * micro_batches + micro_batch]:
                    raise ValueError(f"simulate: {one}{micro_batch} of stage {stage} runs twice")
                seen[one][stage * micro_batches + micro_batch] = 1
            if paired and (kind != "F" or position + 1 == len(order) or order[position + 1].kind != "B"):
                raise ValueError(f"simulate: rank {rank} pairs {action} with no B after it")
    for one, flags in seen.items():
        if (missing := flags.find(0)) >= 0:
            stage, micro_batch = divmod(missing, micro_batches)
            raise ValueError(f"simulate: {one}{micro_batch} of stage {stage} is missing")
    return stages, micro_batches, owners


# One pass, or a pair, of a program: the rank that runs it, the index of its duration, the entry on another stage that
# it depends on (-1 for none) and the link from there, and both of the second member of a pair. A plain tuple, since a
# schedule has up to a hundred thousand. Links are those of ``_links``.
_Entry = tuple[int, int, int, int, int, int]


class Program:
    """The passes of a schedule in topological order. Independent of times, so one program can be run with many.

    Raises:
        ValueError: see ``simulate``.
    """

    def __init__(self, actions: Sequence[Sequence[Action]]) -> None:
        self._actions = actions
        self._stages, micro_batches, self._owners = check_complete(actions)
        self._entries: list[_Entry] = []
        # Stages of F and B of each kind of pair; their durations come after those of single passes.
        self._pairs: dict[tuple[int, int], int] = {}
        # The entries that compute F and I (or B) of each stage and micro-batch.
        self._forward = [[-1] * micro_batches for _ in range(self._stages)]
        self._backward = [[-1] * micro_batches for _ in range(self._stages)]
        self._done = [0] * len(actions)
        waiting = deque(range(len(actions)))
        queued = [True] * len(actions)
        while waiting:
            rank = waiting.popleft()
            queued[rank] = False
            for other in self._advance(rank):
                if not queued[other]:
                    queued[other] = True
                    waiting.append(other)
        if any(done < len(order) for done, order in zip(self._done, actions, strict=True)):
            raise ValueError(self._deadlock())

    def run(self, times: Times) -> tuple[list[list[float]], list[list[float]], list[float]]:
        """Starts and ends of the actions of each rank, and the time that each rank computes."""
        durations, busy = self._durations(times), [0.0] * len(self._actions)
        started: list[list[float]] = [[] for _ in self._actions]
        ended: list[list[float]] = [[] for _ in self._actions]
        for (rank, which, *_), start, end in zip(self._entries, *self._walk(times), strict=True):
            members = 2 if which >= 4 * self._stages else 1  # of a pair
            started[rank] += [start] * members
            ended[rank] += [end] * members
            busy[rank] += durations[which]
        return started, ended, busy

    def step_time(self, times: Times, *, barrier: bool) -> float:
        """``Simulation.step_time`` with ``barrier``, else ``Simulation.step_time_without_barrier``."""
        if barrier:
            return max(self._walk(times)[1])  # the first entry starts at 0
        starts, ends, _ = self.run(times)
        return max(end[-1] - start[0] for start, end in zip(starts, ends, strict=True))

    def _walk(self, times: Times) -> tuple[list[float], list[float]]:
        """Start and end of each entry. A search needs the last end of a few hundred pipelines, and nothing by rank."""
        durations, links = self._durations(times), self._links(times)
        starts: list[float] = []
        ends: list[float] = []
        clocks = [0.0] * len(self._actions)
        for rank, which, after, link, also_after, also_link in self._entries:
            start = clocks[rank]
            if after >= 0 and (ready := ends[after] + links[link]) > start:
                start = ready
            if also_after >= 0 and (ready := ends[also_after] + links[also_link]) > start:
                start = ready
            clocks[rank] = end = start + durations[which]
            starts.append(start)
            ends.append(end)
        return starts, ends

    def _durations(self, times: Times) -> list[float]:
        forward, input_grad, weight_grad = (
            times.per_stage(name, self._stages) for name in ("forward", "input_grad", "weight_grad")
        )
        whole = [i + w for i, w in zip(input_grad, weight_grad, strict=True)]
        pairs = [forward[f] + whole[b] if times.pair is None else times.pair for f, b in self._pairs]
        return [*forward, *input_grad, *weight_grad, *whole, *pairs]

    def _links(self, times: Times) -> list[float]:
        """Time from the end of an entry to the arrival of its message: of F and I, then of B, then of the B of a pair.

        A B whose gradient leaves before W has sent it W seconds before its end. On the same rank the next entry starts
        later than that, after the end of B.
        """
        links = times.per_stage("link", self._stages - 1)
        owners = self._owners
        links = [0.0 if owners[s] == owners[s + 1] else link for s, link in enumerate(links)]
        if not times.input_grad_first:
            return links * 3
        weight_grad = times.per_stage("weight_grad", self._stages)[1:]
        whole = [link - last for link, last in zip(links, weight_grad, strict=True)]
        if times.pair is None:
            return links + whole * 2
        return links + whole + [link - min(last, times.pair) for link, last in zip(links, weight_grad, strict=True)]

    def _group(self, rank: int) -> Sequence[Action]:
        """The next action of a rank, with its partner in a pair."""
        order, position = self._actions[rank], self._done[rank]
        return order[position : position + 2] if order[position].paired else order[position : position + 1]

    def _advance(self, rank: int) -> set[int]:
        """Adds entries of the rank until one has to wait. Returns the ranks that may continue because of them."""
        woken: set[int] = set()
        stages, count = self._stages, len(self._actions[rank])
        while self._done[rank] < count:
            first, *second = group = self._group(rank)
            if (need := self._need(first)) is None:
                break
            which, also = "FIWB".index(first.kind) * stages + first.stage, (-1, 0)
            if second:
                if (needed := self._need(second[0])) is None:
                    break
                which, also = (
                    4 * stages + self._pairs.setdefault((first.stage, second[0].stage), len(self._pairs)),
                    needed,
                )
            for kind, mb, stage, _ in group:
                if kind != "W":
                    computed, follower = (self._forward, stage + 1) if kind == "F" else (self._backward, stage - 1)
                    computed[stage][mb] = len(self._entries)
                    if 0 <= follower < stages:
                        woken.add(self._owners[follower])
            self._entries.append((rank, which, *need, *also))
            self._done[rank] += len(group)
        return woken - {rank}

    def _need(self, action: Action) -> tuple[int, int] | None:
        """The entry on another stage that the action depends on (-1 for none) and the link from there; ``None`` if a
        dependency has not run."""
        kind, mb, stage, _ = action
        if kind == "F":
            entry, link = (-1, 0) if stage == 0 else (self._forward[stage - 1][mb], stage - 1)
            return None if stage and entry < 0 else (entry, link)
        own = self._backward[stage][mb] if kind == "W" else self._forward[stage][mb]
        if own < 0:
            return None
        if kind == "W" or stage == self._stages - 1:
            return -1, 0
        behind, last = self._backward[stage + 1][mb], self._stages - 1
        if behind < 0:
            return None
        sent = self._entries[behind][1]  # by its duration: I, B or a pair
        return behind, stage + (0 if sent < 3 * self._stages else last if sent < 4 * self._stages else 2 * last)

    def _deadlock(self) -> str:
        waits = []
        for rank, order in enumerate(self._actions):
            if self._done[rank] == len(order):
                continue
            action = next(action for action in self._group(rank) if self._need(action) is None)
            waits.append(f"rank {rank} waits at action {self._done[rank]} ({action}) for {self._missing(action)}")
        more = f"; and {len(waits) - 4} more ranks" if len(waits) > 4 else ""
        return "simulate: deadlock: " + "; ".join(waits[:4]) + more

    def _missing(self, action: Action) -> str:
        kind, mb, stage, _ = action
        if kind == "F":
            needed = Action("F", mb, stage - 1)
        elif kind == "W" or self._forward[stage][mb] < 0:
            needed = Action("I" if kind == "W" else "F", mb, stage)
        else:
            needed = Action("I", mb, stage + 1)
        return f"{needed} on rank {self._owners[needed.stage]}"
