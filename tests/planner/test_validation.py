"""The promises about published figures."""

import pytest

from parallel_ops.planner import efficiency
from parallel_ops.planner.efficiency import FITTED
from parallel_ops.planner.validation import fit, validate
from parallel_ops.planner.validation.report import largest_error, mean_error


@pytest.fixture(scope="module")
def report():
    return validate()


def test_every_promise_holds(report):
    assert [target for target in report.targets if not target.met] == []
    assert len(report.targets) == 8


def test_step_times_of_every_table(report):
    steps = report.select("step time")
    assert len(steps) == 30
    assert sum(row.role == "fitted" for row in steps) == 6
    for table in ("table 1", "table 2", "table 5"):
        assert mean_error(tuple(row for row in steps if row.table == table)) < 0.10
    assert largest_error(steps) < 0.20


def test_the_constants_are_those_of_the_fit():
    found = fit()
    shipped = efficiency("ampere")
    assert len(FITTED) == 3
    assert [getattr(found, name) for name in FITTED] == [getattr(shipped, name) for name in FITTED]


def test_bubbles_are_exact_to_four_digits(report):
    rows = report.select("bubble")
    assert len(rows) == 72
    exact = [row for row in rows if f"{row.predicted:.4f}" == f"{row.published:.4f}"]
    for kind in ("1f1b", "zb-h1", "zb-h2", "zb-1p"):
        assert sum(f", {kind}," in row.name for row in exact) == 12, kind
    assert sum(", zb-2p," in row.name for row in exact) >= 11


def test_measured_memory_is_within_ten_percent(report):
    measured = report.select("memory")
    assert len(measured) == 16
    assert largest_error(measured) < 0.10
    assert mean_error(measured) < 0.03


def test_formulas_agree_with_the_papers(report):
    for row in report.select("activations"):
        assert row.predicted == pytest.approx(row.published, rel=1e-3)
    assert len(report.select("model states")) == 54


def test_layer_times_and_gains(report):
    assert mean_error(report.select("layer time")) < 0.10
    assert mean_error(report.select("gain")) < 0.10


def test_every_row_names_its_source(report):
    assert all("arXiv:" in row.source for row in report.rows)
