"""The choice of the largest keys of rows on chip, in order, the first of equal ones first.

Each thread sorts the keys that it holds of a row, eight adjacent ones. The largest of all is then the largest of the
threads' first ones, and a choice costs a maximum over threads and a step along one thread's keys: 14 instructions a
warp on average where 8 of 256 are chosen, beside 56 for a maximum over all keys.
"""

import triton
import triton.language as tl

from parallel_ops.triton_kernels.experts.scores import key_of, out_of, score_of


@triton.jit
def parts_of(t, DEPTH: tl.constexpr):
    """``DEPTH`` tensors ``[rows, columns / DEPTH]``: the first of ``DEPTH`` adjacent columns, the second, and so on.

    Adjacent columns are a thread's, so nothing moves between threads.
    """
    ROWS: tl.constexpr = t.shape[0]
    PARTS: tl.constexpr = t.shape[1] // DEPTH
    if DEPTH == 2:
        return _split2(tl.reshape(t, (ROWS, PARTS, 2)))
    elif DEPTH == 4:
        return _split4(tl.reshape(t, (ROWS, PARTS, 2, 2)))
    elif DEPTH == 8:
        return _split8(tl.reshape(t, (ROWS, PARTS, 2, 2, 2)))
    else:
        return (t,)


@triton.jit
def columns_of(parts, DEPTH: tl.constexpr):
    """The columns of ``parts_of``."""
    first = tl.arange(0, parts[0].shape[1])[None, :] * DEPTH
    columns = ()
    for i in tl.static_range(DEPTH):
        columns += (tl.zeros(parts[0].shape, tl.int32) + first + i,)
    return columns


@triton.jit
def sorted_parts(keys, places, DEPTH: tl.constexpr, COUNT: tl.constexpr):
    """The same with the largest of adjacent keys first, and so on for ``COUNT`` of them; of equal ones the first."""
    for done in tl.static_range(min(COUNT, DEPTH - 1)):
        for at in tl.static_range(DEPTH - 2, done - 1, -1):
            keys, places = _exchanged(keys, places, at, keys[at + 1] > keys[at])
    return keys, places


@triton.jit
def _exchanged(keys, places, AT: tl.constexpr, swap):
    """With the one at ``AT`` and the next in turn where ``swap``."""
    new_keys = keys[:AT] + (tl.where(swap, keys[AT + 1], keys[AT]), tl.where(swap, keys[AT], keys[AT + 1]))
    new_places = places[:AT] + (
        tl.where(swap, places[AT + 1], places[AT]), tl.where(swap, places[AT], places[AT + 1])
    )  # fmt: skip
    return new_keys + keys[AT + 2 :], new_places + places[AT + 2 :]


@triton.jit
def _split2(t):
    a, b = tl.split(t)
    return (a, b)


@triton.jit
def _split4(t):
    a, b = tl.split(t)
    a0, a1 = tl.split(a)
    b0, b1 = tl.split(b)
    return (a0, b0, a1, b1)


@triton.jit
def _split8(t):
    a, b = tl.split(t)
    a0, a2, a4, a6 = _split4(a)
    b0, b2, b4, b6 = _split4(b)
    return (a0, b0, a2, b2, a4, b4, a6, b6)


@triton.jit
def first_of(keys, places):
    """The largest key of each row and its column, of sorted parts."""
    best = tl.max(keys[0], axis=1)
    return best, tl.min(tl.where(keys[0] == best[:, None], places[0], 0x7FFFFFFF), axis=1)


@triton.jit
def without_first(keys, places, place, DEPTH: tl.constexpr, LEFT: tl.constexpr):
    """The same without the one at ``place`` of each row, which is a first one; as many as ``LEFT - 1`` choices need."""
    wins = places[0] == place[:, None]
    COUNT: tl.constexpr = min(DEPTH, LEFT - 1)
    new_keys = ()
    new_places = ()
    for i in tl.static_range(COUNT):
        if i + 1 < DEPTH:
            new_keys += (tl.where(wins, keys[i + 1], keys[i]),)
            new_places += (tl.where(wins, places[i + 1], places[i]),)
        else:
            new_keys += (tl.where(wins, out_of(keys[i]), keys[i]),)
            new_places += (places[i],)
    return new_keys, new_places


@triton.jit
def by_part(of_group, PARTS: tl.constexpr):
    """``[rows, groups]`` for each of the ``PARTS`` adjacent columns of a group."""
    ROWS: tl.constexpr = of_group.shape[0]
    wide = tl.broadcast_to(of_group[:, :, None], (ROWS, of_group.shape[1], PARTS))
    return tl.reshape(wide, (ROWS, of_group.shape[1] * PARTS))


@triton.jit
def best_groups(keys, places, TOP_GROUPS: tl.constexpr, GROUPS: tl.constexpr):
    """1 for each of the best groups, else 0, ``[rows, groups]``; a group's score is the sum of its two best keys."""
    ROWS: tl.constexpr = keys[0].shape[0]
    PARTS: tl.constexpr = keys[0].shape[1] // GROUPS  # of a group
    first = tl.reshape(keys[0], (ROWS, GROUPS, PARTS))
    largest = tl.max(first, axis=2)
    place = tl.reshape(places[0], (ROWS, GROUPS, PARTS))
    where = tl.min(tl.where(first == largest[:, :, None], place, 0x7FFFFFFF), axis=2)
    rest = out_of(first)
    if len(keys) > 1:
        rest = tl.reshape(keys[1], (ROWS, GROUPS, PARTS))
    second = tl.max(tl.where(place == where[:, :, None], rest, first), axis=2)
    # A group of one, or of padding, has no two keys; the latter stays below all.
    of_group = tl.where(second == out_of(second), largest, key_of(score_of(largest) + score_of(second), False))
    group = tl.arange(0, GROUPS)
    other = of_group[:, None, :]
    # Those before it: larger ones, and equal ones of lower index.
    earlier = (group[None, None, :] < group[None, :, None]).to(of_group.dtype)
    # Counted in fp32: LLVM makes of a sum of truth values a vector of bits in local memory.
    before = tl.where(other + earlier > of_group[:, :, None], 1.0, 0.0)
    return tl.where(tl.sum(before, axis=2) < TOP_GROUPS, 1, 0)
