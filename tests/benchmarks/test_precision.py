"""The benchmark of precisions: a row for each, beside bfloat16."""

import pytest

from benchmarks.harness import results
from benchmarks.training import precision
from parallel_ops.ops.float8_recipes import PRECISIONS


@pytest.mark.runs
def test_a_row_for_each_precision(tmp_path, monkeypatch):
    monkeypatch.setitem(precision.MODELS, "experts", precision.MODELS["experts"] | {"seq_length": 16})
    precision.main(steps=10, model=["experts"], device="cpu", output=tmp_path)
    (path,) = tmp_path.glob("*-precision.csv")
    rows = results.read_as(precision.PrecisionRow, path)
    assert [row.precision for row in rows] == list(PRECISIONS)
    assert rows[0].percent == 0 and all(0 < abs(row.percent) < 5 for row in rows[1:])
