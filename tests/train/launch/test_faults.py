"""What goes wrong in a run is said clearly, and costs at most the steps since the last checkpoint."""

import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore
from torch.distributed.checkpoint.filesystem import FileSystem

from parallel_ops.comm.errors import Board
from parallel_ops.train import CheckpointError, Trainer, loop
from parallel_ops.train.checkpoint import checkpoints
from parallel_ops.train.launch import local
from support.ranks.distributed import Raised, Ranks, ranks
from support.runs import faults
from support.runs import trainer as runs
from support.runs.faults import flip, names

TWO = {"dp": 2, "zero": 3, "global_batch": 4}


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """Checkpoints of two steps, of two ranks, and what came after them."""
    folder = tmp_path_factory.mktemp("saved")
    settings = runs.settings_of(data, parallel=TWO, checkpoint={"dir": str(folder), "interval": 2}, run={"steps": 4})
    ranks(2).run(runs.train, settings)
    return folder


def test_processes_that_have_ended_are_left_to_the_agent_to_reap():
    ended = multiprocessing.get_context("spawn").Process(target=int)
    ended.start()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    local._Leftover(Board(HashStore(), local._PARENT, 1), 1.0).kill_overdue()
    assert os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT).si_status == 0
    ended.join()


IGNORED = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="nohup has SIGHUP ignored")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=IGNORED)])
def test_a_signal_to_one_rank_saves_and_ends_all(data, tmp_path, number):
    settings = runs.settings_of(data, parallel=TWO, checkpoint={"dir": str(tmp_path)}, run={"steps": 50})
    handler = signal.getsignal(number)
    for result in ranks(2).run(faults.train_with_a_signal, settings, number, 3):
        assert (result.step, result.stopped) == (3, number.name)
        assert result.checkpoint == tmp_path / "step-00000003"
    assert signal.getsignal(number) == handler
    done = ranks(2).run(runs.train, runs.settings_of(data, parallel=TWO), tmp_path)
    assert [result.step for result in done] == [5, 5]


@pytest.mark.runs
@pytest.mark.parametrize("killed", [(1,), (0, 1)], ids=["one rank", "all ranks"])
def test_killed_in_the_middle_of_a_save(data, tmp_path, killed):
    """The second of two checkpoints; the first is whole, and the run resumes from it."""
    sections = {"parallel": TWO, "checkpoint": {"dir": str(tmp_path), "interval": 2}, "run": {"steps": 6}}
    group = Ranks(2)
    try:
        outcomes = group.outcomes(faults.train_killed, runs.settings_of(data, **sections), killed, 2)
    finally:
        group.close()
    assert all(isinstance(outcome, Raised) for outcome in outcomes)
    assert [outcome.type == "Killed" for outcome in outcomes] == [rank in killed for rank in range(2)]
    assert names(tmp_path)[-1] == "step-00000002"
    assert ranks(2).run(runs.train, runs.settings_of(data, **sections), tmp_path)[0].step == 6
    assert names(tmp_path) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk(data, tmp_path, asynchronous):
    checkpoint = {"dir": str(tmp_path), "interval": 1, "asynchronous": asynchronous}
    settings = runs.settings_of(data, parallel=TWO, checkpoint=checkpoint)
    for outcome in ranks(2).outcomes(faults.train_on_a_full_disk, settings, 3):
        assert outcome.type == "CheckpointError"
        # The save after step 3 fails, and again at once: beside the steps it is noticed after the next one.
        assert re.search(r"cannot write the checkpoint .*\.step-0000000[34]\.part: rank 0", outcome.message)
        assert f"the last complete one, {tmp_path}/step-00000002, stays valid" in outcome.message
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert ranks(2).run(runs.train, settings, tmp_path)[0].step == 5


@pytest.mark.parametrize(("failures", "asynchronous"), [(1, True), (2, False), (3, True), (3, False)])
def test_a_save_that_fails_is_tried_again_at_once_and_after_a_pause(data, tmp_path, asynchronous, failures):
    """On one rank of two; the run goes on if one of three saves succeeds. Also of the last step."""
    for failing, interval in ((1, 2), (1, 0)):
        folder = tmp_path / str(interval)
        checkpoint = {"dir": str(folder), "interval": interval, "asynchronous": asynchronous}
        settings = runs.settings_of(data, parallel=TWO, checkpoint=checkpoint)
        outcomes = ranks(2).outcomes(faults.train_where_saves_fail, settings, failing, failures)
        if failures == 3:
            assert [outcome.type for outcome in outcomes] == ["CheckpointError"] * 2
            assert "rank 1: [Errno 5] Input/output error (there is none before it)" in outcomes[0].message
            assert names(folder) == []
            continue
        assert [step for step, _ in outcomes] == [5, 5] and len(outcomes[0][1]) == failures
        assert "rank 1: [Errno 5] Input/output error" in outcomes[0][1][0]
        assert re.search(r"; saving step [2-5] now$", outcomes[0][1][0])
        assert names(folder)[-1] == "step-00000005"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata.tmp"])
def test_a_disk_without_space_is_called_that(data, tmp_path, monkeypatch, asynchronous, name):
    """All saves but the first write to a device that has no space, which torch reports as "unexpected pos"."""
    monkeypatch.setattr(loop, "_PAUSE_SECONDS", 0.1)
    create = FileSystem.create_stream

    def create_stream(self, path, mode):
        full = path.name == name and path.parent.name != ".step-00000001.part" and mode == "wb"
        return create(self, Path("/dev/full") if full else path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", create_stream)
    checkpoint = {"dir": str(tmp_path), "interval": 1, "asynchronous": asynchronous}
    with pytest.raises(CheckpointError) as raised:
        Trainer(runs.settings_of(data, checkpoint=checkpoint)).train()
    said = str(raised.value)
    assert re.search(rf"cannot write .* {tmp_path}/\.step-0000000[23]\.part: rank 0: No space left on device", said)
    assert f"the disk of {tmp_path} is full (" in said and "free some, or name another checkpoint.dir" in said
    assert said.endswith(f"(the last complete one, {tmp_path}/step-00000001, stays valid)")
    assert names(tmp_path) == ["step-00000001"]


def replace(path, old, new):
    content = path.read_text()
    assert content.count(old) == 1
    path.write_text(content.replace(old, new))


DAMAGES = {
    "a bit": (lambda path: flip(path / "__1_0.distcp"), r"__1_0\.distcp is damaged: its checksum is [0-9a-f]{8}, not"),
    "an end": (lambda path: os.truncate(path / "__0_0.distcp", 99), r"__0_0\.distcp is damaged: it has 99 bytes, of"),
    "a file": (lambda path: (path / "__0_0.distcp").unlink(), r"__0_0\.distcp: No such file"),
    "metadata": (lambda path: flip(path / ".metadata"), r"\.metadata is damaged"),
    "description": (lambda path: (path / "run.json").write_text("{"), r"run\.json is not of a checkpoint, or damaged"),
    "a digit of the description": (
        lambda path: replace(path / "run.json", '"samples_seen": 16', '"samples_seen": 17'),
        r"run\.json is not of a checkpoint, or damaged: .*its checksum is [0-9a-f]{8}, not [0-9a-f]{8}",
    ),
    "no description": (lambda path: (path / "run.json").unlink(), r"run\.json: No such file or directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_on_every_rank(data, saved, tmp_path, damage):
    act, message = DAMAGES[damage]
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    act(folder / "step-00000004")
    outcomes = ranks(2).outcomes(runs.steps_of, runs.settings_of(data, parallel=TWO), folder)
    assert {outcome.type for outcome in outcomes} == {"CheckpointError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    alone = Trainer(runs.settings_of(data))
    before = [p.detach().clone() for p in alone.model.parameters()]
    good = folder / "step-00000002"
    with pytest.raises(CheckpointError, match=message) as raised:
        alone.resume(folder)
    assert raised.value.other == good
    assert str(raised.value).endswith(f"; the newest other one that has all its files is {good}")
    assert all((p == q).all() for p, q in zip(alone.model.parameters(), before, strict=True))
    assert alone.resume(good) == good


def test_a_damaged_one_is_not_offered_in_the_place_of_another(data, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "saved")
    (folder / "step-00000004" / ".metadata").unlink()
    os.truncate(folder / "step-00000002" / "__1_0.distcp", 99)
    with pytest.raises(CheckpointError, match=r"\.metadata: No such file.*; .*saved has no other one that has all"):
        Trainer(runs.settings_of(data)).resume(folder)


def test_a_checkpoint_is_no_folder_of_checkpoints(data, saved, tmp_path):
    inside = shutil.copytree(saved / "step-00000002", tmp_path / "best")
    before = names(inside)
    settings = runs.settings_of(data, checkpoint={"dir": str(inside)})
    with pytest.raises(CheckpointError, match=rf"is a checkpoint itself; .* {tmp_path}, .* --resume {inside}"):
        Trainer(settings).train()
    assert names(inside) == before
    assert Trainer(settings).resume() == inside  # under any name


def test_what_is_no_checkpoint(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="has no checkpoint in it"):
            checkpoints.newest(folder)
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(CheckpointError, match=r"step-00000003/run\.json: No such file"):
        checkpoints.describe(checkpoints.newest(tmp_path))
    (tmp_path / "step-00000003" / "run.json").write_text(json.dumps({"step": 3, "files": {}}))
    with pytest.raises(CheckpointError, match="not of a checkpoint"):
        checkpoints.describe(checkpoints.newest(tmp_path))


def test_data_that_stop_being_readable(data, monkeypatch):
    trainer = Trainer(runs.settings_of(data))
    trainer.step()

    def fail(*_, **__):
        raise OSError(5, "Input/output error", str(data))

    monkeypatch.setattr(trainer.samples.stream, "document", fail)
    with pytest.raises(OSError, match=r"Input/output error: .*tokens\.bin"):
        trainer.train()
    assert trainer.global_step <= 2  # the step that had been read


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_under_the_metrics_is_named_and_does_not_end_the_run(data, tmp_path, capsys):
    sections = {"logging": {"jsonl": "/dev/full"}, "checkpoint": {"dir": str(tmp_path)}}
    result = Trainer(runs.settings_of(data, **sections)).train()
    assert result.checkpoint == tmp_path / "step-00000005"
    said = capsys.readouterr().err.splitlines()
    assert said == ["warning: /dev/full: No space left on device; the run goes on"]


@pytest.mark.parametrize("kind", ["a closed pipe", "a full disk", "a closed file", "nothing"])
def test_a_run_needs_no_reader_of_its_output(data, tmp_path, monkeypatch, kind):
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(os.open("/dev/full", os.O_WRONLY) if kind == "a full disk" else writer, "w")
    if kind == "a closed file":
        stream.close()
    with monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, None if kind == "nothing" else stream)
        trainer = Trainer(runs.settings_of(data, checkpoint={"dir": str(tmp_path)}, logging={"jsonl": "/dev/full"}))
        assert trainer.train().checkpoint == tmp_path / "step-00000005"
    if kind != "a full disk":
        stream.close()  # nothing is left that cannot be written


def test_many_trainers_leave_nothing_open(data, tmp_path):
    def count():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    settings = runs.settings_of(data, evaluation={"share": 0.2}, checkpoint={"dir": str(tmp_path)})
    gc.collect()  # of tests before
    before, kept = count(), []
    for _ in range(30):
        with Trainer(settings) as trainer:
            trainer.step()
        kept.append(trainer)
    assert all(now <= then for now, then in zip(count(), before, strict=True))
    assert kept[0].global_step == 1 and "layers.0.mlp.in.weight" not in kept[0].state_dict()
    for act in (kept[0].step, kept[0].save):
        with pytest.raises(AttributeError, match="the trainer is closed"):
            act()
    kept[0].close()
    trainer = Trainer(settings)
    trainer.loader.step(0)
    with pytest.raises(CheckpointError), trainer:
        trainer.resume(tmp_path / "nowhere")
    assert all(now <= then for now, then in zip(count(), before, strict=True))


def test_many_trainers_leave_no_group(data, tmp_path):
    settings = runs.settings_of(data, parallel=TWO, checkpoint={"dir": str(tmp_path), "interval": 2})
    for first, last, saved in ranks(2).run(faults.many_trainers, settings, 4):
        assert all(after <= before for before, after in zip(first, last, strict=True)), (first, last)
        assert saved == [f"step-{5:08}"] * 4
