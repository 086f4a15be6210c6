"""Reads files of torch.distributed.checkpoint without running code in them.

torch.distributed.checkpoint unpickles ``.metadata``, and the values in ``*.distcp`` that are no tensors, without
restrictions: a pickle can call any function by name. Here the pickle of ``.metadata`` becomes plain records, which call
nothing, and the metadata is built from them after the types of all values and the sizes of all files are checked. Data
are read with torch's ``weights_only=True``, tensors and plain values alike.
"""

import io
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from parallel_ops.train.checkpoint.description import METADATA
from parallel_ops.train.checkpoint.planners import LoadPlanner

# Errors of a damaged or manipulated pickle.
_ERRORS = (
    pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError, LookupError, MemoryError,
    RecursionError, TypeError, ValueError,
)  # fmt: skip


class _Record:
    """Arguments and state of a pickled object."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "_Record":
        found = super().__new__(cls)
        found.args, found.state = args, {}
        return found

    def __setstate__(self, state: Any) -> None:
        self.state = state


# All classes in the metadata of a checkpoint, beside dtypes and Python's own containers.
_RECORDS: dict[str, Any] = {
    name: type(name, (_Record,), {})
    for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING", "_get_layout", "Size", "PosixPath",
        "WindowsPath",
    )
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS and module.partition(".")[0] in ("torch", "pathlib"):
            return _RECORDS[name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


def read_metadata(path: Path, files: Mapping[str, int]) -> Metadata:
    """The ``.metadata`` of the checkpoint at ``path``.

    Args:
        files: Bytes of each file of the checkpoint.

    Raises:
        ValueError: The file is damaged or manipulated. OSError: It cannot be read.
    """
    file = path / METADATA
    content = file.read_bytes()
    try:
        return _metadata(_Unpickler(io.BytesIO(content)).load(), files)
    except _ERRORS as error:
        raise ValueError(f"{file} is damaged: {error or type(error).__name__}") from None


def sizes_of(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """The whole shape of each tensor of a checkpoint, by its name there."""
    found = metadata.state_dict_metadata.items()
    return {name: tuple(own.size) for name, own in found if isinstance(own, TensorStorageMetadata)}


def empty(metadata: Metadata, name: str) -> Tensor:
    """Memory for a whole tensor of a checkpoint, which has it."""
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


class SafeReader(FileSystemReader):
    """Reads a checkpoint with the given metadata; see ``read_metadata``."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """Takes no ``kwargs``: torch would otherwise fall back to one metadata file a rank."""
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError:  # torch's message suggests weights_only=False
            names = sorted({self.storage_data[item.storage_index].relative_path for item in plan.items})
            raise ValueError(
                f"damaged: {' or '.join(names)} has something else in it than tensors and plain values"
            ) from None


class SafeLoadPlanner(LoadPlanner):
    """The planner, restricted to plain values instead of any pickle."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, map_location="cpu", weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _metadata(found: Any, files: Mapping[str, int]) -> Metadata:
    fields = _fields(found, "Metadata")
    return Metadata(
        state_dict_metadata={_text(name): _stored(value) for name, value in _dict(fields["state_dict_metadata"])},
        storage_data={_index(key): _place(value, files) for key, value in _dict(fields["storage_data"])},
    )


def _stored(found: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(found).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(found, "TensorStorageMetadata")
    properties = fields["properties"]
    _check(properties, "TensorProperties")
    dtype = properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype is {dtype!r}")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(found: Any) -> MetadataIndex:
    fields = _fields(found, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]), None if offset is None else _size(offset), None if index is None else _count(index)
    )


def _place(found: Any, files: Mapping[str, int]) -> _StorageInfo:
    """The place of an entry, which must be inside a file of the checkpoint."""
    fields = _fields(found, "_StorageInfo")
    name, offset, length = _text(fields["relative_path"]), _count(fields["offset"]), _count(fields["length"])
    if name not in files:
        raise ValueError(f"it places data in {name!r}, which is no file of the checkpoint")
    if offset + length > files[name]:
        raise ValueError(f"it places data at {offset} to {offset + length} of {name}, which has {files[name]} bytes")
    if fields.get("transform_descriptors"):
        raise ValueError(f"it has transforms of data, {fields['transform_descriptors']!r}, which are not supported")
    return _StorageInfo(name, offset, length)


def _check(found: Any, kind: str) -> None:
    if not isinstance(found, _Record) or type(found).__name__ != kind:
        raise ValueError(f"it has {type(found).__name__} in the place of {kind}")


def _fields(found: Any, kind: str) -> dict[str, Any]:
    _check(found, kind)
    return dict(_dict(found.state))


def _dict(found: Any) -> Iterable[tuple[Any, Any]]:
    if type(found) is not dict:
        raise ValueError(f"it has {type(found).__name__} in the place of a dict")
    return found.items()


def _text(found: Any) -> str:
    if type(found) is not str:
        raise ValueError(f"it has {type(found).__name__} in the place of a name")
    return found


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**63:
        raise ValueError(f"it has {found!r} in the place of a count")
    return found


def _size(found: Any) -> torch.Size:
    _check(found, "Size")
    (sizes,) = found.args
    return torch.Size([_count(size) for size in sizes])
