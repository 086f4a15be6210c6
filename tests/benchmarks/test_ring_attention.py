"""The benchmark of ring attention: what it computes from times, writes and refuses. No time is asserted."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.harness import results
from benchmarks.parallel import ring_attention
from benchmarks.parallel.ring_attention import Row, Shape, app
from support.transports.loopback import LoopbackGroup

SMALL = Shape(tokens=12, heads=4, kv_heads=2, head_dim=8)


def test_what_is_computed_from_times():
    found = ring_attention.derived({"whole both": 8.0, "transfer both": 1.0, "both": 2.5}, 4, "both")
    assert (found["percent"], found["overhead"], found["ms_ring"]) == (80.0, 2.5 / 3, 2500.0)


def test_a_proportionate_link_keeps_the_ratio_of_transfer_to_arithmetic():
    """A machine that is as fast as the reference gets the link that was asked for; one half as fast, half of it."""
    flops = 2 * SMALL.heads * SMALL.head_dim * (4 * SMALL.tokens) ** 2
    for slower in (1, 2):
        seconds = slower * flops / ring_attention.REFERENCE_FLOPS
        assert SMALL.bandwidth(45, 4, 2, seconds) == pytest.approx(45e9 / slower)


@pytest.mark.parametrize("documents", [1, 3])
def test_every_measured_call_runs_on_every_rank(documents):
    shape = Shape(**{**SMALL.__dict__, "documents": documents})

    def main(transport):
        for call in ring_attention.ring_calls(shape, transport, torch.float32, torch.device("cpu")).values():
            call()

    LoopbackGroup(4, seed=0).run(main)
    for call in ring_attention.whole_calls(shape, 4, torch.float32, torch.device("cpu")).values():
        call()


def test_rows_are_written_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_attention, "_CPU", SMALL)
    arguments = ["--quick", "--tokens", "16", "--size", "2", "--link", "45", "--documents", "2"]
    for _ in range(2):
        result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--output", str(tmp_path)])
        assert result.exit_code == 0, result.output
    (table,) = tmp_path.glob("*-ring_attention.csv")
    rows = results.read_as(Row, table)
    assert [(row.layout, row.documents, row.direction) for row in rows] == [
        (layout, documents, direction)
        for layout, documents in (("zigzag", 1), ("striped", 1), ("zigzag", 2), ("balanced", 2))
        for direction in ("forward", "both")
    ]
    assert all(row.link_gb_per_s == 45 and min(row.ms_whole, row.ms_transfer, row.ms_ring) > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "blocks"], "unknown layout 'blocks'; choose from zigzag, striped, contiguous"),
        (["--size", "1", "--device", "cpu"], "a ring has at least 2 ranks, got 1"),
    ],
)
def test_what_it_refuses(arguments, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output
