"""Streams and events of ``fake_graphs``: which work of a capture stands behind which."""

import contextlib
from collections.abc import Iterator
from typing import Any


class NotCapturable(RuntimeError):
    """CUDA would end the capture."""


class Event:
    """An event; recorded in a capture, it has the clock of its stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._clock: dict[Any, int] | None = None
        self._capture: Any = None

    def record(self, stream: "Stream | None" = None) -> "Event":
        stream = stream or now.stream
        self._clock, self._capture = dict(stream.clock()), now.capture if stream.captured() else None
        return self

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or now.stream).wait_event(self)

    def query(self) -> bool:
        refuse("an event is queried")
        return True

    def synchronize(self) -> None:
        refuse("the host waits for an event")


class Stream:
    """A stream; in a capture it has a clock of all work that it is behind."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._clock: dict[Any, int] = {}
        self._capture: Any = None

    def captured(self) -> bool:
        return now.capture is not None and self._capture is now.capture

    def clock(self) -> dict[Any, int]:
        return self._clock if self.captured() else {}

    def join(self, clock: dict[Any, int]) -> None:
        if not self.captured():
            self._clock, self._capture = {}, now.capture
        for stream, time in clock.items():
            self._clock[stream] = max(time, self._clock.get(stream, 0))

    def launch(self) -> None:
        if not self.captured():
            raise NotCapturable("work on a stream that has not joined the capture")
        self._clock[self] = self._clock.get(self, 0) + 1

    def wait_event(self, event: Event) -> None:
        if event._clock is None or now.capture is None:
            return
        if event._capture is not now.capture:
            if self.captured():
                raise NotCapturable("a captured stream waits for an event from outside the capture")
            return
        self.join(event._clock)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(Event().record(other))

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)

    def synchronize(self) -> None:
        refuse("the host waits for a stream")

    query = synchronize


class Now:
    """The current stream and capture of this process."""

    stream = Stream()
    capture: Any = None  # the graph that is being captured
    inside = 0  # a recorded op or collective runs


now = Now()


def refuse(what: str) -> None:
    if now.capture is not None:
        raise NotCapturable(what)


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    before = now.stream
    now.stream = before if stream is None else stream
    try:
        yield
    finally:
        now.stream = before
