"""The owner of a folder of checkpoints: the one run that writes and deletes in it.

It holds the system's lock of the file ``.owner``, which names its host, process and time. The lock ends with the
process, however that ends; on NFS the file server has it, and frees that of a host that is lost. On a file system
whose hosts do not see each other's locks a second run takes the folder: the first finds the name of the second in the
file at its next save, which then fails.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import uuid
import weakref
from pathlib import Path
from typing import Any, TextIO

from parallel_ops.train.checkpoint.description import CheckpointError
from parallel_ops.train.report.outputs import warn

FILE = ".owner"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Owner:
    """Owns a folder until ``close``, the end of the process or of this object.

    Raises:
        CheckpointError: Another run owns the folder; names its host and process. OSError: From the file system.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._token = folder / FILE, uuid.uuid4().hex
        self._take()

    def _take(self) -> None:
        file = _locked(self._path, self._token)
        self.close = weakref.finalize(self, _release, self._path, self._token, file, os.getpid())

    def check(self) -> None:
        """Raises CheckpointError if another run has taken over the folder."""
        found = _read(self._path)
        if found is None:  # somebody has deleted it
            self.close()
            self._take()
        elif found.get("token") != self._token:
            raise CheckpointError(f"{self._path.parent} was taken over by another run, {_named(found)}")


def _locked(path: Path, token: str) -> TextIO:
    """The file, locked, with the name of this run in it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise CheckpointError(
                f"checkpoint.dir {path.parent} is in use by another run, {_named(_read(path) or {})}: wait for its "
                f"end, or name another folder; delete {path.name} there only if that host is lost"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warn(f"{path.parent} is on a file system without locks: nothing keeps other runs from it")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # its owner has deleted it meanwhile
    file.truncate(0)
    json.dump(
        {
            "host": socket.gethostname(), "process": os.getpid(), "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "token": token,
        },
        file,
    )  # fmt: skip
    file.flush()
    return file


def _read(path: Path) -> dict[str, Any] | None:
    """The content of the file, empty if it is damaged or not yet written; ``None`` if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner.get('process', '?')} on {owner.get('host', '?')} since {owner.get('time', '?')}"


def _release(path: Path, token: str, file: TextIO, process: int) -> None:
    if os.getpid() == process and (_read(path) or {}).get("token") == token:  # else a fork, or taken over
        with contextlib.suppress(OSError):
            path.unlink()
    file.close()
