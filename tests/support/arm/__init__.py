"""The CPU kernels of another machine: ops of this process run in ``server.cpp``, compiled for that machine, under qemu.

Only kernels go there. Checks, autograd, autocast and the references remain here, so the tests of the ops are the tests
of that machine's kernels.
"""

import ctypes
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable
from typing import IO, Any

import pytest
import torch
from torch import Tensor

import parallel_ops._C  # noqa: F401 (registers the schemas)

# The numbers that c10 gives to dtypes, which the program keeps.
_NUMBERS = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}
_DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}


def _sized(data: bytes) -> bytes:
    return struct.pack("<q", len(data)) + data


def _integers(values: Iterable[int]) -> bytes:
    values = list(values)
    return struct.pack(f"<q{len(values)}q", len(values), *values)


class _Call:
    """One call of an op, written down: its arguments, and the memory of their tensors once each."""

    def __init__(self, name: str, schema: torch.FunctionSchema, args: tuple[Any, ...]) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        described = [self._argument(a.type, value) for a, value in zip(schema.arguments, args, strict=True)]
        parts = [struct.pack("<q", len(self.storages))]
        parts += [_sized(_bytes_of(storage)) for storage in self.storages.values()]
        parts += [_sized(name.encode())]
        parts += [struct.pack("<qqq", schema.is_mutable, len(schema.returns), len(described))]
        self.message = b"".join(parts + described)

    def _argument(self, kind: torch.Type, value: Any) -> bytes:
        if isinstance(kind, torch.OptionalType):
            return b"v" + bytes(8) if value is None else b"?" + self._argument(kind.getElementType(), value)
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            self.storages.setdefault(storage._cdata, storage)
            place = list(self.storages).index(storage._cdata)
            layout = _integers(value.shape) + _integers(value.stride()) + struct.pack("<q", value.storage_offset())
            return b"t" + struct.pack("<qqq", place, _NUMBERS[value.dtype], 0 if value.is_cpu else 1) + layout
        if isinstance(value, torch.dtype):
            value = _NUMBERS[value]
        if isinstance(value, list | tuple):
            return b"l" + _integers(int(item) for item in value)
        return b"v" + struct.pack("<d" if isinstance(kind, torch.FloatType) else "<q", value)


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    on_cpu = storage.device.type == "cpu"
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if on_cpu and storage.nbytes() else b""


class Server:
    """The program of ``command``. After ``install`` its CPU kernels take the place of this process's own."""

    key = pytest.StashKey["Server"]()

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(command.split(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        self.ops = self._sized().decode().split()
        self.calls = 0

    @property
    def _out(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _read(self, n: int) -> bytes:
        data = self._out.read(n)
        if len(data) < n:
            raise RuntimeError(f"the program with the kernels is gone, with exit code {self._process.wait()}")
        return data

    def _sized(self) -> bytes:
        return self._read(*struct.unpack("<q", self._read(8)))

    def _row(self) -> list[int]:
        data = self._sized()
        return list(struct.unpack(f"<{len(data) // 8}q", data))

    def _tensor(self) -> Tensor:
        (number,) = struct.unpack("<q", self._read(8))
        sizes, strides = self._row(), self._row()
        (offset,) = struct.unpack("<q", self._read(8))
        data = bytearray(self._sized())
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return torch.empty(0, dtype=_DTYPES[number]).set_(flat.untyped_storage(), offset, sizes, strides)

    def call(self, name: str, schema: torch.FunctionSchema, args: tuple[Any, ...]) -> Any:
        call = _Call(name, schema, args)
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(call.message)
            self._process.stdin.flush()
            self.calls += 1
            if error := self._sized():
                raise RuntimeError(error.decode())
            for storage in call.storages.values() if schema.is_mutable else ():
                data = self._sized()
                ctypes.memmove(storage.data_ptr(), data, len(data))
            results = [self._tensor() for _ in schema.returns]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def install(self) -> torch.library.Library:
        """Kernels are replaced while the library that is returned lives."""
        library = torch.library.Library("parallel_ops", "IMPL")
        for name in self.ops:
            library.impl(name, self._kernel(name), "CPU", allow_override=True)
        return library

    def _kernel(self, name: str) -> Callable[..., Any]:
        schema = getattr(torch.ops.parallel_ops, name).default._schema

        def kernel(*args: Any, **kwargs: Any) -> Any:
            # The dispatcher leaves arguments at their default out.
            rest = [kwargs.get(a.name, a.default_value) for a in schema.arguments[len(args) :]]
            return self.call(name, schema, (*args, *rest))

        return kernel

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()
