"""The promises about published figures, and ``parallel-ops validate``."""

import json
import random
from importlib.resources import files
from pathlib import Path

import pytest

from benchmarks.planner_fit import GENERATIONS, OWN, SHARED, band_keys, bands, loss, sample, start
from parallel_ops.planner import error_band, validation
from parallel_ops.planner.compute.software import fitted_constants, uncertainty
from parallel_ops.planner.error_band import keys
from parallel_ops.planner.validation import Promise, Report, validate
from parallel_ops.planner.validation.published import measurements
from parallel_ops.planner.validation.published_runs import published_runs
from parallel_ops.planner.validation.refits import without_own_table
from parallel_ops.planner.validation.report import mean_error
from parallel_ops.planner.validation.validate import PROMISES, regrets
from support.planning.planner_errors import report as made_once
from support.planning.planner_scenarios import check_table


@pytest.fixture(scope="module")
def report():
    return made_once()


def test_the_table_of_the_document_is_up_to_date():
    check_table("validation")


def test_every_promise_holds(report):
    assert [promise for promise in report.promises if not promise.met] == []
    assert len(report.promises) == 70


def test_every_table_of_step_times_has_a_promise(report):
    steps = report.select("step time")
    assert len(steps) == len(measurements()) > 200
    assert {row.table for row in steps} == set(PROMISES)
    assert max(PROMISES.values()) == 0.25
    recent = {row.table for row in published_runs()}
    assert len(recent) == 39 and max(PROMISES[name] for name in recent) == 0.21
    assert sum(row.role == "held out" for row in steps) > 40


def test_no_step_in_either_direction_fits_better():
    """The constants that ship are those of the fit: on its rows no step of 10 % gains more than 0.0003 of 0.052."""
    rows, shipped = sample(), start()
    assert len(shipped) == len(OWN) * 2 + len(SHARED) + 1
    least = loss(shipped, rows)
    for key, value in shipped.items():
        for factor in (1 / 1.1, 1.1):
            moved = shipped | {key: min(1.0, value * factor)}
            assert loss(moved, rows) > least - 3e-4, key


def test_fits_without_a_table_change_constants_that_are_fitted():
    """Values of a constant that no fit moves any more would spoil the errors of the tables that were left out."""
    path = Path(validation.__file__).parent / "refits.json"
    generations = {f"{of}/{name}" for of in GENERATIONS for name in (*OWN, *SHARED, "fp8", "flash_backward")}
    known = generations | {found.name for found in fitted_constants()}
    known |= {name.replace("flash_forward", "flash_backward") for name in known}
    assert all(set(values) <= known for values in json.loads(path.read_text(encoding="utf-8")).values())


def test_a_choice_loses_what_the_chosen_row_took_longer():
    rows = [row for row in measurements() if row.group == measurements()[-30].group or row.table == "h100"]
    best = {(row.table, row.name): row.seconds for row in measurements()}
    assert rows and set(regrets(best).values()) == {0.0}
    worst = {key: -seconds for key, seconds in best.items()}
    assert max(regrets(worst).values()) > 1


def test_all_rows_are_there_and_memory_is_the_sum_of_its_parts(report):
    """The promises bound their errors."""
    bubbles, measured = report.select("bubble"), report.select("memory")
    assert len(bubbles) == 72 and len(measured) == 56
    exact = [row for row in bubbles if f"{row.predicted:.4f}" == f"{row.published:.4f}"]
    assert sum(", zb-2p," in row.name for row in exact) >= 11
    assert max(abs(row.error) for row in measured) < 0.20
    assert all(sum(row.parts.values()) == pytest.approx(row.predicted) for row in measured)


def test_the_figures_of_the_readme_are_those_of_the_report(report):
    text = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    steps, recent = report.select("step time"), {row.table for row in published_runs()}
    over_sources = [mean_error(tuple(row for row in steps if row.table == name)) for name in recent]
    without = [abs(seconds / row.seconds - 1) for row, seconds in without_own_table()]
    for figure in (
        f"{len(steps):,} published step times",
        f"the mean error is {mean_error(steps):.1%}",
        f"on the {len(recent)} sources of 2024 to 2026",
        f"{sum(over_sources) / len(over_sources):.1%}, and with constants",
        f"without a row's own table {sum(without) / len(without):.1%}",
        f"{mean_error(report.select('memory')):.0%}, never more than 6%",
    ):
        assert figure in text, figure


def test_summaries_are_those_of_the_rows(report):
    found = {(summary.table, summary.quantity): summary for summary in report.summaries()}
    assert sum(summary.rows for summary in found.values()) == len(report.rows)
    rows = tuple(row for row in report.select("step time") if row.table == "h100")
    h100 = found["h100", "step time"]
    assert (h100.rows, h100.fitted) == (len(rows), len(rows))
    assert h100.mean == mean_error(rows) <= abs(h100.largest) == max(abs(row.error) for row in rows)
    assert h100.bias == pytest.approx(sum(row.error for row in rows) / len(rows))


def test_every_row_names_its_source(report):
    assert all(
        "arXiv:" in row.source or "github.com" in row.source or "torchtitan" in row.source for row in report.rows
    )


def test_bands_are_those_of_the_residuals():
    errors = [(band_keys(row), seconds / row.seconds - 1) for row, seconds in without_own_table()]
    found = bands(errors, memory={"": 0.08, "hugging-face": 0.45})
    assert len(found) > 12
    for row in measurements()[::7]:
        shipped = error_band(row.cluster, row.plan, software=row.software, experts=row.model.expert_kind)
        if shipped.like != "any":
            few = uncertainty(row.cluster.gpu.generation, row.cluster.gpu.name, row.software)
            assert (shipped.time, shipped.memory) == (
                max(few, found[shipped.like]["time"]),
                found[shipped.like]["memory"],
            )
            assert shipped.rows == found[shipped.like]["rows"]


def test_a_band_holds_its_share_of_rows_that_it_was_not_made_of():
    """Four of five errors of one random half are within the bands of the other."""
    errors = [
        (keys(row.cluster, row.plan, row.software, row.model.experts > 0), abs(seconds / row.seconds - 1))
        for row, seconds in without_own_table()
    ]
    held = []
    for seed in range(20):
        random.Random(seed).shuffle(errors)
        made = bands(errors[::2], memory={"": 0.08})
        known = [
            (next((made[key]["time"] for key in names if key in made), None), error) for names, error in errors[1::2]
        ]
        inside = [error <= band for band, error in known if band is not None]
        held.append(sum(inside) / len(inside))
    assert sum(held) / len(held) >= 0.79


def test_bands_of_few_rows_are_as_wide_as_the_furthest():
    made = bands([(("x",), 0.01 * n) for n in range(1, 6)] + [(("y",), 0.5)] * 4, memory={"": 0.1})
    assert made == {"x": {"time": 0.05, "memory": 0.1, "rows": 5}}
    assert bands([(("x",), 0.01 * n) for n in range(1, 10)], memory={"": 0.1})["x"]["time"] == 0.08


@pytest.fixture
def app():
    pytest.importorskip("typer")
    return pytest.importorskip("parallel_ops.planner.cli.app")


class TestValidate:
    def test_the_error_table(self, run, report, app, monkeypatch):
        assert app.validate is validate
        monkeypatch.setattr(app, "validate", lambda: report)
        code, out, _ = run("validate", "--json")
        data = json.loads(out)
        assert code == (0 if all(promise["met"] for promise in data["promises"]) else 1)
        for row in data["rows"]:
            assert row["error"] == pytest.approx(row["predicted"] / row["published"] - 1)
        _, table, _ = run("validate", "--rows")
        assert f"{data['tables'][0]['mean']:.1%}" in table
        for row in data["rows"][:10]:
            assert f"{row['published']:.4g}" in table and f"{row['predicted']:.4g}" in table
        assert all(promise["name"] in table for promise in data["promises"])
        assert "llm-foundry: h100" in table and "vTrain: 2 to 8 GPUs" in table  # who published it, not half a title

    def test_a_broken_promise_is_exit_code_1(self, run, app, monkeypatch):
        report = Report(rows=(), promises=(Promise(name="step time", value=0.2, limit=0.1),))
        monkeypatch.setattr(app, "validate", lambda: report)
        code, out, err = run("validate")
        assert (code, err) == (1, "")
        assert "does not hold" in out

    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("tp", "0", "tp must be a whole number of at least 1, got '0'"),
            ("gbs", "1e9", "gbs must be a whole number of at least 1, got '1e9'"),
            ("vp", "33", "pp * vp is 33 chunks of 32 layers"),
            ("tokens_s_gpu", "nan", "tokens_s_gpu must be empty or a number of zero or more, got 'nan'"),
            ("tokens_s_gpu", "-5", "tokens_s_gpu must be empty or a number of zero or more, got '-5'"),
            ("tokens_s_gpu", "", "needs the throughput of the run, tokens_s_gpu or tflops_gpu"),
            ("memory_gib", "inf", "memory_gib must be empty or a number of zero or more, got 'inf'"),
        ],
    )
    def test_runs_of_ones_own_are_refused_by_column(self, run, tmp_path, column, value, message):
        lines = (files("parallel_ops.planner.validation") / "runs/deepspeed_a800.csv").read_text().splitlines()
        row = dict(zip(lines[1].split(","), lines[2].split(","), strict=True)) | {column: value}
        text = "\n".join([lines[1], ",".join(row.values())])
        (tmp_path / "mine.csv").write_text(text, encoding="utf-8-sig")
        assert run("validate", "--runs", tmp_path / "mine.csv") == (2, "", f"error: mine.csv, row 1: {message}\n")
