"""A folder of checkpoints has one owner, and what is deleted there is what a run has written."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parallel_ops.train import CheckpointError, Trainer
from parallel_ops.train.checkpoint import resume
from parallel_ops.train.checkpoint.checkpoints import Checkpoints, steps_in
from parallel_ops.train.checkpoint.owner import FILE, Owner
from parallel_ops.train.checkpoint.removal import remove
from support.further import thinned
from support.ranks.distributed import ranks
from support.runs import trainer as runs
from support.runs.faults import names


def test_a_folder_has_one_owner_until_it_closes(tmp_path):
    first = Checkpoints(tmp_path, group=None)
    with pytest.raises(CheckpointError, match=rf"in use by another run, process {os.getpid()} on .* since 20"):
        Checkpoints(tmp_path, group=None)
    first.close()
    first.close()
    assert names(tmp_path) == []
    second = Checkpoints(tmp_path, group=None)
    del second  # as after an error that nobody has caught
    Checkpoints(tmp_path, group=None).close()


OWN = "import sys, time, pathlib; from parallel_ops.train.checkpoint.owner import Owner; {}; time.sleep(100)"


@pytest.mark.parametrize("number", thinned([signal.SIGKILL, signal.SIGSTOP]))
def test_the_folder_of_a_process_that_is_gone_is_taken_over_at_once(tmp_path, number):
    """That of one that is stopped is not."""
    code = OWN.format(f"own = Owner(pathlib.Path({str(tmp_path)!r})); print('owns', flush=True)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "owns\n"
        (tmp_path / ".step-00000003.part").mkdir()
        (tmp_path / ".step-00000003.part" / "__0_0.distcp").write_bytes(b"half")
        process.send_signal(number)
        if number == signal.SIGSTOP:
            with pytest.raises(CheckpointError, match=f"in use by another run, process {process.pid} on"):
                Checkpoints(tmp_path, group=None)
        process.kill()
    store = Checkpoints(tmp_path, group=None)
    assert names(tmp_path) == [FILE]
    store.close()


@pytest.fixture
def often_interrupted():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_of_several_runs_one_takes_over(tmp_path, often_interrupted):
    """With what a run left that is gone, and while another one ends."""
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        (folder / FILE).write_text(["{", "", "[]"][attempt % 3])
        before = Owner(folder) if attempt % 2 else None

        def take(number, folder=folder, before=before):
            if number == 0 and before is not None:
                before.close()
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


def test_a_file_system_without_locks_has_a_warning(tmp_path, monkeypatch, capsys):
    """And the first of two runs finds out at its next save."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = Owner(tmp_path), Owner(tmp_path)
    assert f"warning: {tmp_path} is on a file system without locks" in capsys.readouterr().err
    second.check()
    with pytest.raises(CheckpointError, match=rf"was taken over by another run, process {os.getpid()} on"):
        first.check()
    first.close()
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
    (tmp_path / FILE).write_text(json.dumps({"token": "other", "host": "node7"}))
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


def test_a_save_by_hand_sets_later_checkpoints_aside(data, tmp_path):
    """Those of an earlier run, which would be kept in the place of it."""
    checkpoint = {"dir": str(tmp_path), "interval": 1, "keep": 2}
    Trainer(runs.settings_of(data, checkpoint=checkpoint)).train()
    trainer = Trainer(runs.settings_of(data, checkpoint=checkpoint))
    with pytest.raises(CheckpointError, match="has a checkpoint of step 5 already"):
        trainer.save()
    trainer.step()
    trainer.save()
    assert names(tmp_path) == ["abandoned-step-00000004", "abandoned-step-00000005", "step-00000001"]
