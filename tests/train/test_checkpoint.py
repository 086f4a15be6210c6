"""A training that was stopped goes on as if it had not been."""

import dataclasses
import json
import shutil

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from parallel_ops.models import TransformerConfig
from parallel_ops.train import TrainConfig, Trainer, checkpoint
from support import training
from support.distributed import ranks

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from parallel_ops.train import cli

MODEL = TransformerConfig(
    vocab_size=256, seq_length=32, layers=1, hidden=32, heads=4, activation="swiglu", positions="rotary", dropout=0.1
)
TINY = ["--layers", "1", "--hidden", "32", "--heads", "2", "--seq-length", "32", "--batch", "2", "--device", "cpu"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


def test_losses_go_on_at_any_number_of_ranks(text, tmp_path):
    """Dropout, the place in the text and the learning rate too."""
    two = TrainConfig(model=MODEL, text=text, steps=6, batch=2, lr=1e-2, tp=2, sequence_parallel=True)
    four = dataclasses.replace(two, tp=4, seed=5)  # the seed is that of the beginning
    path = tmp_path / "saved"
    want = ranks(2).run(training.train_on, two, None, path, 3)[0]
    for losses in ranks(2).run(training.train_on, two, path, None):
        assert losses == want[3:]
    for losses in ranks(4).run(training.train_on, four, path, None):
        assert losses == pytest.approx(want[3:], rel=1e-5)


def test_one_process_goes_on_from_two_and_two_from_one(text, tmp_path):
    model = dataclasses.replace(MODEL, dropout=0.0)
    two = TrainConfig(model=model, text=text, steps=6, batch=2, lr=1e-2, tp=2)
    one = dataclasses.replace(two, tp=1)
    want = ranks(2).run(training.train_on, two, None, tmp_path / "two", 3)[0]
    assert training.train_on(0, one, tmp_path / "two", tmp_path / "one", 5) == pytest.approx(want[3:], rel=1e-5)
    for losses in ranks(2).run(training.train_on, two, tmp_path / "one", None):
        assert losses == pytest.approx(want[5:], rel=1e-5)


def command(*arguments):
    return CliRunner().invoke(cli.app, [*TINY, "--runs", "fused", *map(str, arguments)])


def losses_of(path):
    return json.loads(path.read_text())["fused"]["losses"]


def test_the_command_saves_and_goes_on(text, tmp_path):
    folder, first, second = tmp_path / "runs" / "a", tmp_path / "1.json", tmp_path / "2.json"
    common = ["--steps", "5", "--text", text, "--dropout", "0.1", "--output", tmp_path / "p.png"]
    done = command(*common, "--save", folder, "--every", "2", "--json", first)
    assert done.exit_code == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000004", "step-00000005"]
    for late in ("step-00000004", "step-00000005"):
        shutil.rmtree(folder / late)
    (folder / ".step-00000004.part" / "fused").mkdir(parents=True)  # as a killed training leaves it
    done = command(*common, "--save", folder, "--resume", folder, "--json", second)
    assert (done.exit_code, done.stderr) == (0, ""), done.stderr
    assert losses_of(second) == losses_of(first)[2:]
    assert json.loads(second.read_text())["first_step"] == 3
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000005"]


def test_a_checkpoint_that_was_not_completed_is_not_there(text, tmp_path, monkeypatch):
    config = TrainConfig(model=MODEL, text=text, steps=4, every=1, save=tmp_path / "a")
    trainer = Trainer(config)

    def save(step):
        checkpoint.save(trainer, checkpoint.part(config, step) / "fused")
        checkpoint.complete(config, step, ["fused"])

    def stop(*_, **__):
        raise OSError(28, "No space left on device")

    save(1)
    # Before torch describes what it has written, and after that.
    for place, name in ((FileSystemWriter, "finish"), (checkpoint, "complete")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, stop)
            with pytest.raises((RuntimeError, OSError), match="No space left on device"):
                save(2)
        assert checkpoint.part(config, 2).is_dir()
        assert checkpoint.newest(config.save).name == "step-00000001"
        checkpoint.clear(config)
        assert [path.name for path in config.save.iterdir()] == ["step-00000001"]
    save(2)
    save(10)
    assert checkpoint.newest(config.save).name == "step-00000010"


def test_a_run_that_was_not_saved_goes_on_from_the_last_one_that_was(tmp_path):
    config = TrainConfig(model=MODEL, save=tmp_path)
    checkpoint.part(config, 3).mkdir()
    checkpoint.complete(config, 3, ["plain", "fused", "tp2"])
    path = checkpoint.newest(tmp_path)
    assert [checkpoint.source(path, name).name for name in ("plain", "tp2", "tp4")] == ["plain", "tp2", "tp2"]
    assert checkpoint.first_step(dataclasses.replace(config, resume=path)) == 3


def test_what_cannot_be_written_or_read_is_said(text, tmp_path):
    trainer = Trainer(TrainConfig(model=MODEL, text=text))
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"cannot save to .*file/a: rank 0: .*Not a directory"):
        checkpoint.save(trainer, tmp_path / "file" / "a")
    with pytest.raises(RuntimeError, match=r"cannot load .*nothing: rank 0: .*No such file"):
        checkpoint.load(trainer, tmp_path / "nothing")


class TestCommandErrors:
    @pytest.fixture(autouse=True)
    def folders(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        model = TransformerConfig(vocab_size=256, seq_length=32, layers=1, hidden=32, heads=2, positions="rotary")
        for name, changed in {"same": model, "wide": dataclasses.replace(model, hidden=64)}.items():
            config = TrainConfig(model=changed, save=tmp_path / name)
            checkpoint.part(config, 7).mkdir(parents=True)
            checkpoint.complete(config, 7, ["fused"])
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").touch()
        for name, content in {"torn": "{", "other": "[]", "no-runs": '{"step": 7, "runs": [], "model": {}}'}.items():
            (tmp_path / name / "step-00000007").mkdir(parents=True)
            (tmp_path / name / "step-00000007" / "run.json").write_text(content)
        (tmp_path / "bare" / "step-00000007").mkdir(parents=True)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--resume", "missing"], "missing does not exist"),
            (["--resume", "file"], "file: Not a directory"),
            (["--resume", "empty"], "empty has no checkpoint in it"),
            (["--resume", "bare"], "bare/step-00000007/run.json: No such file"),
            (["--resume", "torn"], "torn/step-00000007/run.json is not of a checkpoint"),
            (["--resume", "other"], "other/step-00000007/run.json is not of a checkpoint"),
            (["--resume", "no-runs"], "no-runs/step-00000007/run.json is not of a checkpoint"),
            (["--resume", "wide"], "wide/step-00000007 is of a model with hidden 64, not 32"),
            (["--resume", "same", "--steps", "7"], "same/step-00000007 has 7 steps behind it, of 7 in all"),
            (["--save", "same"], "same has a checkpoint of step 7 already"),
            (["--save", "file"], "file: File exists"),
            (["--every", "3"], "every must be 0, or a number of steps beside save, got 3"),
            (["--save", "empty", "--every", "-1"], "every must be 0, or a number of steps beside save, got -1"),
        ],
    )
    def test_a_wrong_folder_is_one_line_and_exit_code_2(self, arguments, message):
        result = command(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: ") and message in result.stderr
        assert result.stderr.count("\n") == 1
