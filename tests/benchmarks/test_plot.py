"""The chart of all ops in the README and on the site."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.harness.plot import overview, plot_overview
from benchmarks.harness.results import read

ROOT = Path(__file__).parents[2]
CHARTS = {"docs/gpu/h100.svg": "benchmarks/results/nvidia-h100-80gb-hbm3.csv"}


def labels(svg):
    """The texts of a chart."""
    return re.findall(r">([^<>\n]+)</text>", svg.read_text())


@pytest.mark.parametrize("chart", CHARTS)
def test_a_chart_shows_the_rows_that_are_kept(chart, tmp_path):
    rows = read(ROOT / CHARTS[chart])
    plot_overview(rows, tmp_path / "new.svg")
    shown = labels(ROOT / chart)
    assert shown == labels(tmp_path / "new.svg")
    found = overview(rows)
    figures = [f"{value:.0f}" for each in found.values() for value in each.values()]
    assert len(found) >= 10 and set(figures) <= set(shown)
    assert chart in (ROOT / "README.md").read_text()


def test_a_chart_has_the_full_direction_of_three_providers():
    rows = read(ROOT / CHARTS["docs/gpu/h100.svg"])
    (row,) = [row for row in rows if (row.op, row.direction, row.provider) == ("rms_norm", "full", "compile")]
    assert overview(rows)["rms_norm"]["compile"] == row.percent_of_clone
    assert list(overview(rows)["rms_norm"]) == ["eager", "compile", "parallel_ops"]
