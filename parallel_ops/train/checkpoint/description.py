"""``run.json``: the description of a checkpoint, with size and checksum of its other files."""

import contextlib
import json
import math
import os
import re
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_ops.train.settings import renamed

DESCRIPTION, METADATA = "run.json", ".metadata"
_STEP = re.compile(r"step-(\d{8,})")
_PIECE = 1 << 24
# Fields of ``TransformerConfig`` that checkpoints of before do not have.
_LATER_FIELDS = {"prediction_layers": 0, "prediction_weight": 0.3}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. Names the file and the reason; raised on every rank.

    Attributes:
        other: If a checkpoint is damaged, the newest complete one in its folder, or ``None``.
    """

    def __init__(self, message: str, other: Path | None = None) -> None:
        super().__init__(message)
        self.other = other


@dataclass(frozen=True)
class Description:
    """The description of a checkpoint.

    Attributes:
        step: Optimizer steps taken. samples_seen: Samples taken from the data.
        model, data: Plain values that identify model and data; see ``resume``. rest: Other values for resuming.
    """

    step: int
    samples_seen: int
    model: dict[str, Any]
    data: dict[str, Any]
    rest: dict[str, Any]


# Bytes and CRC-32 of each file of a checkpoint, by name.
Sums = dict[str, tuple[int, int]]


def write_description(path: Path, description: Description, sums: Sums) -> None:
    """Writes ``run.json`` of the checkpoint at ``path``, with a checksum of its own, and syncs it to the disk."""
    content = json.loads(json.dumps({**vars(description), "files": sums}))
    with (path / DESCRIPTION).open("w", encoding="utf-8") as file:
        file.write(json.dumps({**content, "checksum": _own_checksum(content)}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_description(path: Path) -> tuple[Description, Sums]:
    """Reads ``run.json`` of the checkpoint at ``path``.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    file = path / DESCRIPTION
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if (found := content.pop("checksum")) != (wanted := _own_checksum(content)):
            raise ValueError(f"its checksum is {wanted:08x}, not {found:08x}")
        files = content.pop("files")
        description = Description(**content)
        if not _is_count(description.step) or not _is_count(description.samples_seen) or not files:
            raise ValueError("a value is missing")
        if not all(isinstance(part, dict) for part in (description.model, description.data, description.rest)):
            raise ValueError("a section is no table")
        _rename(description)
        sums = {_file_name(name): (_counted(size), _counted(checksum)) for name, (size, checksum) in files.items()}
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not of a checkpoint, or damaged: {error!r}") from error
    return description, sums


def _rename(description: Description) -> None:
    """Gives keys and values that an earlier version wrote their names of today, and fields that it had not defaults."""
    for values, key in ((description.rest, "model"), (vars(description), "model")):
        if isinstance(values.get(key), dict):
            values[key] = renamed.current({"model": values[key]})["model"]
            if "num_layers" in values[key]:
                values[key] = _LATER_FIELDS | values[key]
    if isinstance(settings := description.rest.get("settings"), dict):
        description.rest["settings"] = renamed.current(settings)
    if isinstance(plan := description.rest.get("plan"), str):
        description.rest["plan"] = renamed.current_plan(plan)


def is_checkpoint(folder: Path) -> bool:
    """True if a folder is a checkpoint, complete or damaged, under any name."""
    return any((folder / name).exists() for name in (DESCRIPTION, METADATA)) or any(folder.glob("*.distcp"))


def steps_in(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder, by step; empty if the folder does not exist."""
    if not folder.is_dir():
        return {}
    return {int(m[1]): path for path in folder.iterdir() if (m := _STEP.fullmatch(path.name))}


def best_in(folder: Path, settings: dict[str, Any] | None = None) -> tuple[float, Path] | None:
    """The lowest evaluation loss of the complete checkpoints in a folder, and the checkpoint; ``None`` for none.

    Losses on other data do not compare.

    Args:
        settings: The data are those of these; ``None`` for those of the newest checkpoint that has a loss.
    """
    wanted, found = None if settings is None else _evaluated_on(settings), []
    for _, path in sorted(steps_in(folder).items(), reverse=True):
        with contextlib.suppress(CheckpointError):  # one that is damaged is not the best
            rest = read_description(path)[0].rest
            loss, data = rest.get("evaluation_loss"), _evaluated_on(rest.get("settings") or {})
            if isinstance(loss, float) and math.isfinite(loss):
                wanted = data if wanted is None else wanted
                found += [(loss, path)] if data == wanted else []
    return min(found, default=None)


def _evaluated_on(settings: dict[str, Any]) -> dict[str, Any]:
    """The data of an evaluation, of settings as a checkpoint has them."""
    own = {name: value for name, value in settings.get("evaluation", {}).items() if name != "interval"}
    return own if own.get("paths") else own | {"data": settings.get("data")}


def checksum(file: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    size = found = 0
    with file.open("rb") as content:
        while piece := content.read(_PIECE):
            size, found = size + len(piece), zlib.crc32(piece, found)
    return size, found


def problem_of(file: Path, size: int, wanted: int | None) -> str | None:
    """The problem of a file that should have ``size`` bytes and checksum ``wanted``; ``None`` skips the checksum."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{file} is damaged: it is no regular file"
        if status.st_size != size:
            return f"{file} is damaged: it has {status.st_size} bytes, of {size}"
        if wanted is not None and (found := checksum(file)[1]) != wanted:
            return f"{file} is damaged: its checksum is {found:08x}, not {wanted:08x}"
    except OSError as error:
        return f"{file}: {error.strerror}"
    return None


def _own_checksum(content: dict[str, Any]) -> int:
    """The checksum of the content, independent of the layout."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _file_name(name: str) -> str:
    if name != Path(name).name or name in ("", ".."):
        raise ValueError(f"it names {name!r}, which is no file beside it")
    return name


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _counted(value: Any) -> int:
    if not _is_count(value):
        raise ValueError(f"{value!r} is no size or checksum")
    return int(value)
