"""Samples of folders to which files are added while a run goes on.

    part 0      the files that are there when the run begins
    part k      at the end of part k - 1: the files that have come since; if there are none, or too few tokens for a
                sequence, all files once more
    a part      its documents once, packed and shuffled as an epoch of ``Samples``, by the run's seed and k

Which files a part has depends on when they came, so rank 0 lists the folders and the other ranks take its list. The
parts are in each checkpoint: a resumed run takes the same samples up to the end of its last part, on any ranks.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel_ops._internal.files import matches
from parallel_ops.train.data.any_samples import Agree, Composite
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.data.tokens import TokenStream, files_of

# Between the seeds of two parts; odd and large, as that between sources.
_SEEDS = 0x2545F4914F6CDD1D

# A file: the number of its path in ``data.paths``, its name in that folder ("" for the path itself), its tokens, and
# their digest, with "/" and that of its mask behind it if it has one.
File = tuple[int, str, int, str]
# Opens files, as ``TokenStream`` with the options of a run.
Open = Callable[[Sequence[Path]], TokenStream]


class Growing(Composite):
    """Samples up to the end of the last part; ``reach`` adds parts.

    Args:
        paths: The paths of ``data.paths``; files of folders that begin with a dot are not read.
        dtype: NumPy dtype of raw tokens. opened: Opens files.
        seed: Seed of the run. options: Further options of ``Samples``.

    Attributes:
        parts: The files of each part; none for one that has all files once more.

    Raises:
        ValueError, FileNotFoundError: No path is a folder, or one does not exist.
    """

    ignores = True  # files with a mask may come
    extended = ("growing",)

    def __init__(self, paths: Sequence[Path], dtype: str, opened: Open, *, seed: int, **options: Any) -> None:
        paths = [own for path in paths for own in matches(path)]
        if not any(path.is_dir() for path in paths):
            raise ValueError(f"data.growing: needs a folder in data.paths, got {', '.join(map(str, paths))}")
        self._paths, self._dtype, self._open = list(paths), dtype, opened
        self.seed, self._options, self.seq_length = seed, options, int(options["seq_length"])
        self.document_mask, self.shuffle = bool(options["document_mask"]), bool(options["shuffle"])
        self.parts: list[list[File]] = []
        self._samples: list[Samples] = []
        self._firsts = [0]
        self._skipped: list[tuple[Path, str]] = []
        self._opened: dict[tuple[int, str], TokenStream] = {}

    def __len__(self) -> int:
        """Samples of all parts."""
        return self._firsts[-1]

    @property
    def stream(self) -> TokenStream:  # type: ignore[override]
        """The documents of all files that are known."""
        found = self._joined(file for part in self.parts for file in part)
        found.skipped = self._skipped
        return found

    @property
    def masked(self) -> bool:  # type: ignore[override]
        return any(part.masked for part in self._samples)

    @property
    def in_epoch(self) -> int:  # type: ignore[override]
        return sum(part.in_epoch for part, files in zip(self._samples, self.parts, strict=True) if files)

    def reach(self, samples: int, agree: Agree[list[File]]) -> None:
        """Adds parts.

        Raises:
            ValueError: A file cannot be read or has other tokens on this rank, or there are too few tokens for one
                sequence. OSError: From the file system.
        """
        while len(self) < samples:
            self._add(agree(self._found))

    def described(self) -> dict[str, Any]:
        return {"growing": self.parts}

    def problem(self, saved: Mapping[str, Any]) -> str | None:
        """A file is missing or has changed. Files may have come since."""
        try:
            for file in (file for part in saved.get("growing", ()) for file in part):
                self._check(*file)
        except (ValueError, OSError, IndexError, TypeError) as error:
            return str(error)
        return None

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.parts, self._samples, self._firsts = [], [], [0]
        for part in saved["growing"]:
            self._add([(number, name, tokens, *digest) for number, name, tokens, *digest in part])

    def details(self, taken: int) -> list[str]:
        parts = f"{len(self.parts):,} part{'' if len(self.parts) == 1 else 's'}"
        return [f"files that come are read after sample {len(self):,}; {parts} so far"]

    def _found(self) -> list[File]:
        """The files that are new, if they make a sequence."""
        known = {(number, name) for part in self.parts for number, name, *_ in part}
        listed = [files_of(path, self._dtype) for path in self._paths]
        self._skipped = [left for found in listed for left in found.unread]
        there = [
            (number, "" if file == path else file.name)
            for number, (path, found) in enumerate(zip(self._paths, listed, strict=True))
            for file in found.files
        ]
        streams = {place: self._stream(*place) for place in there if place not in known}
        new = [(*place, len(stream), _digest(stream)) for place, stream in streams.items()]
        tokens = sum(len(stream) for stream in streams.values())
        if tokens <= self.seq_length:
            if not self.parts:
                raise ValueError(f"the data has {tokens} tokens, but a sequence needs {self.seq_length + 1}")
            return []
        return new

    def _stream(self, number: int, name: str) -> TokenStream:
        if (number, name) not in self._opened:
            path = self._paths[number]
            self._opened[number, name] = self._open([path / name if name else path])
        return self._opened[number, name]

    def _joined(self, files: Iterable[File]) -> TokenStream:
        return TokenStream.of([file for number, name, *_ in files for file in self._stream(number, name).files])

    def _check(self, number: int, name: str, tokens: int, digest: str | None = None) -> None:
        """``digest`` is ``None`` in checkpoints from before there was one, and without a mask where none was read."""
        if (now := len(self._stream(number, name))) != tokens:
            raise ValueError(
                f"data: {self._paths[number] / name} has {now:,} tokens, and had {tokens:,} when it was listed"
            )
        known = [] if digest is None else digest.split("/")
        if any(a != b for a, b in zip(known, _digest(self._stream(number, name)).split("/"), strict=False)):
            raise ValueError(
                f"data: {self._paths[number] / name} has other tokens, or another mask, than when it was listed"
            )

    def _add(self, files: list[File]) -> None:
        for file in files:
            self._check(*file)
        assert self.seed is not None
        seed = (self.seed + len(self.parts) * _SEEDS) % 2**63
        stream = self._joined(files) if files else self.stream
        self._samples.append(Samples(stream, seed=seed, **self._options))
        self.parts.append(files)
        # Last: the loader's thread reads below it.
        self._firsts.append(self._firsts[-1] + self._samples[-1].in_epoch)

    def place(self, number: int) -> tuple[Samples, int]:
        part = bisect.bisect_right(self._firsts, number) - 1
        return self._samples[part], number - self._firsts[part]


def _digest(stream: TokenStream) -> str:
    return "/".join(part for part in stream.digest if part is not None)
