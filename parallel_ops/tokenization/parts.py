"""A folder of finished parts beside the output, and the output made of them.

    OUTPUT.parts/plan.json     what is tokenized: parts, options, the tokenizer's checksum
    OUTPUT.parts/000012.npz    the tokens of one part, renamed to this name when they are complete

A call that finds the folder keeps its finished parts, if its plan is the same. Parts do not depend on the number of
processes, so neither do the bytes of the output.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel_ops.tokenization import indexed
from parallel_ops.tokenization.documents import Part
from parallel_ops.tokenization.options import Options

_PLAN = "plan.json"


@dataclass(frozen=True)
class Tokens:
    """The tokens of a part.

    Attributes:
        tokens: ``[tokens]``. lengths: Tokens of each document; the last may go on in the next part (``goes_on``).
        loss: 1 where a token counts in the loss, uint8 ``[tokens]``; empty without messages, where all do.
        empty: Documents that are left out.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int64]
    loss: NDArray[np.uint8]
    empty: int
    goes_on: bool


class Store:
    """The parts of one output; a context manager, which removes the folder at its end if it has no part.

    Raises:
        ValueError: The folder has parts of another plan. FileExistsError: The output is there.
    """

    def __init__(self, output: Path, parts: Sequence[tuple[Part, ...]], options: Options, checksum: str) -> None:
        self.output, self.count = output, len(parts)
        self.folder = output.with_name(output.stem + ".parts")
        own = {name: None if value is None else str(value) for name, value in vars(options).items()}
        del own["tokenizer"]  # its path
        times = {share.path: Path(share.path).stat().st_mtime_ns for part in parts for share in part}
        shares = [[dataclasses.astuple(share) for share in part] for part in parts]
        plan: dict[str, Any] = {
            "options": own, "tokenizer": checksum, "files": _digest([*times.items()]), "parts": _digest(shares),
        }  # fmt: skip
        if self._is_empty():
            for path in (output, output.with_suffix(".idx"), output.with_suffix(".mask")):
                if path.exists():
                    raise FileExistsError(f"{path} exists; remove it, or name another output")
            self.folder.mkdir(parents=True, exist_ok=True)
            with _renamed(self.folder / _PLAN) as file:
                file.write(json.dumps(plan).encode())
            return
        try:
            found = json.loads((self.folder / _PLAN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        if differing := [name for name in plan if found.get(name) != plan[name]]:
            raise ValueError(
                f"{self.folder} has parts of other {' and '.join(differing)}: remove it, or name another output"
            )

    def _is_empty(self) -> bool:
        """True if the folder has no part, and nothing that is none: only files of a call that was killed early."""
        there = list(self.folder.iterdir()) if self.folder.exists() else []
        return all(path.name == _PLAN or path.match(".*.part") for path in there)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder.exists() and self._is_empty():
            shutil.rmtree(self.folder)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06}.npz"

    def finished(self) -> set[int]:
        """The parts that are there; those that are cut off are removed."""
        found = set()
        for number in range(self.count):
            path = self.path(number)
            if path.exists():
                try:
                    zipfile.ZipFile(path).close()
                except (OSError, zipfile.BadZipFile):
                    path.unlink()
                else:
                    found.add(number)
        return found

    def join(self, dtype: np.dtype[Any], *, masked: bool) -> tuple[int, int, int, int]:
        """Writes the output, with a mask of the loss if ``masked``, and removes the parts.

        Returns:
            Documents, tokens, tokens that count in the loss, and empty documents.

        Raises:
            ValueError: There are no tokens, or a document has too many. OSError: From the file system.
        """
        lengths: list[NDArray[np.int64]] = []
        empty = loss = tokens = begun = 0
        with contextlib.ExitStack() as files:
            # Renamed last: the token file is there when all is.
            out = files.enter_context(_renamed(self.output))
            out_mask = files.enter_context(_renamed(self.output.with_suffix(".mask"))) if masked else None
            for number in range(self.count):
                part = self._read(number)
                own = part.lengths
                if len(own):
                    own[0] += begun
                    begun = int(own[-1]) if part.goes_on else 0
                    lengths.append(own[:-1] if part.goes_on else own)
                empty, tokens = empty + part.empty, tokens + len(part.tokens)
                part.tokens.tofile(out)
                loss += int(part.loss.sum()) if masked else len(part.tokens)
                if out_mask is not None:
                    part.loss.tofile(out_mask)
            if not tokens:
                raise ValueError(f"the input of {self.output} has no text in it")
            every = np.concatenate(lengths)
            with _renamed(self.output.with_suffix(".idx")) as file:
                indexed.write(file, every[every > 0], dtype, masked=masked)
        for number in range(self.count):
            self.path(number).unlink()
        return len(every), tokens, loss, empty

    def _read(self, number: int) -> Tokens:
        path = self.path(number)
        try:
            with np.load(path, allow_pickle=False) as found:
                values = {name: found[name] for name in found}
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            path.unlink()
            raise ValueError(f"{path} was damaged; the same command tokenizes it again: {error}") from None
        return Tokens(
            values["tokens"], values["lengths"], values["loss"], int(values["empty"]), bool(values["goes_on"])
        )


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def write(path: Path, tokens: Tokens) -> None:
    """Writes a part."""
    with _renamed(path) as file:
        values: dict[str, Any] = vars(tokens)
        np.savez(file, **values)


@contextlib.contextmanager
def _renamed(path: Path) -> Iterator[Any]:
    """A file that gets its name when it is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
