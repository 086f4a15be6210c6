"""Two computations that take turns on one device: while one waits for a message, the other goes on.

One of the two runs at a time, so what each rank enqueues, and the order of its collectives, are the same on every run
and on every rank whose computations wait at the same places. Whoever waits for a message calls ``pass_on`` before.

    first     compute, send, pass_on .............. wait, compute, send, pass_on ......
    second    ...................... compute, send, pass_on .................... wait, compute
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")

# The pair that runs, if any. One process has one.
_running: "list[_Pair]" = []


class _Stopped(BaseException):
    """Ends a computation whose partner has failed."""


class _Pair:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.turn = 0
        self.ended = [False, False]
        self.failed = False

    def pass_on(self) -> None:
        with self.changed:
            # The caller: nobody else runs, whatever thread autograd has for it.
            own = self.turn
            if self.ended[1 - own]:
                return
            self.turn = 1 - own
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.turn == own)
            if self.failed:
                raise _Stopped

    def end(self, own: int, failed: bool) -> None:
        with self.changed:
            self.ended[own], self.failed = True, self.failed or failed
            self.turn = 1 - own
            self.changed.notify_all()

    def wait_for_first_turn(self, own: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == own)
            if self.failed:
                raise _Stopped


def pass_on() -> None:
    """Lets the partner of the calling computation go on, if it has one, until that calls this or ends."""
    if _running:
        _running[0].pass_on()


def together(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Runs two computations that take turns, ``first`` first, on the calling thread; ``second`` has one of its own.

    Both are on the current CUDA device and stream. Other state of the thread, such as autocast or grad mode, is that of
    ``first`` alone.

    Raises:
        RuntimeError: called by one of the two.
        Exception: of the one that failed; the other ends where it waits.
    """
    if _running:
        raise RuntimeError("together: pairs cannot be nested")
    pair = _Pair()
    _running.append(pair)
    stream = torch.cuda.current_stream() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    results: list[Any] = [None, None]
    errors: list[BaseException] = []

    def run(own: int, compute: Callable[[], Any]) -> None:
        failed = True
        try:
            pair.wait_for_first_turn(own)
            results[own] = compute()
            failed = False
        except _Stopped:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            pair.end(own, failed)

    def beside() -> None:
        if stream is None:
            run(1, second)
        else:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                run(1, second)

    partner = threading.Thread(target=beside, name="paired computation", daemon=True)
    partner.start()
    run(0, first)
    partner.join()
    _running.clear()
    if errors:
        raise errors[0]
    return results[0], results[1]
