"""What a run logs: files, Weights & Biases, the plot, the profiler's trace."""

import dataclasses
import errno
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from parallel_ops.train import Trainer, planner_bridge
from parallel_ops.train.report import metrics, outputs, throughput
from parallel_ops.train.report.metrics import Metrics, continued, save_plot
from parallel_ops.train.results import Step
from support.ranks.distributed import ranks
from support.runs import trainer as runs


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_throughput_of_each_gpu(data, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "peak_share", lambda trainer: 1e-6)
    runs.train(0, runs.settings_of(data, logging={"jsonl": str(tmp_path / "log.jsonl")}))
    for line in lines(tmp_path / "log.jsonl"):
        rate = line["tokens"] / line["seconds"]
        assert line["tokens_per_second_per_gpu"] == rate and line["mfu"] == pytest.approx(rate * 1e-6)


def test_no_mfu_without_a_known_gpu(data, tmp_path):
    settings = runs.settings_of(data, logging={"jsonl": str(tmp_path / "log.jsonl")}, run={"steps": 1, "device": "cpu"},
                                optimizer={"warmup": 0})  # fmt: skip
    runs.train(0, settings)
    assert "mfu" not in lines(tmp_path / "log.jsonl")[0]
    assert throughput.peak_share(runs.trainer_of(settings)) == 0


@pytest.mark.parametrize(("name", "gib", "known"), [
    ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
    ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5, None),  # a seventh of the figures
    ("NVIDIA GB10", 119.7, None),
])  # fmt: skip
def test_gpus_whose_figures_are_known(monkeypatch, name, gib, known):
    here = SimpleNamespace(name=name, total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)
    assert planner_bridge.gpu_here() == known


def test_profiled_steps_are_the_same_steps(data, tmp_path):
    plain, traced = tmp_path / "plain.jsonl", tmp_path / "traced.jsonl"
    runs.train(0, runs.settings_of(data, logging={"jsonl": str(plain)}))
    runs.train(0, runs.settings_of(data, logging={"jsonl": str(traced), "profile": str(tmp_path / "profile")}))
    assert [line["loss"] for line in lines(plain)] == [line["loss"] for line in lines(traced)]
    events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert any(name.startswith("parallel_ops::") for name in names)
    assert sum(name.startswith("Optimizer.step") for name in names) == 3  # steps 2 to 4 of 5
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["trace.json"]  # no GPU, no memory snapshot


def test_a_run_that_ends_before_the_last_profiled_step(data, tmp_path):
    settings = runs.settings_of(
        data, logging={"profile": str(tmp_path)}, run={"steps": 1, "device": "cpu"}, optimizer={"warmup": 0}
    )
    runs.train(0, settings)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


class Wandb:
    """A stand-in of the package and of its run."""

    id, __spec__ = "made", object()

    def __init__(self):
        self.started, self.rows = [], []

    def init(self, **given):
        self.started.append(given)
        return self

    def log(self, values, step):
        self.rows.append({"step": step, **values})

    def finish(self):
        raise ConnectionError("the network is gone")


@pytest.fixture
def wandb(monkeypatch):
    made = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


class Board(Wandb):
    """A stand-in of ``torch.utils.tensorboard`` and of its writer."""

    def SummaryWriter(self, folder, purge_step):
        return self.init(folder=folder, purge_step=purge_step)

    def add_scalar(self, name, value, step):
        self.log({name: value}, step)

    close = Wandb.finish


def test_tensorboard_and_weights_and_biases_get_every_step(data, tmp_path, wandb, monkeypatch):
    """Their errors do not end a run."""
    board, evaluation = Board(), {"share": 0.1, "interval": 2, "sequences": 4}
    monkeypatch.setitem(sys.modules, "tensorboard", board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    logging = {"wandb": "mine", "tensorboard": str(tmp_path), "jsonl": str(tmp_path / "log")}
    runs.train(0, runs.settings_of(data, logging=logging, evaluation=evaluation))
    assert board.started == [{"folder": str(tmp_path), "purge_step": 1}]
    values = [{"step": row["step"], name: value} for row in wandb.rows for name, value in row.items() if name != "step"]
    assert board.rows == values
    assert wandb.rows == [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    ((first,), rows) = wandb.started, wandb.rows
    assert first["project"] == "mine" and first["config"]["optimizer"]["lr"] == 1e-2
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and all("loss" in row and "lr" in row for row in rows)
    assert ["evaluation_loss" in row for row in rows] == [False, True, False, True, True]


def test_a_resumed_run_is_the_same_run_at_weights_and_biases(data, tmp_path, wandb, monkeypatch):
    """But not one that starts from a checkpoint of another folder."""
    monkeypatch.setattr(wandb, "log", wandb.finish)
    sections = {"logging": {"wandb": "mine"}, "checkpoint": {"dir": str(tmp_path / "one")}}
    runs.train(0, runs.settings_of(data, **sections, run={"steps": 2}))
    runs.train(0, runs.settings_of(data, **sections), tmp_path / "one")
    sections["checkpoint"] = {"dir": str(tmp_path / "two")}
    runs.train(0, runs.settings_of(data, **sections, run={"steps": 6}), tmp_path / "one")
    again = {"id": "made", "resume": "allow"}
    assert [{key: run[key] for key in again if key in run} for run in wandb.started] == [{}, again, {}]


def lines_of(*steps, **more):
    return "".join(
        json.dumps({"step": n, "loss": 1.0, "grad_norm": None, "tokens": 8, "seconds": 0.5, "lr": 0.1, **more}) + "\n"
        for n in steps
    )


STRANGE = '# by hand\n\n[1, 2]\n{"note": "a"}\n{"step": "one"}\n{"step": 1.5}\n{"step": 2}\nnull\n\xff\n'


@pytest.mark.parametrize("torn", [b'{"step": 5, "lo', b"# no end of line"])
def test_what_else_is_in_a_log_is_left_alone(tmp_path, torn):
    path, target = tmp_path / "m.jsonl", tmp_path / "elsewhere" / "m.jsonl"
    target.parent.mkdir()
    content = STRANGE.encode("latin1") + lines_of(1, 2).encode()
    target.write_bytes(content + lines_of(3, 4).encode() + torn)
    path.symlink_to(target)
    records = continued(path, 2)
    assert [record["step"] for record in records] == [1, 2] and path.is_symlink()
    cut = f"{torn.decode()}\n"
    abandoned = cut if torn.startswith(b'{"step": ') else ""
    assert target.read_bytes() == content + (b"" if abandoned else cut.encode())
    assert (tmp_path / "m.abandoned.jsonl").read_text() == lines_of(3, 4) + abandoned
    before = target.read_bytes()
    assert continued(path, 2) == records and target.read_bytes() == before
    save_plot(records, tmp_path / "plot.svg")
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "elsewhere", "m.abandoned.jsonl", "m.jsonl", "m.jsonl", "plot.svg",
    ]  # fmt: skip


def test_a_log_of_an_earlier_run_is_kept(data, tmp_path, capsys):
    path, texts = tmp_path / "m.jsonl", []
    for number in range(3):
        runs.train(0, runs.settings_of(data, run={"steps": 2}, logging={"jsonl": str(path)}))
        texts.append(path.read_text())
        said = capsys.readouterr().err
        assert said == (
            f"note: {path} was of an earlier run, and is {tmp_path}/m.{number}.jsonl now\n" if number else ""
        )
    assert [(tmp_path / name).read_text() for name in ("m.1.jsonl", "m.2.jsonl", "m.jsonl")] == texts
    assert continued(tmp_path / "none.jsonl", 0) == continued(tmp_path / "none.jsonl", 5) == []


def test_lines_that_could_not_be_written_come_later(data, tmp_path, capsys):
    step = Step(number=1, loss=1.0, grad_norm=1.0, tokens=8, seconds=1.0, lr=0.1, skipped=False, stop=None)
    trainer = Trainer(runs.settings_of(data, logging={"jsonl": str(tmp_path / "m.jsonl")}))
    with Metrics(trainer) as logs:
        file = logs._jsonl
        logs._jsonl = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        for number in (1, 2):
            logs.add(dataclasses.replace(step, number=number))
        logs._jsonl.close()
        logs._jsonl = file
        logs.add(dataclasses.replace(step, number=3))
        assert logs.records == []  # without a plot nothing grows with the steps
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert capsys.readouterr().err == f"warning: {tmp_path}/m.jsonl: No space left on device; the run goes on\n"


def test_traces_that_cannot_be_written_do_not_end_a_run(data, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    assert runs.train(0, runs.settings_of(data, logging={"profile": str(tmp_path)})).step == 5
    assert f"logging.profile {tmp_path}: No space left on device; the run goes on" in capsys.readouterr().err
    (tmp_path / "pipeline.svg").mkdir()
    out, err = ranks(2).run(runs.printed, runs.settings_of(data, parallel={"pp": 2}, logging={"trace": str(tmp_path)}))[
        0
    ]
    assert f"logging.trace {tmp_path}: Is a directory; the run goes on" in err and "5 of 5 steps" in out


def test_a_package_that_is_missing_is_named(data, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="mine needs wandb; run: pip install wandb"):
        outputs.check(runs.settings_of(data, logging={"wandb": "mine"}))
    traced = {"logging": {"trace": "drawn"}, "parallel": {"pp": 2, "global_batch": 2}}
    with pytest.raises(ImportError, match="drawn needs matplotlib"):
        outputs.check(runs.settings_of(data, **traced))


def test_a_profile_that_cannot_be_written_is_named(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"logging\.profile: .*file is a file, where a folder is needed"):
        outputs.check(runs.settings_of(data, logging={"profile": str(tmp_path / "file")}))


def test_the_plot_has_all_curves(tmp_path):
    pytest.importorskip("matplotlib")
    records = [
        {"step": n, "loss": 3.0 / n, "grad_norm": None if n == 2 else 1.0, "tokens": 10, "seconds": 0.1, "lr": 1e-3 * n}
        for n in range(1, 5)
    ]
    records[3]["evaluation_loss"] = 1.0
    save_plot(records, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 10_000
