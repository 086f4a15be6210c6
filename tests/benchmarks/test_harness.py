import csv
import dataclasses
import functools
import importlib
import io
import itertools
import re
import typing
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import cli, ops
from benchmarks.cli import app, run
from benchmarks.gpu_session import prove
from benchmarks.harness import measure, report, results, timing
from benchmarks.harness.measure import Settings
from benchmarks.harness.memory import peak_bytes
from benchmarks.harness.timing import Rounds
from benchmarks.host import host_time
from benchmarks.parallel import overlap, ring_attention
from benchmarks.training import precision
from support.numerics.suite import DEVICES

CPU = torch.device("cpu")
OPS = ops.every()
BIAS_GELU = OPS["bias_gelu"]


def row(**changes):
    values = {
        "op": "bias_gelu", "direction": "full", "shape": "4x8", "dtype": "float32", "provider": "eager",
        "ms_median": 2.0, "ms_p25": 1.5, "ms_p75": 2.5, "gb_per_s": 10.0, "percent_of_clone": 50.0, "peak_mib": 3.0,
        "overhead_us": None, "bytes": 640, "device": "a-cpu", "driver": "", "threads": 2, "torch": "2.13.0",
        "triton": "", "version": "0.1.0", "commit": "abc", "date": "2026-11-20",
    }  # fmt: skip
    return results.Row(**{**values, **changes})


def test_stats_are_median_and_quartiles():
    assert timing.Stats.of([5.0, 1.0, 3.0, 2.0, 4.0]) == timing.Stats(median=3.0, p25=2.0, p75=4.0, fastest=1.0)
    assert timing.Stats.of([7.0]) == timing.Stats(7.0, 7.0, 7.0, 7.0)


def test_the_composite_can_be_left_out():
    settings = Settings.standard(CPU, (torch.float32,), quick=True, compiled=False)
    case = next(measure.cases(BIAS_GELU, settings, []))
    assert list(case.providers) == ["parallel_ops"]
    assert next(measure.cases(OPS["rms_norm"], settings, [])).providers.keys().isdisjoint({"eager", "compile"})


class RecordingTimer:
    repeat = 2

    def __init__(self):
        self.rounds = []

    def round(self, batches):
        self.rounds.append([[call() for call in batch] for batch in batches])
        return [1.0 if number else 100.0 for number in [len(self.rounds) - 1] * len(batches)]


def test_providers_take_turns_in_changing_order_on_changing_inputs():
    timer = RecordingTimer()
    calls = {name: [functools.partial(str, f"{name}{i}") for i in range(5)] for name in "abc"}
    stats = timing.take_turns(calls, timer, Rounds(3, 6, 60))
    assert set(stats) == set("abc")
    assert stats["a"] == timing.Stats(1.0, 1.0, 1.0, 1.0)  # the first round, which fills the pools, does not count
    assert len(timer.rounds) == 7
    orders = ["".join(batch[0][0] for batch in r) for r in timer.rounds]
    assert orders[:6] == ["abc", "bca", "cab", "cba", "acb", "bac"]
    inputs = [call[1] for r in timer.rounds for batch in r for call in batch]
    assert all(a != b for a, b in itertools.pairwise(inputs))


def test_the_budget_ends_the_rounds_but_not_before_the_least():
    timer = RecordingTimer()
    timing.take_turns({"a": [str]}, timer, Rounds(3, 50, 0))
    assert len(timer.rounds) == 1 + 3


def test_a_new_row_replaces_the_old_one_of_its_case(tmp_path):
    path = tmp_path / "results" / "a-cpu.csv"
    first = [row(), row(provider="clone", peak_mib=None), row(direction="overhead", bytes=None, overhead_us=12.5)]
    assert results.merge(path, first) == first
    assert results.read(path) == first
    newer = row(ms_median=1.0, commit="def")
    other = row(shape="8x8")
    assert results.merge(path, [newer, other]) == [newer, *first[1:], other]
    assert results.read(path) == [newer, *first[1:], other]
    with path.open() as file:
        assert next(csv.reader(file)) == results.columns(results.Row)


# Counted by hand for 2 x 3 x 8 activations, or for scores of 2 samples, 3 heads, 2 queries and 4 keys, of which the
# queries see 3 and 4; 4 bytes an element and 1 byte a mask element.
@pytest.mark.parametrize(
    ("op", "shape", "forward", "backward"),
    [
        ("bias_gelu", (2, 3, 8), 4 * (48 + 8 + 48), 4 * (48 + 48 + 8 + 48 + 8)),
        ("bias_swiglu", (2, 3, 8), 4 * (48 + 24), 4 * (24 + 48 + 48)),
        ("bias_dropout_add", (2, 3, 8), 4 * (48 + 48 + 8 + 48), 4 * (48 + 48 + 8)),
        ("scaled_masked_softmax", (2, 3, 2, 4), 4 * (48 + 48) + 2 * 2 * 4, 4 * (48 + 48 + 48)),
        ("scaled_causal_softmax", (2, 3, 2, 4), 4 * (6 * 7 + 48), 4 * (6 * 7 + 6 * 7 + 48)),
    ],
)
def test_necessary_bytes(op, shape, forward, backward):
    traffic = OPS[op].traffic(shape, torch.float32)
    assert [traffic.of(d) for d in ("forward", "backward", "full")] == [forward, backward, forward + backward]


@pytest.mark.parametrize("op", list(OPS))
def test_every_op_computes_what_the_composite_computes(op):
    benchmark = OPS[op]
    inputs = benchmark.build(benchmark.tiny, torch.float32, CPU)
    ours, eager = benchmark.ours(*inputs), benchmark.eager(*inputs)
    assert ours.shape == eager.shape
    assert ours.dtype == eager.dtype
    if op != "bias_dropout_add":  # random
        torch.testing.assert_close(ours, eager)


def test_peak_memory_counts_what_is_alive_at_once():
    x = torch.randn(1 << 20)
    exactly = functools.partial(pytest.approx, abs=1024)  # scalars are tensors too
    assert peak_bytes(lambda: x * 2 + 1, CPU) == exactly(2 * x.nbytes)
    assert peak_bytes(lambda: [x.clone() for _ in range(3)], CPU) == exactly(3 * x.nbytes)
    assert peak_bytes(x.sum, CPU) == exactly(0)


def tiny_run(folder, device=CPU, **changes):
    tiny = dataclasses.replace(BIAS_GELU, shapes=lambda *_: [(64, 2, 32)], **changes)
    dtypes = (torch.float32, torch.bfloat16)
    settings = Settings(device, dtypes, backend="aot_eager", rounds=Rounds(2), input_bytes=1 << 18)
    out = io.StringIO()
    done = run([tiny], settings, folder, Console(file=out, width=120))
    return done, out.getvalue()


@pytest.mark.parametrize("device", DEVICES)
def test_run_of_one_op_end_to_end(tmp_path, device):
    done, out = tiny_run(tmp_path, torch.device(device))
    assert done
    (table,) = tmp_path.glob("*.csv")
    rows = {row.key[1:]: row for row in results.read(table)}
    providers = {"parallel_ops", "eager", "compile", "clone"}
    assert {key[-1] for key in rows} == providers
    # four providers in three directions and two dtypes, three providers of overhead
    assert len(rows) == len(providers) * 3 * 2 + 3
    full = rows["full", "64x2x32", "float32", "parallel_ops"]
    assert full.bytes == 4 * (5 * 64 * 2 * 32 + 3 * 32)
    assert full.ms_p25 <= full.ms_median <= full.ms_p75
    assert full.gb_per_s == pytest.approx(full.bytes / full.ms_median / 1e6, rel=1e-3)
    clone = rows["full", "64x2x32", "float32", "clone"]
    assert clone.bytes == pytest.approx(full.bytes, abs=8)
    assert clone.percent_of_clone == 100
    assert full.percent_of_clone == pytest.approx(100 * full.gb_per_s / clone.gb_per_s, rel=1e-3)
    assert full.peak_mib > 0
    assert rows["overhead", "2x2x8", "float32", "eager"].overhead_us > 0
    assert "geometric mean" in out
    assert "farthest from clone" in out


def test_a_provider_that_fails_is_named_and_the_rest_measured(tmp_path, capsys):
    def broken(x, bias):
        raise RuntimeError("no such kernel\nlong trace")

    done, _ = tiny_run(tmp_path, eager=broken)
    assert not done
    assert "bias_gelu: eager left out: RuntimeError: no such kernel\n" in capsys.readouterr().err
    (table,) = tmp_path.glob("*.csv")
    assert {row.provider for row in results.read(table)} == {"parallel_ops", "clone"}


def test_speedup_is_a_ratio_of_medians():
    (group,) = report.groups([row(ms_median=6.0), row(provider="parallel_ops", ms_median=2.0)])
    assert report.speedup(group, "eager") == 3.0
    assert report.speedup(group, "compile") is None


def test_input_sets_differ_in_address_and_not_in_value():
    build = functools.partial(BIAS_GELU.build, (8, 2, 16), torch.float32, CPU)
    case = measure.Case("bias_gelu", (8, 2, 16), torch.float32, "full", build, {"eager": BIAS_GELU.eager}, 1)
    sets = measure._input_sets(case, Settings(CPU, (torch.float32,), input_bytes=10_000))
    (x, bias), grad = sets[0]
    assert len(sets) == 10_000 // (2 * x.nbytes + bias.nbytes)
    assert len({inputs[0].data_ptr() for inputs, _ in sets}) == len(sets)
    assert all(torch.equal(inputs[0], x) and inputs[0].requires_grad and torch.equal(g, grad) for inputs, g in sets)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bias_gleu"], "error: unknown op 'bias_gleu'; choose from"),
        (["--device", "tpu"], "error: unknown device 'tpu'; choose from auto, cpu, cuda"),
        (["--dtype", "int8"], "error: unknown dtype 'int8'; choose from float32, bfloat16, float16"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_2(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_a_command_has_its_own_options(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks", name, "--fast"])
    if name == "drop_in":
        pytest.importorskip("megatron.core")
    module = importlib.import_module(f"benchmarks.{cli.COMMANDS[name][0]}")
    # A number has a least value, so that 0 processes are an error and no trace.
    for option, hint in typing.get_type_hints(module.main, include_extras=True).items():
        number = re.search(r"\b(int|float)\b", str(getattr(hint, "__origin__", "")))
        assert not number or hint.__metadata__[0].min is not None, option
    capsys.readouterr()  # what libraries say as they are imported, as torch's CUDA builds do without a GPU
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    err = capsys.readouterr().err
    assert err.startswith("error: No such option: --fast") and err.count("\n") == 1


def test_rows_in_git_have_the_columns_that_are_written():
    for path in (Path(cli.__file__).parent / "results").glob("*.csv"):
        kinds = {
            "overlap": overlap.Row, "ring_attention": ring_attention.Row, "precision": precision.PrecisionRow,
            "gpu_proofs": prove.Proven,
        }  # fmt: skip
        kind = kinds.get(path.stem.rpartition("-")[2], results.Row)
        assert path.read_text().partition("\n")[0].split(",") == results.columns(kind)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_missing_gpu_gives_one_line_and_exit_2():
    result = CliRunner().invoke(app, ["--device", "cuda"])
    assert result.exit_code == 2
    assert result.stderr == "error: no CUDA device is there; use --device cpu\n"


@pytest.mark.parametrize(
    ("module", "arguments", "measuring"),
    [
        (cli, ["bias_gelu"], "run"),
        (overlap, [], "_rows"),
        (ring_attention, [], "_rows"),
        (precision, [], "losses"),
        (host_time, ["nothing"], "measure"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_before_measuring(module, arguments, measuring, tmp_path, monkeypatch):
    monkeypatch.setattr(module, measuring, None)
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "results"
    result = CliRunner().invoke(module.app, [*arguments, "--device", "cpu", "--output", str(output)])
    assert result.exit_code == 2
    assert result.stderr == f"error: --output: {output} cannot be written: Not a directory\n"


def test_list_names_the_ops():
    result = CliRunner().invoke(app, ["--list"])
    assert result.exit_code == 0
    assert result.stdout.split() == list(OPS)
