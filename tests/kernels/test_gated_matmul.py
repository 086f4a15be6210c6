"""The matmul whose tiles wait for the flags of their rows: its code, and its executions while rows arrive."""

import copy
import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton")

from parallel_ops.triton_kernels import gated_matmul as kernels
from ptx import aot, execution
from ptx.execution import executed, unwritten
from ptx.kernels import meta
from ptx.memory import arrivals, proxies
from ptx.program import parse
from ptx.values import Fault
from support.numerics.attention_launches import loops_with_products
from support.numerics.suite import randn

BF16 = torch.bfloat16
SHARDS, OWN, READY = 3, 1, 7
# One block of rows a shard, two of columns: each of two programs has a tile of each shard.
SMALL = (64, 32, 32, 4, 3)
ROWS, COLUMNS, DEPTH = 64, 64, 64


def test_every_launch_is_one_of_these():
    assert kernels.tile_of(4096, 1024, 16) == kernels.TILE and kernels.tile_of(64, 1024, 16) == kernels.SMALL_TILE
    assert kernels.tile_of(4096, 1024, 8) == kernels.tile_of(4096, 1032, 16) == kernels.SMALL_TILE


def launches(rows, columns, depth, gated, transposed):
    weight = meta(depth, columns, dtype=BF16).t() if transposed else meta(columns, depth, dtype=BF16)
    with aot.recorded() as recorded:
        kernels.gated_matmul(
            meta(SHARDS * rows, depth, dtype=BF16), weight,
            meta(columns, dtype=BF16), meta(SHARDS * rows, columns, dtype=BF16),
            meta(SHARDS, dtype=torch.int32) if gated else None, READY, OWN, SHARDS,
        )  # fmt: skip
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "capability", "transposed"),
    [
        (1024, 4100, 8192, 90, False), (1024, 4096, 8192, 90, False), (1024, 384, 8192, 90, False),
        (1000, 520, 1032, 90, False),
        (1024, 4096, 8192, 100, False), (1024, 4096, 8192, 90, True), (1000, 520, 1032, 90, True),
    ],
)  # fmt: skip
def test_the_loop_multiplies_as_much_as_a_product_that_does_not_wait(rows, columns, depth, capability, transposed):
    """As many tensor-core instructions a loop, and at least 90 % of their share of its instructions."""
    shares = []
    for gated in (True, False):
        (launch,) = launches(rows, columns, depth, gated, transposed)
        code = aot.compile_for(launch, capability)
        assert not code.spills, code
        assert code.shared_bytes <= aot.SHARED_MEMORY_LIMIT[capability], code
        assert not proxies.unfenced(parse(aot.assembly(launch, capability)))
        loop = min(loops_with_products(code), key=len)
        count = sum(x.name.startswith(("HGMMA", "UTCHMMA")) for x in loop)
        assert count, [x.name for x in loop]
        shares.append((count, count / len(loop)))
    (waiting, share), (plain, plain_share) = shares
    assert waiting == plain and share >= 0.9 * plain_share, shares


def product(interleaving, monkeypatch, bias=None, seed=0):
    """A gated matmul of rows that arrive as ``interleaving`` says; exact, and so the same as any other."""
    monkeypatch.setattr(kernels, "tile_of", lambda *_: SMALL)
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 2)
    weight = randn(COLUMNS, DEPTH, dtype=BF16, seed=seed + 1).detach()
    with executed(90, exact=True, interleaving=interleaving):
        rows, out = unwritten((SHARDS * ROWS, DEPTH), BF16), unwritten((SHARDS * ROWS, COLUMNS), BF16)
        flags = torch.zeros(SHARDS, dtype=torch.int32)
        kernels.gated_matmul(rows, weight, bias, out, flags, READY, OWN, SHARDS)
    return out


def whole(seed=0):
    return randn(SHARDS * ROWS, DEPTH, dtype=BF16, seed=seed).detach()


def pieces(order, rows, value=READY, index=lambda shard: shard):
    size = ROWS * DEPTH * 2
    data = rows.view(torch.uint8).numpy().tobytes()
    return [
        arrivals.Arrival("rows", shard * size, data[shard * size : (shard + 1) * size], "flags", index(shard), value)
        for shard in order
    ]


def plain(monkeypatch, rows, bias=None, seed=0):
    monkeypatch.setattr(kernels, "tile_of", lambda *_: SMALL)
    weight = randn(COLUMNS, DEPTH, dtype=BF16, seed=seed + 1).detach()
    with executed(90, exact=True):
        out = unwritten((SHARDS * ROWS, COLUMNS), BF16)
        kernels.gated_matmul(rows, weight, bias, out, None, 0, OWN, SHARDS)
    torch.testing.assert_close(out.float(), rows.float() @ weight.float().t(), rtol=1e-2, atol=0.05)
    return out


def interleavings():
    """The own rows are there at the start; two more shards come in both orders, at any time."""
    for order in ((OWN, 2, 0), (OWN, 0, 2)):
        for before in arrivals.interleavings(2, 2, 2):
            yield order, ((0, 0), *before)


@pytest.mark.executed
def test_all_interleavings_give_the_bits_of_the_plain_product(monkeypatch, pytestconfig):
    rows = whole()
    expected = plain(monkeypatch, rows)
    every, different = list(interleavings()), 0
    if pytestconfig.getoption("--kernels") != "all":
        every = random.Random(0).sample(every, 20)
    for order, before in every:
        try:
            got = product(arrivals.Interleaving(pieces(order, rows), before), monkeypatch)
        except arrivals.Duplicate:
            continue
        different += 1
        assert torch.equal(got, expected), (order, before)
    assert different >= len(every) // 4, (different, len(every))


def relaxed(program):
    """A program whose loads acquire nothing."""
    found = copy.deepcopy(program)
    found.instructions = [
        dataclasses.replace(i, modifiers=tuple("relaxed" if m == "acquire" else m for m in i.modifiers))
        for i in found.instructions
    ]
    return found


EARLY = [((0, 0), (0, 0), (0, 0)), ((0, 0), (1, 1), (1, 1)), ((0, 0), (1, 0), (1, 1))]


@pytest.mark.executed
def test_a_kernel_that_does_not_wait_is_found(monkeypatch):
    waits = kernels.gated_matmul
    monkeypatch.setattr(kernels, "gated_matmul", lambda *args: waits(*args[:4], None, *args[5:]))
    with pytest.raises(Fault, match="reads what nobody wrote"):
        product(arrivals.Interleaving(pieces((OWN, 2, 0), whole()), EARLY[1]), monkeypatch)


@pytest.mark.executed
def test_a_kernel_that_waits_for_the_flag_of_another_shard_is_found(monkeypatch):
    shifted = pieces((OWN, 2, 0), whole(), index=lambda shard: (shard + 1) % SHARDS)
    for before in EARLY:
        with pytest.raises(Fault, match=r"reads what (nobody|another program) wrote"):
            product(arrivals.Interleaving(shifted, before), monkeypatch)


@pytest.mark.executed
def test_a_flag_that_is_not_acquired_is_found(monkeypatch):
    compiled = execution.compiled
    monkeypatch.setattr(execution, "compiled", lambda *args: (relaxed(compiled(*args)[0]), *compiled(*args)[1:]))
    with pytest.raises(Fault, match=r"reads what another program wrote|race: plain and atomic"):
        product(arrivals.Interleaving(pieces((OWN, 2, 0), whole()), EARLY[0]), monkeypatch)


@pytest.mark.executed
@pytest.mark.parametrize(("order", "value"), [((OWN, 2), READY), ((OWN, 2, 0), READY - 1)], ids=["none", "of before"])
def test_a_flag_that_is_not_set_is_waited_for_for_ever(order, value, monkeypatch):
    with pytest.raises(Fault, match="waits for what nobody brings"):
        product(arrivals.Interleaving(pieces(order, whole(), value=value), [(0, 0)] * len(order)), monkeypatch)


@pytest.mark.executed
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "bias", "dtype", "transposed"),
    [
        (200, 264, 136, True, BF16, False), (64, 40, 24, False, torch.float16, True), (1, 8, 8, True, BF16, False),
        (130, 520, 64, False, BF16, True),
    ],
)  # fmt: skip
def test_sizes_that_tiles_do_not_divide(rows, columns, depth, bias, dtype, transposed, monkeypatch):
    """Rows of a tensor whose storage has more, on three SMs, against fp64."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 3)
    x = randn(SHARDS * rows, depth + 8, dtype=dtype, seed=3).detach()[:, :depth]
    weight = randn(columns, depth, dtype=dtype, seed=4).detach()
    weight = weight.t().contiguous().t() if transposed else weight
    b = randn(columns, dtype=dtype, seed=5).detach() if bias else None
    with executed(90):
        out = unwritten((SHARDS * rows, columns), dtype)
        flags = torch.full((SHARDS,), READY, dtype=torch.int32)
        kernels.gated_matmul(x, weight, b, out, flags, READY, OWN, SHARDS)
    want = x.double() @ weight.double().t() + (0 if b is None else b.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=eps, atol=eps * want.abs().max().item() / 8)
