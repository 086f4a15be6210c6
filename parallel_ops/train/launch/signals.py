"""Graceful handling of SIGTERM, SIGINT and SIGHUP: the current step ends, and a checkpoint is saved."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

# Seconds in which a repeated signal is ignored: under torchrun Ctrl-C arrives from the terminal and from torchrun.
_ECHO = 2.0
SIGNALS = (signal.SIGTERM.name, signal.SIGINT.name, signal.SIGHUP.name)


def stop_signals() -> list[signal.Signals]:
    """Those that stop a run: of ``SIGNALS`` all but a SIGHUP that ``nohup`` has this process ignore."""
    hup = signal.SIGHUP
    return [s for s in map(signal.Signals.__getitem__, SIGNALS) if s != hup or signal.getsignal(hup) != signal.SIG_IGN]


class GracefulShutdown:
    """A context in which ``stop_signal`` is the name of the first signal received, or ``None``.

    A later signal has its original effect. Outside the main thread, where Python receives no signals, nothing changes.
    """

    def __init__(self) -> None:
        self.stop_signal: str | None = None
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "GracefulShutdown":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal is None:
            self.stop_signal, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since > _ECHO:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
