"""Memory of ``fake_graphs``: what a replay reads must be where it was, and a pool's memory is used again.

Closures of a capture hold aliases of tensors. So memory is free when nothing but these aliases uses it.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from support.transports.fake_streams import now


class Freed(RuntimeError):
    """A replay would read or write memory that is no longer what it was in the capture."""


class _Piece:
    """Memory of tensors, with the aliases of captures that use it."""

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.alias = _bytes(memory)
        self.key, self.version = memory._cdata, 0
        self.aliases: list[weakref.ref[Tensor]] = []
        self.made_by: Memory | None = None
        self.free_since: int | None = None  # number of the capture

    def used(self) -> bool:
        aliases = sum(alias() is not None for alias in self.aliases)
        return torch._C._storage_Use_Count(self.key) > _LEAST + aliases


class Pool:
    """A private pool: pieces that its captures have made."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.captures = 0

    def find_free(self, number: int) -> None:
        for piece in self.pieces:
            if piece.free_since is None and not piece.used():
                piece.free_since = number


_pieces: dict[int, _Piece] = {}


def _bytes(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(memory)


def _least() -> int:
    """Uses of memory by one alias, and by the object of Python that memory has had once."""
    memory = torch.empty(1).untyped_storage()
    alias, key = _bytes(memory), memory._cdata
    del memory
    found = torch._C._storage_Use_Count(key)
    del alias
    return found


_LEAST = _least()


def forget() -> None:
    """Frees what graphs hold."""
    _pieces.clear()


def resized(memory: torch.UntypedStorage) -> None:
    """Memory is allocated elsewhere, or freed, outside of captures."""
    if (piece := _pieces.get(memory._cdata)) is not None:
        piece.version += 1


def destroy(memory: torch.UntypedStorage) -> None:
    """NaN in floating tensors, -1 in others."""
    if memory.size():
        _bytes(memory).fill_(255)


class Memory:
    """Memory of one graph."""

    def __init__(self) -> None:
        self.pool, self.number = Pool(), 0
        self._read: dict[int, tuple[_Piece, int]] = {}
        self._aliases: dict[Any, Tensor] = {}

    def begin(self, pool: Pool | None) -> None:
        self.pool = pool or self.pool
        self.pool.captures += 1
        self.number = self.pool.captures
        self.pool.find_free(self.number - 1)

    def end(self) -> None:
        self._aliases.clear()
        self.pool.find_free(self.number)

    def made(self, memory: torch.UntypedStorage) -> None:
        """The capture allocates memory."""
        piece = self._piece(memory)
        if piece.key not in self._read and piece.made_by is None:
            piece.made_by = self
            self.pool.pieces.append(piece)

    def _piece(self, memory: torch.UntypedStorage) -> _Piece:
        if memory._cdata not in _pieces:
            _pieces[memory._cdata] = _Piece(memory)
        return _pieces[memory._cdata]

    def aliases(self, tensors: Any) -> Any:
        """The same with tensors of their own, which do not count as users of their memory."""

        def alias(t: Tensor) -> Tensor:
            if t.is_meta:
                return t
            piece = self._piece(t.untyped_storage())
            if piece.made_by is None:
                self._read.setdefault(piece.key, (piece, piece.version))
            key = piece.key, t.dtype, t.shape, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg()
            if key not in self._aliases:
                self._aliases[key] = t.detach()
                piece.aliases.append(weakref.ref(self._aliases[key]))
            return self._aliases[key]

        return tree_map_only(Tensor, alias, tensors)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """A replay: raises for memory of others that is gone, destroys what the pool has used again."""
        now.inside += 1
        try:
            for piece, version in self._read.values():
                if not piece.used() or piece.version != version:
                    raise Freed("a replay reads memory that was freed or moved since the capture")
            others = [piece for piece in self.pool.pieces if piece.made_by is not self]
            for piece in others:
                assert piece.made_by is not None
                free = piece.free_since is not None and piece.free_since < self.number
                if free or piece.made_by.number > self.number:
                    destroy(piece.alias.untyped_storage())
        finally:
            now.inside -= 1
        yield
        for piece in others:
            if piece.free_since == self.number:
                destroy(piece.alias.untyped_storage())
