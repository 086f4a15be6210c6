"""The files of a Hugging Face folder: names, shapes and values of its tensors, without reading a whole file."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.files import read_json
from parallel_ops._internal.module_names import some_of
from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.huggingface.config_json import family_of, scale_block
from parallel_ops.models.huggingface.family import TensorMapping, TensorSlice

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FLOATING, _FP8 = ("F64", "F32", "F16", "BF16"), "F8_E4M3"
# End of the names of scales: of each block of a tensor in 8 bits, which the values are multiplied with.
SCALE = "_scale_inv"
_SHARED = {"tokens.weight": "embedding", "head.weight": "output layer"}
Slices = tuple[slice, ...]
ShapesOf = Callable[[TransformerConfig], Mapping[str, tuple[int, ...]]]


def safetensors() -> ModuleType:
    """The module ``safetensors.torch`` belongs to, or an ImportError with the command that installs it."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("Hugging Face folders need safetensors; run: pip install safetensors") from None
    return safetensors


class Files:
    """The tensors of a folder, opened but not read.

    Raises:
        FileNotFoundError, ValueError: files that are missing, truncated, or differ from their index.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], stack: contextlib.ExitStack) -> None:
        self._folder, self._family = folder, family_of(options)
        self._block, self._further = scale_block(options), int(options.get("num_nextn_predict_layers") or 0)
        self._tensors: dict[str, Any] = {}  # safetensors' slices
        index = None if (folder / SINGLE).exists() else _read_index(folder)
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            try:
                opened = stack.enter_context(safetensors().safe_open(folder / file, framework="pt"))
            except safetensors().SafetensorError as error:
                raise ValueError(f"{folder / file} is not a whole safetensors file: {error}") from error
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if index is not None and index.get(name) != file:
                    raise ValueError(f"{folder / file} has {name}, which {INDEX} does not place there")
                self._tensors[name] = opened.get_slice(name)
        if index is not None and (absent := index.keys() - self._tensors.keys()):
            raise ValueError(f"{folder} lacks {some_of(sorted(absent), 3)}, which {INDEX} lists")
        self._bare = not any(name.startswith(self._family.prefix) for name in self._tensors)

    def check(self, config: TransformerConfig, shapes_of: ShapesOf) -> None:
        """Raises ValueError if the tensors are not those of a model of this configuration."""
        if config.num_layers > len(self._tensors):  # before a number in a file makes a model without end
            raise ValueError(
                f"{self._folder / CONFIG} has {config.num_layers} layers, but the folder has only "
                f"{len(self._tensors)} tensors"
            )
        shapes = shapes_of(config)
        wanted: dict[str, list[int]] = {}
        for parameter, whole in shapes.items():
            for piece in self._pieces(parameter, whole):
                wanted[piece.stored.name] = piece.file_shape(whole)
        if absent := wanted.keys() - self._tensors.keys():
            raise ValueError(f"{self._folder} lacks {some_of(sorted(absent), 3)}")
        copies = self.copies(config)
        for name in self._tensors.keys() - wanted.keys():
            if name in copies:
                wanted[name] = list(shapes[copies[name]])
            elif (shape_of_more := self._shape_of_more(name, wanted, config)) is not None:
                wanted[name] = shape_of_more
        for name, shape in wanted.items():
            got, dtype = self._tensors[name].get_shape(), self._tensors[name].get_dtype()
            if got != shape:
                raise ValueError(f"{self._folder}: {name} must be {shape}, got {got}")
            if dtype == _FP8 and name + SCALE in self._tensors:
                continue
            if dtype not in _FLOATING:
                raise ValueError(f"{self._folder}: {name} must be one of {', '.join(_FLOATING)}, got {dtype}")

    def _shape_of_more(self, name: str, wanted: Mapping[str, list[int]], config: TransformerConfig) -> list[int] | None:
        """The shape of a tensor that is no parameter; ``None`` for one that can be computed. Raises for any other."""
        of = wanted.get(name.removesuffix(SCALE), [])
        if name.endswith(SCALE) and self._block is not None and len(of) == 2:
            return [-(-size // n) for size, n in zip(of, self._block, strict=True)]
        if (layer := re.search(r"layers\.(\d+)\.", name)) and int(layer[1]) >= config.all_layers:
            if int(layer[1]) < config.num_layers + self._further:  # not wanted
                return list(self._tensors[name].get_shape())
            raise ValueError(
                f"{self._folder} has {name}, but the model has {config.num_layers} layers, and "
                f"{config.prediction_layers} that predict further tokens (MTP)"
            )
        if not re.fullmatch(self._family.constants, name.removeprefix(self._family.prefix)):
            raise ValueError(f"{self._folder} has {name}, which the model does not have")
        return None

    def copies(self, config: TransformerConfig) -> dict[str, str]:
        """The parameters that files may have a second time, by the names of their copies."""
        prefix = self._family.prefix if self._bare else ""
        copies = {name.removeprefix(prefix): own for name, own in self._family.copies_in(config).items()}
        return copies | ({self._head(): "tokens.weight"} if config.tied_embeddings else {})

    def check_copy(self, copy: str, parameter: str, shape: torch.Size, slices: Slices) -> None:
        """Raises ValueError if the files have a copy of a parameter that differs from it."""
        found = self._tensors.get(copy)
        if found is not None and not torch.equal(found[slices], self.read(parameter, shape, slices)):
            what = "an output layer" if copy == self._head() else copy
            raise ValueError(
                f"{self._folder} has {what} that differs from the {_SHARED[parameter]} it should be tied to"
            )

    def read(self, parameter: str, shape: torch.Size, slices: Slices) -> Tensor:
        """This rank's slices of a parameter, whose whole shape is ``shape``."""
        out: Tensor | None = None
        for piece in self._pieces(parameter, shape):
            both = zip(slices, piece.place, strict=True)
            common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in both)
            if any(part.start >= part.stop for part in common):
                continue
            found = self._read_piece(piece, common, shape)
            if common == tuple(slices):
                return found.view([part.stop - part.start for part in slices])
            if out is None:
                out = found.new_empty([part.stop - part.start for part in slices])
            target = tuple(slice(c.start - s.start, c.stop - s.start) for c, s in zip(common, slices, strict=True))
            out[target] = found
        assert out is not None
        return out

    def _read_piece(self, piece: TensorSlice, common: Slices, shape: Sequence[int]) -> Tensor:
        """The slices ``common`` of a parameter of the whole ``shape``, which are all in one piece."""
        stored, place = piece
        if stored.stacked:
            return self._read_stack(stored, common, shape)
        # In the file's tensor, a matrix or a vector.
        inside = [slice(c.start - p.start, c.stop - p.start) for c, p in zip(common, place, strict=True)][-2:]
        first = stored.part * shape[0]
        index = (slice(first + inside[0].start, first + inside[0].stop), *inside[1:])
        found = self._values(stored.name, index[::-1] if stored.transposed else index)
        return found.t() if stored.transposed else found

    def _read_stack(self, stored: TensorMapping, common: Slices, shape: Sequence[int]) -> Tensor:
        """The same of a parameter of experts that are one tensor in the files."""
        experts, rows, *columns = common
        order = torch.arange(rows.start, rows.stop, device="cpu")
        if stored.interleaved:
            half = shape[1] // 2
            order = order % half * 2 + order // half
            rows = slice(int(order.min()), int(order.max()) + 1)
        matrix = (rows, *columns)
        index = (experts, *(matrix[::-1] if stored.transposed else matrix))
        found: Tensor = self._tensors[stored.name][index]
        found = found.transpose(1, 2) if stored.transposed else found
        return found[:, order - rows.start] if stored.interleaved else found

    def _values(self, name: str, index: Slices) -> Tensor:
        """A part of a tensor, multiplied with its scales if it is stored in 8 bits."""
        found: Tensor = self._tensors[name][index]
        if (scales := self._tensors.get(name + SCALE)) is None or self._block is None:
            return found
        blocks = tuple(slice(i.start // n, -(-i.stop // n)) for i, n in zip(index, self._block, strict=True))
        factors: Tensor = scales[blocks].to(torch.float32)
        for dim, (part, n) in enumerate(zip(index, self._block, strict=True)):
            factors = factors.repeat_interleave(n, dim).narrow(dim, part.start % n, part.stop - part.start)
        return found.to(torch.float32) * factors

    def _pieces(self, parameter: str, shape: Sequence[int]) -> list[TensorSlice]:
        found = self._family.pieces(parameter, shape)
        if not self._bare:
            return found
        prefix = self._family.prefix
        return [TensorSlice(replace(stored, name=stored.name.removeprefix(prefix)), place) for stored, place in found]

    def _head(self) -> str:
        return self._pieces("head.weight", [1])[0].stored.name


def _read_index(folder: Path) -> dict[str, str]:
    """The file that holds each tensor, by the tensor's name."""
    if not (folder / INDEX).exists():
        pickles = [file.name for suffix in _PICKLES for file in folder.glob(f"*{suffix}")]
        hint = (
            f"; {some_of(sorted(pickles), 3)} can run code when it is opened: convert it to safetensors first"
            if pickles
            else ""
        )
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    files = read_options(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{folder / INDEX} has no weight_map")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix != ".safetensors":
            raise ValueError(f"{folder / INDEX} names {file!r}, which is not a safetensors file beside it")
        if not (folder / file).exists():
            raise FileNotFoundError(f"{folder} lacks {file}, which {INDEX} lists")
    return files


def read_options(path: Path) -> dict[str, Any]:
    if not path.exists():
        folder = str(path.parent)
        if not path.parent.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", folder):
            raise FileNotFoundError(
                f"{folder} is no folder; if it is a model of the Hugging Face Hub, download it first, and give the "
                f"folder that huggingface_hub.snapshot_download({folder!r}) returns (pip install huggingface_hub)"
            )
        raise FileNotFoundError(f"{folder} has no {path.name}" if path.parent.exists() else f"{folder} does not exist")
    return read_json(path)
