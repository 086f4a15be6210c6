"""``--resume`` on the command line: from where a run goes on, and what it prints and refuses."""

import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

from parallel_ops.train import Trainer
from parallel_ops.train.checkpoint import checkpoints
from parallel_ops.train.checkpoint.description import read_description, write_description
from parallel_ops.train.config_file import read_settings
from parallel_ops.train.launch import cli
from parallel_ops.train.launch.options import Start
from parallel_ops.train.launch.resuming import source_of
from support.runs import trainer as runs
from support.runs.faults import flip, names
from support.runs.trainer import parallel_ops

ONE = ["--set", "parallel=global_batch=4", "--set", "checkpoint.interval=2", "--set", "run.device=cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a run of four steps and its checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16).tofile(folder / "tokens.bin")
    (folder / "run.toml").write_text(runs.RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert parallel_ops("train", "run.toml", *ONE, "--steps", "4")[0] == 0
    return folder


@pytest.fixture
def here(run, tmp_path, monkeypatch):
    folder = shutil.copytree(run, tmp_path / "run")
    monkeypatch.chdir(folder)
    return folder


DAMAGES = {
    "data": (lambda path: flip(path / "__0_0.distcp"), 1, "is damaged: its checksum is"),
    "description": (lambda path: (path / "run.json").unlink(), 2, "run.json: No such file or directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_error_of_a_damaged_checkpoint_has_the_command_that_goes_on(here, damage):
    act, code, message = DAMAGES[damage]
    act(here / "checkpoints" / "step-00000004")
    call = ["train", "run.toml", *ONE, "--resume", "--steps", "6", "--set", "logging.plot=my curves.png"]
    failed, said = parallel_ops(*call)
    assert failed == code and message in said and "Traceback" not in said
    advice = said.partition("to resume from it: ")[2].strip()
    program, *arguments = shlex.split(advice)
    call.remove("--resume")
    assert (program, arguments) == ("parallel-ops", [*call, "--resume", "checkpoints/step-00000002"])
    done, said = parallel_ops(*arguments)
    assert done == 0 and "resumes from checkpoints/step-00000002" in said and "step 6/6" in said
    assert names(here / "checkpoints") == ["abandoned-step-00000004", "step-00000004", "step-00000006"]


@pytest.mark.parametrize(
    ("given", "path", "resumes"),
    [
        (["run.toml"], None, False),
        (["run.toml", "--resume"], None, True),
        (["--resume", "run.toml"], None, True),
        (["run.toml", "--resume", "--steps", "3"], None, True),
        (["run.toml", "--resume", "a/b", "--steps", "3"], "a/b", True),
        (["--resume", "a/b", "run.toml", "--steps", "3"], "a/b", True),
        (["--resume=a/b", "run.toml", "--steps", "3"], "a/b", True),
    ],
)
def test_a_path_may_follow(here, monkeypatch, given, path, resumes):
    starts = []
    monkeypatch.setattr(cli, "train", lambda settings, start, *, strict: starts.append(start) or 0)
    assert parallel_ops("train", *given)[0] == 0
    (start,) = starts
    assert (start.path and str(start.path), start.resume) == (path, resumes)
    steps = " --steps 3" if "3" in given else ""
    assert start.command == f"parallel-ops train run.toml{steps}"


def test_a_checkpoint_of_another_folder(here):
    call = ["train", "run.toml", *ONE, "--set", "checkpoint.dir=other", "--resume", "checkpoints", "--steps"]
    code, said = parallel_ops(*call, "6")
    assert code == 0 and "resumes from checkpoints/step-00000004" in said
    assert names(here / "other") == ["step-00000006"] and "step-00000004" in names(here / "checkpoints")
    code, said = parallel_ops(*call, "8")
    assert code == 2 and "other has a checkpoint of step 6" in said and "with --resume other, or name another" in said
    none = ["--set", "checkpoint.dir=none", "--set", "checkpoint.interval=0"]
    call = ["train", "run.toml", *ONE, *none, "--steps", "3"]
    code, said = parallel_ops(*call, "--resume", "checkpoints/step-00000002")
    assert code == 0 and "resumes from checkpoints/step-00000002" in said and "step 3/3" in said
    code, said = parallel_ops("train", "run.toml", *ONE, "--resume", "nowhere")
    assert code == 2 and "nowhere has no checkpoint in it" in said


def test_a_restart_goes_on_from_what_the_run_has_saved(here, monkeypatch):
    settings = read_settings("run.toml", ["parallel=global_batch=4"])
    start = Start(resume=True, path=here / "checkpoints" / "step-00000002")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    # The run before has one of more steps, which this run did not start from.
    assert source_of(settings, start) == start.path
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert parallel_ops("train", "run.toml", *ONE, "--resume", str(start.path), "--steps", "3")[0] == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert str(source_of(settings, start)) == "checkpoints/step-00000003"
    assert str(source_of(settings, Start(resume=True))) == "checkpoints/step-00000003"


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_checkpoint_is_no_folder_for_checkpoints(here, resume):
    one = here / "checkpoints" / "step-00000002"
    before = names(one)
    code, said = parallel_ops("train", "run.toml", *ONE, "--set", f"checkpoint.dir={one}", *resume)
    assert code == 2 and f"checkpoint.dir {one} is a checkpoint itself" in said and f"--resume {one}" in said
    assert names(one) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.seed=5", "(seed 0 -> 5)"),
        ("data.seq_length=16", "(seq_length 32 -> 16)"),
        ("data.dtype=uint8", "(tokens 4000 -> 8000)"),
    ],
)
def test_other_data_are_said_in_one_line(here, change, message):
    code, said = parallel_ops("train", "run.toml", *ONE, "--resume", "--steps", "5", "--set", change)
    (line,) = [line for line in said.splitlines() if line.startswith("note:")]
    assert code == 0 and f"checkpoints/step-00000004 is of other data {message}" in line
    assert line.endswith("keeps its step and weights, and takes samples of these data from the first one on")
    samples_seen = checkpoints.describe(here / "checkpoints" / "step-00000005").samples_seen
    assert samples_seen == 4  # of one step


@pytest.mark.parametrize("change", ["bytes", "order", "mask", "none"])
def test_the_same_numbers_of_tokens_are_not_the_same_data(tmp_path, monkeypatch, change):
    """Two files of a run: one gets another token, they change places, or other tokens of one count."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(1)
    for name in "ab":
        draw.integers(0, 64, 2000).astype(np.uint16).tofile(f"{name}.bin")
    np.tile(np.array([1, 1, 0], np.uint8), 700)[:2000].tofile("b.mask")
    Path("run.toml").write_text(runs.RUN)
    paths = ["--set", 'data.paths=["a.bin", "b.bin"]']
    assert parallel_ops("train", "run.toml", *ONE, *paths, "--steps", "2")[0] == 0
    if change == "bytes":
        tokens = np.fromfile("a.bin", np.uint16)
        tokens[1000] ^= 1
        tokens.tofile("a.bin")
    elif change == "order":
        paths = ["--set", 'data.paths=["b.bin", "a.bin"]']
    elif change == "mask":
        np.tile(np.array([1, 0, 1], np.uint8), 700)[:2000].tofile("b.mask")
    else:
        Path("c.bin").symlink_to("a.bin")  # by another name
        paths = ["--set", 'data.paths=["c.bin", "b.bin"]', "--set", "data.prompt_loss=true"]
    code, said = parallel_ops("train", "run.toml", *ONE, *paths, "--resume", "--steps", "3")
    assert code == 0, said
    notes = [line for line in said.splitlines() if line.startswith("note:")]
    want = {"mask": "(another mask of the loss)", "none": None}.get(change, "(other tokens, or another order of files)")
    assert bool(notes) == (want is not None) and (want is None or want in notes[0])
    samples_seen = checkpoints.describe(tmp_path / "checkpoints" / "step-00000003").samples_seen
    assert samples_seen == (12 if want is None else 4)


def test_a_checkpoint_from_before_there_were_digests(here):
    path = here / "checkpoints" / "step-00000004"
    description, sums = read_description(path)
    del description.data["digest"]
    write_description(path, description, sums)
    code, said = parallel_ops("train", "run.toml", *ONE, "--resume", "--steps", "5")
    assert code == 0 and "note:" not in said and "nothing is left" not in said
    assert checkpoints.describe(here / "checkpoints" / "step-00000005").samples_seen == 20


@pytest.mark.parametrize(("before", "after"), [("fp32", "fp16"), ("fp16", "bf16"), ("fp16", "fp16"), ("bf16", "fp16")])
def test_the_loss_scale_of_another_precision(here, before, after):
    def trainer(dtype, scale):
        return Trainer(read_settings("run.toml", [
            "parallel=global_batch=4", "run.device=cpu", "checkpoint.dir=scales", "checkpoint.interval=0",
            f"precision.dtype={dtype}", f"precision.initial_scale={scale}",
        ]))  # fmt: skip

    first = trainer(before, 512.0)
    first.step()
    first.save()
    second = trainer(after, 128.0)
    second.resume()
    assert second.scale.scale == (512.0 if before == after else 128.0 if after == "fp16" else 1.0)


@pytest.mark.parametrize("steps", [4, 3])
def test_a_run_with_nothing_left_to_do(here, steps):
    before = names(here / "checkpoints")
    code, said = parallel_ops("train", "run.toml", *ONE, "--resume", "--steps", str(steps))
    assert code == 0 and f"nothing is left to do: 4 steps are done, and run.steps is {steps}" in said
    assert "step 4/" not in said and names(here / "checkpoints") == before


def test_one_rank_of_a_process_group_without_a_backend_for_cpus(tmp_path, monkeypatch):
    """As torchrun's only rank on a GPU: the group is NCCL's, and what is saved beside the steps needs one of gloo."""
    monkeypatch.setattr(
        state_dict_saver, "_get_default_group", lambda: SimpleNamespace(_device_types=[torch.device("cuda")])
    )
    settings = runs.settings_of(runs.data_file(tmp_path), run={"steps": 2}, checkpoint={"dir": str(tmp_path / "saved")})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with runs.trainer_of(settings) as trainer:
            saved = trainer.train().checkpoint
            weights = [p.detach().clone() for p in trainer.model.parameters()]
        with runs.trainer_of(settings, saved) as trainer:
            assert trainer.global_step == 2
            assert all(torch.equal(a, b) for a, b in zip(weights, trainer.model.parameters(), strict=True))
    finally:
        dist.destroy_process_group()
