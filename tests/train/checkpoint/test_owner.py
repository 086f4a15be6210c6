"""A folder of checkpoints has one owner, and what is deleted there is what a run has written."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parallel_ops.train import CheckpointError, Trainer
from parallel_ops.train.checkpoint import owner as owners
from parallel_ops.train.checkpoint import resume
from parallel_ops.train.checkpoint.checkpoints import Checkpoints, steps_in
from parallel_ops.train.checkpoint.owner import FILE, Owner
from parallel_ops.train.checkpoint.removal import remove
from support.ranks.distributed import ranks
from support.runs import trainer as runs


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def owned(folder, **changes):
    """The file of a run, with changes."""
    owner = Owner(folder)
    content = json.loads((folder / FILE).read_text())
    owner.close()
    (folder / FILE).write_text(json.dumps(content | changes))


def process_that_ends():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_has_one_owner_until_it_closes(tmp_path):
    first = Checkpoints(tmp_path, group=None)
    with pytest.raises(CheckpointError, match=rf"in use by another run, process {os.getpid()} on .* since 20"):
        Checkpoints(tmp_path, group=None)
    assert sum(thread.name == "parallel_ops-owner" for thread in threading.enumerate()) == 1
    first.close()
    first.close()
    assert names(tmp_path) == []
    second = Checkpoints(tmp_path, group=None)
    del second  # as after an error that nobody has caught
    Checkpoints(tmp_path, group=None).close()
    assert not any(thread.name == "parallel_ops-owner" for thread in threading.enumerate())


GONE = {
    "its process has ended": lambda: {"process": process_that_ends()},
    "another process has its id": lambda: {"started": "1"},
}


@pytest.mark.parametrize("gone", GONE)
def test_a_run_of_this_machine_that_is_gone_is_taken_over_at_once(tmp_path, gone):
    owned(tmp_path, token="other", **GONE[gone]())
    (tmp_path / ".step-00000003.part").mkdir()
    (tmp_path / ".step-00000003.part" / "__0_0.distcp").write_bytes(b"half")
    start = time.monotonic()
    store = Checkpoints(tmp_path, group=None)
    assert time.monotonic() - start < 5 and names(tmp_path) == [FILE]
    store.close()


def test_a_zombie_is_gone(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 60
    while owners._status(process.pid)[:1] != ["Z"] and time.monotonic() < deadline:
        time.sleep(0.01)
    owned(tmp_path, token="other", process=process.pid, started=owners._started(process.pid))
    Owner(tmp_path).close()
    process.wait()


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_a_run_that_cannot_be_seen_is_stale_if_it_gives_no_sign(tmp_path, monkeypatch, capsys, content):
    """On another host, or with a file that is damaged or not yet written."""
    monkeypatch.setattr(owners, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.05)
    owned(tmp_path, token="other", machine="elsewhere", host="node7", process=5)
    if content is not None:
        (tmp_path / FILE).write_text(content)
    path, stop = tmp_path / FILE, threading.Event()

    def beat():
        while not stop.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="in use by another run, process"):
            Owner(tmp_path)
    finally:
        stop.set()
        thread.join()
    Owner(tmp_path).close()  # waits
    assert "is in use by process" in capsys.readouterr().err
    path.write_text("old")
    os.utime(path, (0, 0))
    start = time.monotonic()
    Owner(tmp_path).close()  # the file server's clock says that it is old
    assert time.monotonic() - start < 0.4 and capsys.readouterr().err == ""


@pytest.fixture
def often_interrupted():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_of_several_runs_one_takes_over(tmp_path, often_interrupted):
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        owned(folder, token="other", process=2**22 + 1)

        def take(_, folder=folder):
            try:
                return Owner(folder)
            except CheckpointError:
                return None

        with ThreadPoolExecutor(8) as pool:
            found = [owner for owner in pool.map(take, range(8)) if owner is not None]
        assert len(found) == 1
        found[0].check()
        found[0].close()
        assert names(folder) == []


def test_a_run_that_is_late_takes_nothing_over(tmp_path, monkeypatch):
    """Between its look at a stale file and what it does next, others take over, and end."""
    runs_, found = owners._runs, []

    def look(path, owner):
        running = runs_(path, owner)
        if not found:
            found.append(None)
            found[0] = Owner(tmp_path)
        return running

    owned(tmp_path, token="other", process=2**22 + 1)
    monkeypatch.setattr(owners, "_runs", look)
    with pytest.raises(CheckpointError, match="in use by another run"):
        Owner(tmp_path)
    found[0].check()
    found[0].close()
    assert names(tmp_path) == []


def test_a_run_that_died_while_it_took_over_is_taken_over(tmp_path, monkeypatch):
    owned(tmp_path, token="other", process=2**22 + 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Owner(tmp_path)
    claim = tmp_path / names(tmp_path)[1]
    with pytest.raises(CheckpointError, match=rf"in use by another run, process {os.getpid()}"):
        Owner(tmp_path)
    claim.write_text(json.dumps(json.loads(claim.read_text()) | {"process": 2**22 + 1}))
    second = Owner(tmp_path)
    second.check()
    second.close()
    assert names(tmp_path) == []


def test_an_owner_that_was_taken_over_saves_nothing_more(data, tmp_path):
    settings = runs.settings_of(data, checkpoint={"dir": str(tmp_path)})
    trainer = Trainer(settings)
    trainer.step()
    store = resume.checkpointer(trainer)
    (tmp_path / FILE).unlink()
    resume.save(trainer, store)  # the file is made again, as nobody else has
    store.wait()
    trainer.step()
    (tmp_path / FILE).unlink()
    owned(tmp_path, token="other", host="node7")
    resume.save(trainer, store)
    with pytest.raises(CheckpointError, match=r"was taken over by another run, process .* on node7"):
        store.wait()
    store.close()
    assert json.loads((tmp_path / FILE).read_text())["token"] == "other" and set(steps_in(tmp_path)) == {1}


def test_a_folder_in_use_is_refused_on_every_rank(data, tmp_path):
    with_owner = Owner(tmp_path)
    settings = runs.settings_of(data, parallel={"dp": 2, "global_batch": 4}, checkpoint={"dir": str(tmp_path)})
    for outcome in ranks(2).outcomes(runs.train, settings):
        assert outcome.type == "CheckpointError" and f"process {os.getpid()} on" in outcome.message
    with_owner.close()
    assert ranks(2).run(runs.train, settings)[0].step == 5 and names(tmp_path) == ["step-00000005"]


def test_a_deletion_follows_no_link_and_keeps_what_no_run_wrote(data, tmp_path, capsys):
    folder, elsewhere = tmp_path / "saved", tmp_path / "elsewhere"
    checkpoint = {"dir": str(folder), "interval": 1, "keep": 9}
    Trainer(runs.settings_of(data, checkpoint=checkpoint)).train()
    elsewhere.mkdir()
    (folder / "step-00000001").rename(elsewhere / "step-00000001")
    (folder / "step-00000001").symlink_to(elsewhere / "step-00000001")
    (folder / "step-00000002" / "__0_0.distcp").rename(elsewhere / "data")
    (folder / "step-00000002" / "__0_0.distcp").symlink_to(elsewhere / "data")
    (folder / "step-00000003" / "notes.txt").write_text("the good one")
    (folder / ".step-00000009.part").symlink_to(elsewhere)
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    trainer = Trainer(runs.settings_of(data, checkpoint=checkpoint | {"keep": 1}, run={"steps": 6}))
    trainer.resume()
    trainer.train()
    assert {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before
    kept = ["abandoned-step-00000002", "abandoned-step-00000003", "step-00000001", "step-00000006"]
    assert names(folder) == [".step-00000009.part", *kept]
    assert names(folder / kept[0]) == ["__0_0.distcp"] and names(folder / kept[1]) == ["notes.txt"]
    said = capsys.readouterr().err
    assert f"warning: {folder / kept[1]} is left of a checkpoint that is deleted" in said and "(notes.txt)" in said


def test_a_deletion_that_fails_is_a_warning(data, tmp_path, monkeypatch, capsys):
    unlink = Path.unlink

    def refuse(self, **options):
        if self.suffix == ".distcp":
            raise PermissionError(13, "Permission denied", str(self))
        unlink(self, **options)

    checkpoint = {"dir": str(tmp_path), "interval": 1, "keep": 1}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        result = Trainer(runs.settings_of(data, checkpoint=checkpoint)).train()
    assert result.step == 5 and set(steps_in(tmp_path)) == {5}
    assert f"warning: {tmp_path}/step-00000001 could not be deleted: Permission denied" in capsys.readouterr().err
    Checkpoints(tmp_path, group=None).close()  # the next run tidies up
    assert names(tmp_path) == ["step-00000005"]


def test_a_checkpoint_of_the_same_step_is_replaced(data, tmp_path):
    trainer = Trainer(runs.settings_of(data, checkpoint={"dir": str(tmp_path)}))
    trainer.step()
    for _ in range(2):
        trainer.save()
    assert names(tmp_path) == ["step-00000001"]
    remove(tmp_path / "nothing")
