"""The owner of a folder of checkpoints: the one run that writes and deletes in it.

``.owner`` names its host, process and time. It is created exclusively, which NFS can do too, and touched every
``BEAT_SECONDS``. A later run takes it over if the process is gone; or, where it cannot see that process, if the file
has not been touched for ``STALE_SECONDS`` by the clock of the file server. An owner that was suspended for so long
finds the file of another run in its place at its next save, which then fails.
"""

import contextlib
import hashlib
import json
import os
import socket
import tempfile
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

from parallel_ops.train.checkpoint.description import CheckpointError
from parallel_ops.train.report.outputs import warn

FILE = ".owner"
BEAT_SECONDS = 10.0
# Several beats: a beat waits for the interpreter and for the file server.
STALE_SECONDS = 120.0
# A file server that does not answer does not keep a process from its end.
_JOIN_SECONDS = 5.0


class Owner:
    """Owns a folder until ``close``, the end of the process or of this object.

    Raises:
        CheckpointError: Another run owns the folder; names its host and process. OSError: From the file system.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._token = folder / FILE, uuid.uuid4().hex
        _acquire(self._path, self._token)
        closed = threading.Event()
        arguments = (self._path, self._token, closed)
        self._thread = threading.Thread(target=_beat, args=arguments, name="parallel_ops-owner", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, _release, *arguments, os.getpid(), self._thread)

    def check(self) -> None:
        """Raises CheckpointError if another run has taken over the folder."""
        found = _read(self._path)
        if found is None and _create(self._path, self._token):
            return
        if (found := found or _read(self._path) or {}).get("token") != self._token:
            raise CheckpointError(f"{self._path.parent} was taken over by another run, {_named(found)}")


def _create(path: Path, token: str) -> bool:
    """True if the file was created; False if there is one."""
    content = {
        "host": socket.gethostname(), "process": os.getpid(), "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": _machine(), "started": _started(os.getpid()), "token": token,
    }  # fmt: skip
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk
        path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """The content of the file, empty if it is damaged or not yet written; ``None`` if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _acquire(path: Path, token: str) -> None:
    """Creates the file, or takes that of a run that is gone.

    Several runs may find it stale, and one of them late. So each first acquires a file named by what it found, looks
    again, and moves that file into the place of the stale one, which is never empty meanwhile.

    Raises:
        CheckpointError: The run goes on, or another one is taking its place.
    """
    while not _create(path, token):
        owner, touched = _read(path), _touched(path)
        if owner is None:
            continue
        if _runs(path, owner):
            raise CheckpointError(
                f"checkpoint.dir {path.parent} is in use by another run, {_named(owner)}: wait for its end, or name "
                "another folder"
            )
        found = hashlib.sha256(json.dumps(owner, sort_keys=True).encode()).hexdigest()
        claim = path.with_name(f"{FILE}-{found[:32]}")
        _acquire(claim, token)
        try:
            if (_read(path), _touched(path)) == (owner, touched):
                claim.replace(path)
                return
        except OSError:
            claim.unlink()
            raise
        claim.unlink()


def _runs(path: Path, owner: dict[str, Any]) -> bool:
    """True if the process that owns a folder runs."""
    process = owner.get("process")
    if owner.get("machine") == _machine() and isinstance(process, int):
        return _exists(process) and _started(process) == owner.get("started")
    touched, waited = _touched(path), False
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=FILE) as probe:
        end = time.monotonic() + STALE_SECONDS - (os.stat(probe.name).st_mtime - touched)
    while (found := _touched(path)) == touched and time.monotonic() < end:
        if not waited:
            warn(
                f"{path.parent} is in use by {_named(owner)}; waiting for at most {end - time.monotonic():.0f} s for a "
                "sign that it runs"
            )
        waited = True
        time.sleep(min(1.0, BEAT_SECONDS))
    return found != touched


def _touched(path: Path) -> float:
    """The time of the last change; 0 if the file is gone. Opening it asks NFS's server, not the cache."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner.get('process', '?')} on {owner.get('host', '?')} since {owner.get('time', '?')}"


def _machine() -> str:
    """The kernel and the namespace in which a process id names this process; the host where they are not known."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return _status(process)[:1] != ["Z"]


def _started(process: int) -> str:
    """The start of a process in ticks, which tells it from a later one with its id; empty where it is not known."""
    return "".join(_status(process)[19:20])


def _status(process: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name of the command."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


def _beat(path: Path, token: str, closed: threading.Event) -> None:
    while not closed.wait(BEAT_SECONDS):
        if (_read(path) or {}).get("token", token) != token:
            return
        with contextlib.suppress(OSError):
            os.utime(path)


def _release(path: Path, token: str, closed: threading.Event, process: int, thread: threading.Thread) -> None:
    closed.set()
    if os.getpid() != process:  # a fork
        return
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
    if (_read(path) or {}).get("token") == token:
        with contextlib.suppress(OSError):
            path.unlink()
