"""Writes a Hugging Face folder one tensor at a time, so that a process holds one in host memory.

A file of safetensors is the length of its header (u64), the header in JSON with dtype, shape and place of each tensor,
and the tensors' bytes: https://github.com/huggingface/safetensors#format. Here the header is written first, since all
shapes are known.
"""

import contextlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from parallel_ops._internal.files import naming_errors
from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.huggingface.config_json import family_of, options_of
from parallel_ops.models.huggingface.family import TensorMapping, TensorSlice
from parallel_ops.models.huggingface.tensor_files import CONFIG, INDEX, SINGLE

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
FILE_BYTES = 5_000_000_000
_PART = ".part"
Pieces = Sequence[tuple[TensorMapping, Tensor]]


@dataclass(frozen=True)
class Stored:
    """A tensor of the files: its shape and dtype, and the pieces of parameters that it is made of, by their names."""

    pieces: list[tuple[TensorSlice, str]]
    shape: list[int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Folder:
    """The contents of a model's folder.

    Args:
        loaded: the config.json of the folder that the model was trained from; empty if there was none.
        shapes: whole shape of each parameter. dtypes: of their tensors in the files.
        file_bytes: largest size of a file that has several tensors.

    Attributes:
        options: its config.json. tensors: by name. files: the names of the tensors in each, in order.

    Raises:
        ValueError: no family has the configuration.
    """

    def __init__(
        self, config: TransformerConfig, loaded: Mapping[str, Any], shapes: Mapping[str, Sequence[int]],
        dtypes: Mapping[str, torch.dtype], file_bytes: int = FILE_BYTES,
    ) -> None:  # fmt: skip
        self.options = options_of(config, loaded)
        self.options["torch_dtype"] = str(dtypes["norm.weight"]).removeprefix("torch.")
        family = family_of(self.options)
        pieces: dict[str, list[tuple[TensorSlice, str]]] = {}
        for name, shape in shapes.items():
            for piece in family.pieces(name, shape):
                pieces.setdefault(piece.stored.name, []).append((piece, name))
        for copy, name in family.copies_in(config).items():
            pieces[copy] = [(family.pieces(name, shapes[name])[0], name)]
        self.tensors: dict[str, Stored] = {}
        for stored, blocks in pieces.items():
            blocks.sort(key=lambda block: block[0].stored.part)
            first, name = blocks[0]
            self.tensors[stored] = Stored(blocks, first.file_shape(shapes[name]), dtypes[name])
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.files = self._split(file_bytes)

    def _split(self, file_bytes: int) -> dict[str, list[str]]:
        files: list[list[str]] = [[]]
        room = file_bytes
        for name, tensor in self.tensors.items():
            if tensor.nbytes > room and files[-1]:
                files.append([])
                room = file_bytes
            files[-1].append(name)
            room -= tensor.nbytes
        if len(files) == 1:
            return {SINGLE: files[0]}
        return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}

    def pieces(self, part: Callable[[TensorSlice, str], Tensor]) -> Iterator[Pieces]:
        """Pieces of parameters that the tensors of all files are made of, one tensor after the other.

        Args:
            part: returns a piece of a parameter by its name.
        """
        for stored in (self.tensors[name] for names in self.files.values() for name in names):
            yield [(piece.stored, part(piece, name)) for piece, name in stored.pieces]

    def write(
        self, folder: Path, pieces: Iterable[Pieces], *, more: Mapping[str, bytes] | None = None,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:  # fmt: skip
        """Writes the folder.

        Args:
            pieces: of each tensor, as ``Folder.pieces`` yields them; not consumed further than an error.
            more: contents of further files by name. report: called with bytes done, and all.

        Raises:
            FileExistsError, OSError: see ``new_folder``.
        """
        given, done = iter(pieces), 0
        with new_folder(folder) as part:
            for file, names in self.files.items():
                with (part / file).open("wb") as out:
                    _write_header(out, {name: self.tensors[name] for name in names})
                    for name in names:
                        wanted = self.tensors[name]
                        whole = joined(next(given), wanted.dtype)
                        if list(whole.shape) != wanted.shape:
                            raise ValueError(f"{name} must be {wanted.shape}, got {list(whole.shape)}")
                        out.write(whole.contiguous().view(torch.uint8).numpy().data)
                        done += wanted.nbytes
                        report(done, self.nbytes)
            if len(self.files) > 1:
                index = {name: file for file, names in self.files.items() for name in names}
                write_json(part / INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": index})
            write_json(part / CONFIG, self.options)
            for name, content in (more or {}).items():
                (part / name).write_bytes(content)


def joined(pieces: Pieces, dtype: torch.dtype) -> Tensor:
    """The pieces of parameters that are one tensor in the files, in the files' layout and in host memory."""
    whole = []
    for stored, piece in pieces:
        rows = piece.detach()
        if stored.interleaved:
            rows = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if not stored.stacked and rows.dim() > 2:
            rows = rows.flatten(0, -2)
        whole.append((rows.transpose(-2, -1) if stored.transposed and stored.stacked else rows).to("cpu", dtype))
    rows, stored = whole[0] if len(whole) == 1 else torch.cat(whole), pieces[0][0]
    return (rows.t() if stored.transposed and not stored.stacked else rows).contiguous()


def check_free(folder: Path) -> None:
    """FileExistsError: there is something at this place, other than an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(path.name != _PART for path in folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write in, which gets its name at the end of the block; after an error it is removed.

    An empty folder that is there may be a mount point, a link or the working directory, which cannot be replaced: its
    files come into it at the end.

    Raises:
        FileExistsError: see ``check_free``. OSError: it cannot be made or written.
    """
    check_free(folder)
    is_there = folder.exists()
    part = folder / _PART if is_there else folder.absolute().with_name(f".{folder.name}{_PART}")
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
    part.mkdir(parents=True)
    try:
        with naming_errors(folder):
            yield part
        if not is_there:
            os.replace(part, folder)
            return
        for path in sorted(part.iterdir()):
            os.replace(path, folder / path.name)
        part.rmdir()
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_header(out: BinaryIO, tensors: Mapping[str, Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    out.write(struct.pack("<Q", len(content)) + content)
