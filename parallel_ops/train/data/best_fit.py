"""Best-fit packing: documents in sequences, cut only where they are longer than a sequence.

Longer documents are cut into sequences and a rest. Then, longest first, each piece goes into the sequence with the
least room that it fits in (best-fit decreasing), so few tokens of a sequence stay empty: Ding et al., arXiv:2404.10830.

All pieces of one length are placed together, into all sequences of one room, so the work depends on the number of
different lengths and not on that of documents. The result is that of placing one after the other.
"""

import numpy as np
from numpy.typing import NDArray


class Packing:
    """The pieces of each sequence.

    Args:
        lengths: Tokens of each document, int64 ``[documents]``.
        seq_length: Inputs of a sequence, which has one token more, the last target. Documents of more tokens are cut so
            that the last token of a piece is the first of the next: no target is lost.

    Attributes:
        document, start, size: Of each piece, int64, those of a sequence one behind the other: its document, its first
            token there, its tokens. Documents of one token are left out: nothing follows that token.
        ends: End of each sequence's pieces, int64 ``[sequences]``.

    Raises:
        ValueError: No document has two tokens.
    """

    def __init__(self, lengths: NDArray[np.int64], seq_length: int) -> None:
        # A last piece of one token has no target.
        count = np.maximum(1, -(-(lengths - 1) // seq_length)) * (lengths > 1)
        if not count.sum():
            raise ValueError("the data has no document of two tokens or more")
        document = np.repeat(np.arange(len(lengths)), count)
        start = (np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)) * seq_length
        size = np.minimum(lengths[document] - start, seq_length + 1)
        place = _best_fit(size, seq_length + 1)
        order = np.argsort(place, kind="stable")
        self.document, self.start, self.size = document[order], start[order], size[order]
        self.ends: NDArray[np.int64] = np.cumsum(np.bincount(place))

    def __len__(self) -> int:
        return len(self.ends)

    def pieces(self, sequence: int) -> slice:
        """The pieces of a sequence."""
        return slice(int(self.ends[sequence - 1]) if sequence else 0, int(self.ends[sequence]))


def _best_fit(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The sequence of each piece. Sequences are numbered by their first piece, in the order of the pieces."""
    place = np.empty(len(sizes), np.int64)
    rooms: dict[int, NDArray[np.int64]] = {}
    occupied = made = 0  # occupied: bit r is set where a sequence has room for r tokens

    def put(room: int, sequences: NDArray[np.int64]) -> None:
        nonlocal occupied
        if room and len(sequences):
            rooms[room] = np.concatenate([rooms[room], sequences]) if room in rooms else sequences
            occupied |= 1 << room

    by_size = np.argsort(-sizes, kind="stable")
    firsts = np.flatnonzero(np.diff(sizes[by_size], prepend=-1))
    for first, last in zip(firsts, np.append(firsts[1:], len(sizes)), strict=True):
        pieces, size = by_size[first:last], int(sizes[by_size[first]])
        while len(pieces):
            if fitting := occupied >> size:
                room = size + (fitting & -fitting).bit_length() - 1
                sequences = rooms.pop(room)
                occupied ^= 1 << room
            else:
                room = capacity
                new = -(-len(pieces) // (capacity // size))
                sequences = np.arange(made, made + new)
                made += new
            each = room // size  # after one piece a sequence has less room than the others, so it takes the next too
            taken = min(len(pieces), len(sequences) * each)
            full, rest = divmod(taken, each)
            place[pieces[:taken]] = np.repeat(sequences, each)[:taken]
            put(room - each * size, sequences[:full])
            if rest:
                put(room - rest * size, sequences[full : full + 1])
            put(room, sequences[full + (rest > 0) :])
            pieces = pieces[taken:]
    _, first_piece, number = np.unique(place, return_index=True, return_inverse=True)
    rank = np.empty(len(first_piece), np.int64)
    rank[np.argsort(first_piece)] = np.arange(len(first_piece))
    return rank[number]
