"""``parallel-ops schedule``: the picture, the data, and what is refused."""

import json
from xml.etree import ElementTree

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from parallel_ops.planner.pictures import drawing
from parallel_ops.planner.schedules.schedule import KINDS, Times, actions, simulate


def work(data):
    """Time that a rank computes, on average; the second member of a pair stands for both."""
    return sum(p["end"] - p["start"] for rank in data["ranks"] for p in rank if not p["paired"]) / len(data["ranks"])


def test_the_picture_in_letters(run):
    code, out, _ = run("schedule", "--pp", 2, "--micro-batches", 3, "--kind", "zb-h1")
    assert code == 0
    lines = [line.replace(" ", "") for line in out.splitlines()]
    assert [line[5:].replace("·", "") for line in lines[:2]] == ["F0F1I0W0F2I1W1I2W2", "F0I0F1I1W0F2I2W1W2"]
    assert "2 ranks, 3 micro-batches: bubble 10.0%" in out


def test_every_pass_has_a_column_where_there_is_room():
    """Also those of other ranks that are shorter than all of rank 0."""
    stages = [0.8, 0.5, 0.8, 0.5]
    times = Times(forward=stages, input_grad=stages, weight_grad=stages)
    picture = drawing.text(simulate(actions("zb-h1", 4, 12), times), 80).plain
    for line in picture.splitlines()[:4]:
        assert sum(map(line.count, "FIW")) == 3 * 12


def test_every_kind(run):
    for kind in KINDS:
        code, out, _ = run("schedule", "--pp", 4, "--micro-batches", 8, "--kind", kind, "--json")
        data = json.loads(out)
        assert code == 0
        assert len(data["ranks"]) == 4
        assert data["bubble"] == pytest.approx(1 - work(data) / data["step_time"])


def test_times(run):
    given = ["--pp", 2, "--micro-batches", 2, "--times", "2,3,1", "--link", 1, "--json"]
    assert json.loads(run("schedule", *given)[1])["step_time"] == 20
    assert json.loads(run("schedule", *given, "--input-grad-first")[1])["step_time"] == 19


def test_a_long_schedule_is_drawn_in_any_width(run):
    code, out, _ = run("schedule", "--pp", 3, "--micro-batches", 400)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100


def test_pictures(run, tmp_path):
    for suffix in ("svg", "png"):
        path = tmp_path / f"x.{suffix}"
        assert run("schedule", "--pp", 4, "--micro-batches", 8, "--kind", "dualpipe-v", "--output", path)[0] == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    words = "".join(root.itertext())
    assert "dualpipe-v, 4 ranks" in words and "weight gradient, odd chunks" in words and "bubble" in words


PLAN = ["--model", "llama2-7b", "--cluster", "h100x8", "--batch", 16]


def test_the_memory_of_a_plan(run, tmp_path):
    given = [*PLAN, "--plan", "pp=4,zero=1,micro_batch=1,recompute=full"]
    code, out, _ = run("schedule", *given, "--output", tmp_path / "x.svg")
    peak = json.loads(run("estimate", *given, "--json")[1])["memory"][0]["total"]
    words = "".join(ElementTree.parse(tmp_path / "x.svg").getroot().itertext())
    for text in (out, words):
        assert f"Memory of rank 0: at most {peak / 2**30:.1f} GiB of 79.6" in text
        assert "activations in flight" in text and "recomputed activations" in text and "whole backward" in text
    rows = [line for line in out.splitlines() if line.endswith("s" * 20)]
    assert code == 0 and 0 < len(rows) < 10
    data = json.loads(run("schedule", *given, "--rank", 3, "--json")[1])["memory"]
    assert data["rank"] == 3 and data["peak"] < peak and data["times"][0] == 0
    assert all(len(values) == len(data["times"]) - 1 for values in data["parts"].values())


def test_bad_input_for_a_plan(run):
    plan = ["--plan", "pp=4"]
    for given, message in (
        (PLAN, "schedule takes --pp and --micro-batches, or --model, --cluster, --batch and --plan"),
        (["--pp", 4, "--micro-batches", 8, "--rank", 0], "schedule takes --pp and --micro-batches, or --model"),
        ([*PLAN, *plan, "--pp", 4], "--plan has the sizes, schedule and times of its pipeline"),
        ([*PLAN, *plan, "--virtual-stages", 0], "--plan has the sizes, schedule and times of its pipeline"),
        ([*PLAN, *plan, "--kind", "zb-v"], "--plan has the sizes, schedule and times of its pipeline"),
        ([*PLAN, *plan, "--rank", 4], "rank must be from 0 to 3 for pp=4, got 4"),
        ([*PLAN, "--plan", "pp=3"], "does not divide the 8 GPUs"),
        ([*PLAN[:-1], 2**70, *plan], "pp * micro-batches * virtual stages must be at most 1,048,576"),
        (["--pp", 4, "--micro-batches", 10**6], "must be at most 1,048,576, got 4,000,000"),
    ):
        code, out, err = run("schedule", *given)
        assert (code, out) == (2, "") and err.startswith("error: ") and message in err


def test_bad_input(run, tmp_path):
    sizes = ["--pp", 4, "--micro-batches", 8]
    for extra, message in (
        (["--kind", "2f2b"], "kind must be one of gpipe, 1f1b"),
        (["--times", "1,2"], "--times must be three numbers, F,I,W, got '1,2'"),
        (["--times", "0,0,0"], "--times must have a number above 0, got '0,0,0'"),
        (["--times", "1e-320,0,0"], "--times must be 0 or from 1e-100 to 1e+100, got 1e-320"),
        (["--times", "1,1,1e308"], "--times must be 0 or from 1e-100 to 1e+100, got 1e+308"),
        (["--link", "1e308"], "--link must be 0 or from 1e-100 to 1e+100, got 1e+308"),
        (["--kind", "zb-2p", "--memory-limit", "nan"], "memory_limit must be at least 1 micro-batch, got nan"),
        (["--times", "1,-2,3"], "input_grad must be finite and not negative, got -2.0"),
        (["--memory-limit", 4], "memory_limit and retained are for zb-2p"),
        (["--virtual-stages", 0], "virtual_stages must be a whole number of at least 1, got 0"),
        (["--output", tmp_path / "x.gif"], "must end in .svg or .png"),
        (["--output", tmp_path / "no" / "x.svg"], "No such file or directory"),
    ):
        code, out, err = run("schedule", *sizes, *extra)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1 and message in err
