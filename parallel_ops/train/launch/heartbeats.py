"""Heartbeats of ranks, and the rules by which a rank counts as stalled; see ``watchdog``."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from parallel_ops.comm.errors import named

# Slow activities may take as many times ``run.timeout``: with the default, torch's own half hour.
SLOW = 6


class Clock:
    """Seconds for which this process has run.

    The time between two calls counts for at most ``most`` seconds: in a longer one the process was suspended, and maybe
    all others with it, as by Ctrl-Z.
    """

    def __init__(self, most: float) -> None:
        self._most, self._sum, self._last = most, 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._sum, self._last = self._sum + min(now - self._last, self._most), now
        return self._sum


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank.

    Attributes:
        beat: Counts the heartbeats. count: Number of activities so far. text: The current activity.
        allowance: Multiple of ``run.timeout`` that the current activity may take.
        finished: The run is over for this rank. waits: The current activity waits for another pipeline stage.
    """

    beat: int = 0
    count: int = 0
    text: str = "starting"
    allowance: float = SLOW
    finished: bool = False
    waits: bool = False


class Heartbeats:
    """The latest heartbeats of some ranks, and the times of their last changes, by the reader's clock."""

    def __init__(self, ranks: Iterable[int], timeout: float) -> None:
        self.timeout = timeout
        self.latest = dict.fromkeys(ranks, Heartbeat())
        self._beat_at = dict.fromkeys(self.latest, 0.0)
        self._began_at = dict.fromkeys(self.latest, 0.0)

    def update(self, rank: int, heartbeat: Heartbeat, clock: float) -> None:
        """Adds a heartbeat that was read at ``clock``, in seconds."""
        known = self.latest[rank]
        if heartbeat.beat != known.beat:
            self._beat_at[rank] = clock
        if heartbeat.count != known.count:
            self._began_at[rank] = clock
        self.latest[rank] = heartbeat

    def finished(self) -> bool:
        """True if the run is over for all ranks."""
        return all(heartbeat.finished for heartbeat in self.latest.values())

    def silent(self, clock: float) -> str | None:
        """The reason to end the run, if a heartbeat has not changed for the timeout."""
        found = [
            rank for rank, heartbeat in self.latest.items()
            if not heartbeat.finished and clock - self._beat_at[rank] > self.timeout
        ]  # fmt: skip
        if not found:
            return None
        last = "; ".join(
            f"rank {rank}'s last activity, {clock - self._began_at[rank]:.0f} s ago: {self.latest[rank].text}"
            for rank in found
        )
        age = max(clock - self._beat_at[rank] for rank in found)
        return f"{named(found)} did not respond for {age:.0f} s: stopped, or on a node that is lost; {last}"

    def stuck(self, clock: float) -> str | None:
        """The reason to end the run, if the ranks with the fewest activities have exceeded their limit."""
        running = {rank: heartbeat for rank, heartbeat in self.latest.items() if not heartbeat.finished}
        # Stages have different activities, so those that wait are only blamed if all wait.
        blamable = {rank: heartbeat for rank, heartbeat in running.items() if not heartbeat.waits} or running
        fewest = min((heartbeat.count for heartbeat in blamable.values()), default=0)
        behind = {rank: heartbeat for rank, heartbeat in blamable.items() if heartbeat.count == fewest}
        late = [clock - self._began_at[rank] > r.allowance * self.timeout for rank, r in behind.items()]
        if not late or not all(late):
            return None
        age = min(clock - self._began_at[rank] for rank in behind)
        texts = dict.fromkeys(heartbeat.text for heartbeat in behind.values())
        others: dict[str, list[int]] = {}
        for rank, heartbeat in running.items():
            if rank not in behind:
                others.setdefault(heartbeat.text, []).append(rank)
        waiting = "".join(f"; {named(ranks)}: {text}" for text, ranks in others.items())
        return f"{named(behind)} stalled for {age:.0f} s in: {' / '.join(texts)}{waiting}"
