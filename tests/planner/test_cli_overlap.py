"""``parallel-ops overlap``: every number of the choice, and no row below the plain way."""

import json

import pytest

pytest.importorskip("typer")

from parallel_ops._internal import overlap_model as model
from parallel_ops._internal.overlap_schedule import GATED, LANES
from parallel_ops.planner import presets
from parallel_ops.planner.cli import overlap  # noqa: F401  (adds its command)

LAYER = ["overlap", "--hidden", 8192, "--tp", 8, "--gpu", "h100"]


def linears(run, *more):
    code, out, err = run(*LAYER, *more, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    return {row["name"]: row for row in data["linears"]}, model.Rates(**data["rates"])


@pytest.mark.parametrize("pulls", [False, True])
def test_the_table_has_every_number_of_the_choice(run, pulls):
    options = ["--pulls"] if pulls else []
    found, rates = linears(run, *options)
    code, out, err = run(*LAYER, *options)
    assert (code, err) == (0, "")
    flat = " ".join(out.split())
    assert list(found) == ["qkv", "proj", "fc1", "fc2", "proj, dx", "fc2, dx"]
    for row in found.values():
        assert [way["pieces"] for way in row["ways"]] == list(model.candidates(model.Work(**row["work"])))
        for way in row["ways"]:
            numbers = [f"{way[name]:,}" for name in ("products", "tiles", "waves")]
            parts = "product", "communication", "staging", "reduction", "host", "total"
            numbers += [f"{1e6 * way[name]:,.0f}" for name in parts]
            assert " ".join(numbers) in flat
            assert way == json.loads(json.dumps(vars(model.times(model.Work(**row["work"]), rates, way["pieces"]))))
        assert f"{row['speedup']:.2f}x {row['reason'].split(';')[0]}" in flat
    for assumed in (rates.latency, rates.launch, rates.host_product, rates.host_message):
        assert f" {1e6 * assumed:g} us " in flat
    assert "NVLink data sheet, 450 GB/s; messages reach 0.80 360 GB/s" in flat
    assert f"multiprocessors taken assumed {rates.taken}" in flat
    assert f"streams of products assumed: the next fills the last wave {LANES}" in flat
    assert ("rate of a gated product of a plain one, assumed 0.9" in flat) == pulls
    assert any(row["chosen"] == GATED for row in found.values()) == pulls
    assert "No figure is measured on a GPU." in flat


@pytest.mark.parametrize("gpu", ["a100-80", "h100", "h200", "b200"])
@pytest.mark.parametrize("reduction", ["backend", "exact"])
@pytest.mark.parametrize("pulls", [(), ("--pulls",), ("--pulls", "--puts")])
def test_no_row_is_below_the_plain_way(run, gpu, reduction, pulls):
    for hidden in (1024, 4096, 8192, 16384):
        for tokens in (1024, 8192, 65536):
            code, out, _ = run(
                "overlap", "--hidden", hidden, "--tp", 8, "--gpu", gpu, "--tokens", tokens, "--reduction", reduction,
                *pulls, "--json",
            )  # fmt: skip
            assert code == 0
            for row in json.loads(out)["linears"]:
                plain = row["ways"][0]
                chosen = next(way for way in row["ways"] if way["pieces"] == row["chosen"])
                assert row["speedup"] == plain["total"] / chosen["total"] >= 1.0
                assert row["chosen"] == 0 or row["speedup"] > 1.02
                if row["work"]["phase"] == "gather" or reduction == "backend":  # NCCL and cuBLAS, and nothing else
                    assert plain["total"] == plain["product"] + plain["communication"]


def test_what_changes_a_choice(run):
    """Pulled shards leave the waves of a product whole; few tokens, and few tiles, are not worth pieces."""
    by_kernels, _ = linears(run)
    by_engines, _ = linears(run, "--pulls")
    assert by_kernels["proj, dx"]["chosen"] != GATED and by_engines["proj, dx"]["chosen"] == GATED
    assert all(by_engines[name]["speedup"] >= row["speedup"] for name, row in by_kernels.items())
    few, _ = linears(run, "--tokens", 512)
    assert {row["chosen"] for row in few.values()} == {0}
    assert all("plain" in row["reason"] and row["speedup"] == 1.0 for row in few.values())


def test_copy_engines_leave_multiprocessors_to_the_products(run):
    by_kernels, _ = linears(run)
    by_engines, _ = linears(run, "--puts")
    assert all(by_engines[name]["speedup"] >= row["speedup"] for name, row in by_kernels.items())
    assert by_engines["fc1"]["speedup"] > by_kernels["fc1"]["speedup"] > 1.15
    assert by_engines["fc2"]["speedup"] > by_kernels["fc2"]["speedup"] > 1.2
    assert "multiprocessors taken none by copy engines 0" in " ".join(run(*LAYER, "--puts")[1].split())


def test_the_figures_are_those_of_the_presets(run):
    _, rates = linears(run)
    assert rates.processors == presets.gpu("h100").multiprocessors
    assert rates.bandwidth == 0.8 * presets.cluster("h100").intra.bandwidth


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", 8190, "--tp", 8], "overlap: --hidden must be a multiple of --tp 8, got 8190"),
        (["--hidden", 8192, "--tp", 8, "--ffn", 1001], "overlap: --ffn must be a multiple of --tp 8, got 1001"),
        (["--hidden", 8192, "--tp", 8, "--tokens", 100], "overlap: --tokens must be a multiple of --tp 8, got 100"),
        (["--hidden", 8192, "--tp", 8, "--gpu", "tpu-v4"], "overlap: --gpu tpu-v4 has no known number of multiproc"),
        (["--hidden", 8192, "--tp", 8, "--gpu", "h10"], "h100"),
        (["--hidden", 8192, "--tp", 8, "--reduction", "fp32"], "--reduction must be backend or exact, got fp32"),
        (["--hidden", 8192, "--tp", 1], "'--tp'"),
    ],
)
def test_bad_input_is_one_line(run, arguments, message):
    code, out, err = run("overlap", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err
