"""Starting a run: plans for other ranks, what is refused before anything starts, Ctrl-C and going on."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from torch.distributed import Backend, HashStore
from torch.distributed.distributed_c10d import BackendConfig
from typer.testing import CliRunner

from parallel_ops._internal.command_line import INTERRUPTED
from parallel_ops._internal.distributed.groups import device_types_of
from parallel_ops.comm.errors import Board
from parallel_ops.planner.cli.app import app
from parallel_ops.train import CheckpointError
from parallel_ops.train.config_file import read_settings, settings_of
from parallel_ops.train.data import vocabulary
from parallel_ops.train.data.tokens import TokenStream
from parallel_ops.train.launch import cli as command
from parallel_ops.train.launch import local
from parallel_ops.train.launch import start as launch
from parallel_ops.train.launch.options import Start
from parallel_ops.train.launch.start import fitted
from parallel_ops.train.launch.worker import backend_of
from parallel_ops.train.planner_bridge import Device, memory_problem, replan
from parallel_ops.train.report import description
from support.ranks.distributed import ranks
from support.runs import trainer as runs

ROOM = Device("a lot of memory", 2.0**50, True)
MODEL = {"vocab_size": 64, "seq_length": 32, "num_layers": 1, "hidden_size": 32, "num_heads": 4}


def settings(folder, plan, **more):
    return settings_of({"model": MODEL, "data": {"paths": [str(folder / "tokens.bin")]}, "parallel": plan, **more})


@pytest.fixture
def folder(tmp_path):
    np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    return tmp_path


@pytest.mark.parametrize(
    ("plan", "ranks", "wanted"),
    [
        ("dp=4,zero=3,global_batch=8", 2, "dp=2,zero=3,global_batch=8"),
        ("dp=2,tp=2,zero=1,global_batch=8", 2, "tp=2,zero=1,global_batch=8"),
        ("dp=2,tp=2,zero=1,global_batch=8", 8, "dp=4,dp_replicate=2,tp=2,zero=1,global_batch=8"),
        ("tp=4,sequence_parallel=true,global_batch=8", 1, "global_batch=8"),
        ("tp=2,cp=2,global_batch=8", 2, "tp=2,global_batch=8"),
        ("dp=4,dp_replicate=2,zero=2,global_batch=8", 2, "dp=2,zero=2,global_batch=8"),
        ("pp=2,dp=2,schedule=zb-v,global_batch=8", 2, "pp=2,schedule=zb-v,global_batch=8"),
        ("pp=2,dp=2,schedule=zb-v,global_batch=8", 1, "global_batch=8"),
        ("pp=2,dp=2,schedule=zb-v,global_batch=8", 8, "pp=2,dp=4,dp_replicate=2,schedule=zb-v,global_batch=8"),
    ],
)
def test_a_plan_for_other_ranks(folder, plan, ranks, wanted):
    model = MODEL | {"num_layers": 4}
    found = replan(settings(folder, plan, model=model), ranks, ROOM).plan
    assert found == settings(folder, wanted, model=model).plan and found.gpus == ranks


def test_a_plan_that_no_ranks_can_run_says_why(folder):
    with pytest.raises(ValueError, match=r"no plan like dp=4.* runs on 3 ranks: .*global_batch must be a multiple"):
        replan(settings(folder, "dp=4,global_batch=8"), 3, ROOM)
    with pytest.raises(ValueError, match="too much by the planner's count"):
        replan(settings(folder, "dp=4,global_batch=8"), 2, Device("a thimble", 1e6, True))
    # Whatever is tried has the same one.
    with pytest.raises(ValueError, match="no plan like") as raised:
        replan(settings(folder, "dp=2,tp=2,global_batch=8"), 3, ROOM)
    assert str(raised.value).count("global_batch must be a multiple of dp * micro_batch (3), got 8") == 1
    assert "runs on 3 ranks: dp=3, cp=1, tp=1, zero=0/1/2/3: global_batch must be" in str(raised.value)


def test_ranks_that_do_not_fit_are_an_error_unless_the_plan_may_change(folder):
    given = settings(folder, "dp=2,global_batch=8")
    with pytest.raises(ValueError, match=r"dp=2 \* cp=1 \* tp=1 is 2 ranks, but there are 4; .*--elastic"):
        fitted(given, 4, Start())
    assert fitted(given, 4, Start(elastic=True)).plan.dp == 4
    assert fitted(given, 2, Start()) is given


def test_a_plan_beyond_the_memory_is_a_warning_or_an_error(folder, monkeypatch, capsys):
    given = settings(folder, "dp=2,zero=1,global_batch=8")
    assert memory_problem(given, ROOM) is None
    monkeypatch.setattr(Device, "here", classmethod(lambda *_: Device("a thimble", 1e6, True)))
    command.dry_run(given, None, strict=False)
    said = capsys.readouterr()
    assert "2: dp_shard 2, neighbours" in said.out and "tokens/s" in said.out
    assert "warning: each rank needs" in said.err and "a thimble has 0.00" in said.err
    with pytest.raises(ValueError, match=r"each rank needs .* \(--strict\)"):
        command.dry_run(given, None, strict=True)


def test_a_dry_run_counts_the_memory_of_what_the_run_is_on(folder, capsys):
    """On CPUs there is no driver, and the logits are those of its own loss; of a named cluster the GPUs count."""
    given = settings(folder, "dp=2,global_batch=8", run={"device": "cpu"}, precision={"dtype": "fp32"})

    def held(cluster):
        command.dry_run(given, cluster, strict=False)
        said = capsys.readouterr().out
        return said, {
            name: int(size.replace(",", "")) for name, size in re.findall(r"^(\w+) +([\d,]+) +\S+ [MG]iB$", said, re.M)
        }

    said, cpu = held(None)
    assert "runtime" not in cpu and cpu["logits"] == 4 * 32 * 64 + 4 * 32 * 64 and cpu["all"] < 2**20
    assert "in the last dimension; CPU\n" in said and "on h100x2 (no GPU is here; --cluster names others)" in said
    said, gpu = held("a100-80")
    assert gpu["runtime"] > 2**30 and gpu["logits"] > 2**28 and "CPU" not in said and "no GPU is here" not in said


def test_a_dry_run_says_what_data_the_run_has(folder, capsys):
    evaluation = {"paths": [str(folder / "tokens.bin")], "interval": 10}
    given = settings(folder, "dp=2,global_batch=8", run={"steps": 10}, evaluation=evaluation)
    command.dry_run(given, None, strict=False)
    said = capsys.readouterr().out
    assert re.search(r"^data         4,000 tokens in 1 document:", said, re.M)
    assert "124 sequences of 32 an epoch, shuffled" in said
    assert "its tokens are in the vocabulary" in said and "MFU" not in said and re.search(r"^all .* MiB$", said, re.M)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": {"paths": ["gone.bin"]}}, OSError, "gone.bin"),
        ({"data": {"paths": ["empty"]}}, (ValueError, OSError), "empty"),
        ({"model": MODEL | {"vocab_size": 63}}, ValueError, "has token 63, outside the model's vocabulary of 63"),
        ({"model": MODEL | {"seq_length": 5000}}, ValueError, "4,?000"),
        ({"evaluation": {"paths": ["gone.bin"], "interval": 5}}, (ValueError, OSError), "gone.bin"),
        ({"evaluation": {"paths": ["wide.bin"], "interval": 5}}, ValueError, "wide.bin has token 64, outside"),
        ({"data": {"sources": [{"paths": ["gone.bin"], "weight": 1.0}]}}, OSError, "gone.bin"),
    ],
    ids=str,
)
def test_a_dry_run_refuses_data_that_a_run_would(folder, monkeypatch, capsys, change, error, message):
    """After it has printed the plan, and with the message of the run."""
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir()
    np.full(100, 64, np.uint16).tofile("wide.bin")
    given = settings(folder, "dp=2,global_batch=8")
    data = {"model": MODEL, "data": {"paths": ["tokens.bin"]}, "parallel": given.plan.text, "run": {"steps": 2}}
    given = settings_of(data | change)
    with pytest.raises(error, match=message):
        command.dry_run(given, None, strict=False)
    assert "tokens/s" in capsys.readouterr().out
    with pytest.raises(error, match=message):
        launch.check(given, Start())


def test_a_description_fits_a_terminal():
    """Contents are broken at spaces and commas, under themselves."""
    plan = "dp=2,tp=2,zero=3,micro_batch=4,global_batch=16,dtype=fp32,fused_loss=true"
    lines = [("plan", plan), ("", "more"), ("files", "a " * 60 + "x" * 100)]
    narrow = description.text(lines, 80).splitlines()
    assert all(len(row) <= 80 for row in narrow if "xx" not in row)
    assert narrow[0].startswith("plan         dp=2,tp=2") and narrow[1].startswith(" " * 13 + "fused_loss")
    assert "".join(row[13:] for row in narrow[:2]) == plan
    assert narrow[-1] == " " * 13 + "x" * 100
    assert description.text(lines).splitlines() == [f"{label:12} {content}" for label, content in lines]


@pytest.mark.parametrize("key", ["checkpoint.dir", "logging.tensorboard", "logging.jsonl", "logging.plot"])
def test_what_cannot_be_written_is_named_with_its_key(folder, monkeypatch, key):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # as if tensorboard were there
    section, name = key.split(".")
    is_folder = key in ("checkpoint.dir", "logging.tensorboard")

    def check(path):
        launch.check(settings(folder, "dp=2,global_batch=8", **{section: {name: str(path)}}), Start())

    (folder / "file").touch()
    (folder / "folder.png").mkdir()
    with pytest.raises(OSError, match=rf"{key}: .*file is a file, where a folder is needed"):
        check(folder / "file" / "in" / "it.png")
    if is_folder:
        with pytest.raises(OSError, match=rf"{key}: .*file is a file, where a folder is needed"):
            check(folder / "file")
    else:
        with pytest.raises(OSError, match=rf"{key}: .*folder.png is a folder; name a file in it"):
            check(folder / "folder.png")
    with pytest.raises(OSError, match=rf"{key}: /proc/\S+ cannot be written: "):
        check("/proc/nothing/can/be/made/here.png")
    before = sorted(folder.rglob("*"))
    check(folder / "new" / "path.png")
    made = set(folder.rglob("*")) - set(before)
    assert made == {folder / "new", folder / "new" / "path.png"} if is_folder else {folder / "new"}


def test_of_much_data_a_part_is_read_before_the_start(tmp_path):
    """Blocks at even distances; none of files whose type has no token outside."""
    np.zeros(16 << 20, np.int8).tofile(tmp_path / "a.bin")
    small = TokenStream([tmp_path / "a.bin"], dtype="uint8")
    assert vocabulary.check(small, 256, most=1) == 1
    signed = TokenStream([tmp_path / "a.bin"], dtype="int8")
    assert vocabulary.check(signed, 256) == 1
    assert vocabulary.check(signed, 256, most=4 << 20) == 0.25
    wrong = np.memmap(tmp_path / "a.bin", np.int8, "r+")
    wrong[5 << 20] = -1
    assert vocabulary.check(signed, 256, most=4 << 20) == 0.25  # between two blocks that are read
    with pytest.raises(ValueError, match="has token -1, outside"):
        vocabulary.check(signed, 256, most=16 << 20)


def test_what_is_looked_at_before_anything_starts(folder):
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    given = settings(folder, "dp=2,global_batch=8", checkpoint={"dir": str(folder / "checkpoints")})
    with pytest.raises(CheckpointError, match="has a checkpoint of step 3 already: resume from it with --resume"):
        launch.check(given, Start())
    with pytest.raises(CheckpointError, match=r"run\.json"):
        launch.check(given, Start(resume=True))
    with pytest.raises(ValueError, match=r"--resume needs checkpoint\.dir"):
        launch.check(settings(folder, "dp=2,global_batch=8"), Start(resume=True))
    (folder / "tokens.bin").write_bytes(b"ab")
    with pytest.raises(ValueError, match="1 tokens, but a sequence needs 33"):
        launch.check(settings(folder, "dp=2,global_batch=8"), Start())


@pytest.mark.parametrize(
    ("gpus", "only"),
    [
        (2, "zero=1"),
        (4, "tp=2,dp=2,zero=3,micro_batch=2"),
        (4, "dp=4,dp_replicate=2,zero=2"),
        (4, "pp=2,tp=2,schedule=zb-h1"),
    ],
)
def test_what_plan_writes_trains(folder, gpus, only):
    shape = {**MODEL, "num_layers": 2, "num_kv_heads": 2, "dropout": False, "bias": "none"}
    (folder / "small.json").write_text(json.dumps(shape))
    given = ["plan", "--model", folder / "small.json", "--cluster", f"h100x{gpus}", "--batch", "8", "--only", only]
    planned = CliRunner().invoke(app, [*map(str, given), "--output", str(folder / "run.toml"), "--top", "1"])
    assert planned.exit_code == 0, planned.output
    changes = [f"data.paths=['{folder / 'tokens.bin'}']", "checkpoint.dir=none", "checkpoint.interval=0", "run.steps=2"]
    found = read_settings(folder / "run.toml", [*changes, "run.device=cpu", "optimizer.warmup=0"])
    assert found.plan.gpus == gpus and all(part in found.plan.text for part in only.split(","))
    losses = ranks(gpus).run(runs.steps_of, found)
    assert all(step == other for step, other in zip(losses[0], losses[-1], strict=True)) and losses[0][0][0] < 5


def test_gradients_that_are_offloaded_from_gpus_are_summed_over_gloo():
    assert [backend_of(gpu, offload=on) for gpu, on in ((False, True), (True, False))] == ["gloo", "nccl"]
    both = backend_of(True, offload=True)
    assert device_types_of(str(BackendConfig(Backend(both)))) == ("cpu", "cuda")
    assert [device_types_of(f"cpu:gloo,cuda:{name}") for name in ("nccl2", "nccl-lazy")] == [("cpu", "cuda")] * 2


@pytest.mark.parametrize(("ignored", "stopped"), [(True, None), (False, "SIGHUP")])
def test_a_hangup_that_nohup_ignores_stops_no_run(monkeypatch, ignored, stopped):
    def hung_up(*_):
        assert signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # by processes too, which then save
        os.kill(os.getpid(), signal.SIGHUP)
        return lambda *_: {}

    monkeypatch.setattr(local, "elastic_launch", hung_up)
    monkeypatch.setattr(local, "_processes", set)  # those of other tests get no signal
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert local._Agent(None, ()).wait(Board(HashStore(), local._PARENT, 2), 1.0) == stopped
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.runs
def test_ctrl_c_saves_and_the_run_goes_on_with_fewer_processes(folder):
    """A whole run of the command: the one test here that starts processes."""
    (folder / "run.toml").write_text(runs.RUN)
    call = [sys.executable, "-m", "parallel_ops", "train", "run.toml"]
    options = {"cwd": folder, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(call, start_new_session=True, **options)
    said = []
    for line in run.stdout:
        said.append(line)
        if line.startswith("step 3/"):
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    assert run.wait() == INTERRUPTED, "".join(said)
    assert said[-1].startswith("stopped by SIGINT after step") and "Traceback" not in "".join(said)
    done = int(said[-1].split()[5].rstrip(";"))
    wrong = subprocess.run([*call, "--steps", "9"], **options, check=False)
    assert (wrong.returncode, wrong.stdout.count("\n")) == (2, 1) and "resume from it with --resume" in wrong.stdout
    more = subprocess.run([*call, "--resume", "--processes", "1", "--steps", str(done + 2)], **options, check=False)
    assert more.returncode == 0, more.stdout
    assert f"resumes from checkpoints/step-{done:08}" in more.stdout
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == done + 2
