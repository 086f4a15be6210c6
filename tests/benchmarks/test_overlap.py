"""The overlap benchmark: what it computes from times, what it writes, what it refuses. No time is asserted."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.harness import results
from benchmarks.parallel import overlap
from benchmarks.parallel.link import Session
from benchmarks.parallel.overlap import Row, app, gemms
from support.transports.loopback import LoopbackGroup

CPU = torch.device("cpu")


def measured(phase, gemm, comm, overlapped, chunked=None):
    seconds = {"gemm": gemm, "comm": comm, "unfused": gemm + comm}
    for chunks, value in zip(overlap.CHUNKS, overlapped, strict=True):
        seconds |= {f"overlapped {chunks}": value, f"chunked {chunks}": chunked or gemm}
    return overlap.derived(seconds, 4, phase)


def test_efficiency_is_the_share_that_is_hidden():
    assert measured("gather", 8.0, 4.0, [12.0] * 3)["efficiency"] == 0
    assert measured("gather", 8.0, 4.0, [8.0, 12.0, 12.0])["efficiency"] == 1
    best = measured("gather", 4.0, 8.0, [11.0, 10.0, 10.5], chunked=5.0)
    names = ("chunks", "ms_overlapped", "efficiency", "chunking_tax")
    assert [best[name] for name in names] == [2, 10_000.0, 0.5, 1.25]


def test_ideal():
    for phase, gemm, comm, ideal in (("gather", 8.0, 4.0, 8e3), ("gather", 4.0, 8.0, 9e3), ("scatter", 8.0, 4.0, 9e3),
                                     ("scatter", 4.0, 8.0, 9e3)):  # fmt: skip
        assert measured(phase, gemm, comm, [9.0] * 3)["ms_ideal"] == ideal


def test_products_of_the_layers():
    """The whole matrices, against parameter counts: a Llama-70B layer has 856 million, a GPT-175B layer 12 h^2."""
    weights = {"llama-70b": 0, "gpt-175b": 0}
    for gemm in gemms():
        weights[gemm.model] += gemm.columns * gemm.inner
    assert weights["llama-70b"] == 855_638_016
    assert weights["gpt-175b"] == 12 * 12288**2


def test_bytes_and_flops_of_one_rank():
    qkv = gemms()[0]
    assert qkv.flops(8) == 2 * 8192 * 1280 * 8192
    assert qkv.sent(8, 2) == 7 * 1024 * 8192 * 2
    proj = gemms()[1]
    assert proj.flops(8) == 2 * 8192 * 8192 * 1024
    assert proj.sent(8, 2) == 7 * 1024 * 8192 * 2
    # 370 GB/s hide an all-gather behind 1760 columns at 650 TFLOP/s.
    wide = dataclasses.replace(qkv, columns=8 * 1757)
    assert wide.reference_ratio(370e9, 8) == pytest.approx(7 / 8, rel=1e-3)


@pytest.mark.parametrize("gemm", gemms()[:2], ids=["gather", "scatter"])
def test_every_measured_call_runs_on_every_rank(gemm):
    def main(transport):
        calls = overlap.calls(gemm.scaled(256), transport, torch.float32, CPU)
        assert set(calls) == {
            "gemm",
            "comm",
            "unfused",
            *(f"{a} {n}" for a in ("overlapped", "chunked") for n in overlap.CHUNKS),
        }
        for call in calls.values():
            call()

    LoopbackGroup(4, seed=0).run(main)


def test_rows_are_written_and_replaced(tmp_path):
    arguments = ["--quick", "--scale", "128", "--model", "gpt-175b", "--link", "45", "--output", str(tmp_path)]
    for _ in range(2):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    (table,) = tmp_path.glob("*-overlap.csv")
    rows = results.read_as(Row, table)
    assert [row.layer for row in rows] == ["qkv", "proj", "fc1", "fc2"]
    for row in rows:
        assert (row.model, row.size, row.scale, row.dtype, row.transport) == ("gpt-175b", 8, 128, "float32", "paced")
        assert row.link_gb_per_s == 45
        assert row.chunks in overlap.CHUNKS
        assert min(row.ms_gemm, row.ms_comm, row.ms_unfused, row.ms_overlapped) > 0


def test_the_documentation_has_the_rows_that_were_measured():
    root = Path(__file__).parents[2]
    cells, taxes = {}, []
    for row in results.read_as(Row, root / "benchmarks/results/amd-epyc-2-cores-overlap.csv"):
        speed = row.ms_unfused / row.ms_overlapped
        # As the columns of a row say, up to their rounding to five digits.
        hidden = row.ms_gemm + row.ms_comm - row.ms_overlapped
        assert row.efficiency == pytest.approx(hidden / min(row.ms_gemm, row.ms_comm), abs=1e-3)
        cells.setdefault(f"{row.model} {row.layer} ({row.phase})", {})[row.link_gb_per_s] = (
            f"{speed:.2f}x, E {row.efficiency:.2f}"
        )
        taxes.append(row.chunking_tax)
    text = (root / "docs/performance.md").read_text()
    links = sorted(next(iter(cells.values())))
    header = " | ".join(f"{gb:g} GB/s" for gb in links)
    # Rows whose best way is gone were not measured again.
    lines = [f"| {name} | {' | '.join(by_link.get(gb, '-') for gb in links)} |" for name, by_link in cells.items()]
    assert f"8 ranks) | {header} |" in text
    assert "\n".join(lines) in text
    assert f"cost {100 * min(taxes) - 100:.0f} to {100 * max(taxes) - 100:.0f}%" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--transport", "tcp"], "unknown transport 'tcp'; choose from paced, c10d, nccl"),
        (["--transport", "c10d"], "the transport c10d needs processes: torchrun"),
        (["--model", "bert"], "unknown model 'bert'; choose from llama-70b, gpt-175b"),
        (["--link", "0"], "Invalid value for '--link'"),
        (["--latency-us", "-1"], "Invalid value for '--latency-us'"),
        (["--latency-us", "inf"], "--latency-us must be finite, got inf"),
        (["--dtype", "int8"], "unknown dtype 'int8'; choose from float32, bfloat16, float16"),
        (["--size", "3", "--device", "cpu"], "3 ranks at scale 4 do not divide llama-70b qkv evenly"),
        (["--size", "1", "--device", "cpu"], "or are fewer than 2"),
    ],
)
def test_what_it_refuses(arguments, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("gb", [0.0, math.nan])
def test_a_link_has_a_bandwidth(gb, capsys):
    """Behind the option's least value, which is no bound for NaN in every version of typer."""
    with pytest.raises(SystemExit, match="2"):
        Session("cpu", None, 8, "paced", [8.0, gb], True, None)
    assert f"a link must have a positive bandwidth, got [8.0, {gb}]" in capsys.readouterr().err
