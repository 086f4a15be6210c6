"""A folder of finished parts beside the output, and the output made of them.

    OUTPUT.parts/000012.npz    the tokens of one part, renamed to this name when they are complete, and its plan: what
                               is tokenized, by parts, options and the tokenizer's checksum

A call that finds the folder keeps its finished parts, if their plan is its own. Parts do not depend on the number of
processes, so neither do the bytes of the output.
"""

import contextlib
import dataclasses
import glob
import hashlib
import itertools
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel_ops._internal.files import naming_errors
from parallel_ops.tokenization import indexed
from parallel_ops.tokenization.documents import Part
from parallel_ops.tokenization.options import Options

_DAMAGED = (ValueError, KeyError, EOFError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a part.

    Attributes:
        tokens: ``[tokens]``. lengths: Tokens of each document; the first may be the rest of one (``Part.begins``).
        loss: 1 where a token counts in the loss, uint8 ``[tokens]``; empty without messages, where all do.
        empty: Documents that are left out.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int64]
    loss: NDArray[np.uint8]
    empty: int


class Store:
    """The parts of one output."""

    def __init__(self, output: Path, parts: Sequence[tuple[Part, ...]], options: Options, checksum: str) -> None:
        self.output = output
        self._folder = output.with_name(output.stem + ".parts")
        own = {name: None if value is None else str(value) for name, value in vars(options).items()}
        del own["tokenizer"]  # its path
        times = {share.path: Path(share.path).stat().st_mtime_ns for part in parts for share in part}
        shares = [[dataclasses.astuple(share) for share in part] for part in parts]
        self._plan: dict[str, Any] = {
            "options": own, "tokenizer": checksum, "files": _digest([*times.items()]), "parts": _digest(shares),
        }  # fmt: skip

    def finished(self) -> set[int]:
        """The parts that are there; those that are cut off are removed.

        Raises:
            ValueError: There are parts of another plan. FileExistsError: There is none, but the output.
        """
        found = set()
        for path in self._paths():
            try:
                with np.load(path, allow_pickle=False) as part:
                    plan = json.loads(str(part["plan"]))
            except _DAMAGED:
                path.unlink()
                continue
            if differing := [name for name in self._plan if plan.get(name) != self._plan[name]]:
                raise ValueError(
                    f"{self._folder} has parts of other {' and '.join(differing)}: remove it, or name another output"
                )
            found.add(int(path.stem))
        for path in self._outputs():
            if not found and path.exists():
                raise FileExistsError(f"{path} exists; remove it, or name another output")
        return found

    def write(self, number: int, tokens: Tokens) -> None:
        """Writes a part."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with _renamed(self._path(number)) as file:
            np.savez(file, **vars(tokens), plan=np.array(json.dumps(self._plan)))

    def join(
        self, parts: Sequence[tuple[Part, ...]], dtype: np.dtype[Any], *, masked: bool
    ) -> tuple[int, int, int, int]:  # fmt: skip
        """Writes the output, with a mask of the loss if ``masked``, and removes the parts.

        Returns:
            Documents, tokens, tokens that count in the loss, and empty documents.

        Raises:
            ValueError: There are no tokens, or a document has too many. OSError: From the file system.
        """
        lengths = [np.empty(0, np.int64)]
        empty = loss = tokens = 0
        with contextlib.ExitStack() as files:
            # Renamed last: the token file is there when all is.
            out = files.enter_context(_renamed(self.output))
            out_mask = files.enter_context(_renamed(self.output.with_suffix(".mask"))) if masked else None
            for number, shares in enumerate(parts):
                part = self._read(number)
                if shares[0].begins:
                    lengths.append(part.lengths)
                else:
                    lengths[-1][-1] += part.lengths[0]
                    lengths[-1] = np.append(lengths[-1], part.lengths[1:])
                empty, tokens = empty + part.empty, tokens + len(part.tokens)
                out.write(part.tokens.data)
                loss += int(part.loss.sum()) if masked else len(part.tokens)
                if out_mask is not None:
                    out_mask.write(part.loss.data)
            if not tokens:
                self._remove()
                raise ValueError(f"the input of {self.output} has no text in it")
            every = np.concatenate(lengths)
            with _renamed(self.output.with_suffix(".idx")) as file:
                indexed.write(file, every[every > 0], dtype, masked=masked)
        self._remove()
        return len(every), tokens, loss, empty

    def _remove(self) -> None:
        """Removes the parts, and what calls that were killed here may have left of the output."""
        left = [self.output.parent.glob(f".{glob.escape(path.name)}.[0-9]*.part") for path in self._outputs()]
        for path in (*self._paths(), *self._folder.glob(".*.part"), *itertools.chain(*left)):
            path.unlink()
        with contextlib.suppress(OSError):  # files of somebody else are in it
            self._folder.rmdir()

    def _outputs(self) -> list[Path]:
        return [self.output.with_suffix(suffix) for suffix in (".bin", ".idx", ".mask")]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06}.npz"

    def _paths(self) -> list[Path]:
        """The parts that are there; other files are somebody else's."""
        return [path for path in self._folder.glob("*.npz") if path.stem.isdecimal()]

    def _read(self, number: int) -> Tokens:
        path = self._path(number)
        try:
            with np.load(path, allow_pickle=False) as found:
                return Tokens(found["tokens"], found["lengths"], found["loss"], int(found["empty"]))
        except _DAMAGED as error:
            path.unlink()
            raise ValueError(f"{path} was damaged; the same command tokenizes it again: {error}") from None


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@contextlib.contextmanager
def _renamed(path: Path) -> Iterator[Any]:
    """A file that gets its name when it is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming_errors(path), part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
