"""Writes a Hugging Face folder one tensor at a time, from parameters that are read one at a time.

A file of safetensors is the length of its header (u64), the header in JSON with dtype, shape and place of each tensor,
and the tensors' bytes: https://github.com/huggingface/safetensors#format. Here the header is written first, since all
shapes are known.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.huggingface.config_json import family_of, options_of
from parallel_ops.models.huggingface.families import TensorSlice
from parallel_ops.models.huggingface.loading import CONFIG, INDEX
from parallel_ops.models.huggingface.saving import joined, split_files

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Parameters that are kept for the next tensor: the parts of a fused one follow each other.
_KEPT = 4


def write_folder(
    folder: Path, config: TransformerConfig, loaded: Mapping[str, Any], shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], Tensor], *, dtype: torch.dtype, more: Mapping[str, bytes] | None = None,
    file_bytes: int = 5_000_000_000,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> int:  # fmt: skip
    """Writes the folder of a model; it gets its name when all is written.

    Args:
        folder: Must not exist, or be empty.
        loaded: The config.json of the folder that the model was trained from; empty if there was none.
        shapes: Whole shape of each parameter. read: Returns one, on the CPU.
        dtype: Of the tensors. more: Contents of further files by name. report: Called with bytes done, and all.

    Returns:
        The bytes of all tensors.

    Raises:
        ValueError: No family has the configuration. FileExistsError: The folder has files. OSError: It cannot be
        written.
    """
    options = options_of(config, loaded)
    options["torch_dtype"] = str(dtype).removeprefix("torch.")
    family = family_of(options)
    tensors: dict[str, list[tuple[TensorSlice, str]]] = {}  # by name in the files; blocks in order
    for name, shape in shapes.items():
        for piece in family.pieces(name, shape):
            tensors.setdefault(piece.stored.name, []).append((piece, name))
    for copy, name in family.copies_in(config).items():
        tensors[copy] = [(family.pieces(name, shapes[name])[0], name)]
    for blocks in tensors.values():
        blocks.sort(key=lambda block: block[0].stored.part)
    places = {name: blocks[0][0].file_shape(shapes[blocks[0][1]]) for name, blocks in tensors.items()}
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in places.items()}
    total, done = sum(sizes.values()), 0
    files = split_files(sizes, file_bytes)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder")
    part = folder.absolute().with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
    part.mkdir(parents=True)
    kept: dict[str, Tensor] = {}

    def parameter(name: str) -> Tensor:
        if name not in kept:
            while len(kept) >= _KEPT:
                del kept[next(iter(kept))]
            kept[name] = read(name)
        return kept[name]

    try:
        for file, names in files.items():
            with (part / file).open("wb") as out:
                _write_header(out, {name: places[name] for name in names}, dtype)
                for name in names:
                    whole = joined([(piece, parameter(own)) for piece, own in tensors[name]], dtype, keep=True)
                    if list(whole.shape) != places[name]:
                        raise ValueError(f"{name} must be {places[name]}, got {list(whole.shape)}")
                    whole.view(torch.uint8).numpy().tofile(out)
                    done += sizes[name]
                    report(done, total)
        if len(files) > 1:
            index = {name: file for file, names in files.items() for name in names}
            _write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        _write_json(part / CONFIG, options)
        for name, content in (more or {}).items():
            (part / name).write_bytes(content)
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return total


def _write_header(out: BinaryIO, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    out.write(struct.pack("<Q", len(content)) + content)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
