"""Lines, files and pictures of a run."""

import contextlib
import importlib.util
import json
import os
import pty
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from parallel_ops.layers.lora import is_adapter
from parallel_ops.train import Trainer
from parallel_ops.train.checkpoint.inspection import inspect
from parallel_ops.train.launch import cli
from support.ranks.distributed import ranks
from support.runs import trainer as runs

BATCH = 8


def test_what_a_run_leaves(data, tmp_path, capsys):
    """Lines, JSONL, picture; checkpoints that are kept. A resumed run goes on in all of them."""
    sections = {
        "checkpoint": {"dir": str(tmp_path / "saved"), "interval": 2, "keep": 2},
        "logging": {"interval": 2, "jsonl": str(tmp_path / "logs" / "m.jsonl"), "plot": str(tmp_path / "p.png")},
    }
    trainer = Trainer(runs.settings_of(data, **sections))
    result = trainer.train()
    assert (result.step, result.stopped, result.checkpoint) == (5, None, tmp_path / "saved" / "step-00000005")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-00000004", "step-00000005"]
    said = capsys.readouterr().out
    start, _, rest = said.partition("step 2/5")
    assert said.count("step 2/5") == said.count("step 4/5") == said.count("step 5/5") == 1
    lines = rest.splitlines()
    assert "tokens/s" in lines[0] and "left" in lines[0] and "GiB" in lines[0] and lines[1].startswith("step 4/5")
    # What the run is, and what it reached.
    logs = f"{tmp_path}/logs/m.jsonl (a line a step), {tmp_path}/p.png (plot)"
    parameters = sum(p.numel() for p in trainer.model.parameters())
    for line in (
        "plan         global_batch=8,dtype=fp32,fused_loss=true",
        "ranks        1; CPU, 1 thread each",
        f"model        {parameters:,} parameters: 2 layers, hidden 32",
        "step         8 x 16 = 128 tokens: 8 micro-batches of 1",
        "run          steps 1 to 5: 640 tokens, 0.107 epochs",
        f"data         6,000 tokens in {trainer.samples.stream.documents} documents: {data} (6,000)",
        "             374 sequences of 16 an epoch, shuffled",
        f"checkpoints  {tmp_path}/saved, every 2 steps and at the end; 2 are kept",
        f"logs         {logs}",
    ):
        assert f"{line}\n" in start
    done, checkpoint, last = lines[3:]
    assert re.fullmatch(rf"done         5 of 5 steps; 640 tokens in 0:0.*tokens/s; last loss {result.loss:.4f}", done)
    assert (checkpoint, last) == (f"checkpoint   {tmp_path}/saved/step-00000005", f"logs         {logs}")
    first = (tmp_path / "logs" / "m.jsonl").read_text()
    records = [json.loads(line) for line in first.splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    names = {"step", "loss", "grad_norm", "tokens", "seconds", "lr", "tokens_per_second_per_gpu"}
    assert set(records[0]) == names
    assert records[0]["tokens"] == BATCH * 16 and records[-1]["loss"] == result.loss < records[0]["loss"]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "logs" / "m.jsonl").write_text(first + '{"step": 6, "lo')  # as a run that was killed leaves it

    again = Trainer(runs.settings_of(data, **sections))
    again.resume(tmp_path / "saved" / "step-00000004")
    again.train()
    said = capsys.readouterr().out
    assert "steps 5 to 5: 128 tokens, 0.0214 epochs, from sample 32 on" in said
    assert "done         5 of 5 steps, 4 of them before; 128 tokens in" in said
    seen = [json.loads(line) for line in (tmp_path / "logs" / "m.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in seen] == [record["loss"] for record in records]
    assert "abandoned-step-00000005" in {path.name for path in (tmp_path / "saved").iterdir()}


@pytest.mark.parametrize(("kind", "more"), [
    ("experts", {}),  # a selection bias is a buffer
    ("gpt-oss", {}),  # sinks and biases, which the planner does not count
    ("llama", {"lora": {"rank": 2}}),
])  # fmt: skip
def test_one_number_of_parameters(data, tmp_path, capsys, kind, more):
    """A run on one process, a pipeline, a dry run and its checkpoint count the same."""
    sections = {"model": runs.MODELS[kind], "checkpoint": {"dir": str(tmp_path)}, **more}
    trainer = Trainer(runs.settings_of(data, **sections, run={"steps": 1}, optimizer={"warmup": 0}))
    line = f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters: 2 layers, hidden 32\n"
    pipeline = runs.settings_of(data, **more, model=runs.MODELS[kind], parallel={"pp": 2}, run={"steps": 1},
                                optimizer={"warmup": 0})  # fmt: skip
    trainer.train()
    cli.dry_run(trainer.settings, None, strict=False)
    assert capsys.readouterr().out.count(line) == 2
    assert line in ranks(2).run(runs.printed, pipeline)[0][0]
    base = sum(p.numel() for name, p in trainer.model.named_parameters() if not is_adapter(name))
    assert inspect(tmp_path)["parameters"] == base


def test_a_terminal_has_a_bar_and_is_left_clean(data, tmp_path, monkeypatch):
    """Also after an error, and where a process is killed: the cursor is never hidden, the bar is one line."""

    def shown(act):
        ours, theirs = pty.openpty()

        def read():
            found = b""
            with contextlib.suppress(OSError):  # once all is read, and the other end is closed
                while piece := os.read(ours, 1 << 16):
                    found += piece
            os.close(ours)
            return found.decode()

        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(read)
            with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", terminal)
                patch.setenv("TERM", "xterm")
                patch.setenv("COLUMNS", "100")
                act()
            assert "\x1b[?25l" not in found.result()
            return found.result()

    found = shown(lambda: Trainer(runs.settings_of(data)).train())
    steps = re.findall(r"step (\d)/5  loss \d\.\d{4}  [\d,]+ tokens/s  0:00:\d\d left", found)
    assert steps[-1] == "5" and "━" in found and not re.search(r"\nstep \d/", found)
    # The bar is erased, line and all, before what the run reached.
    assert re.search(r"\x1b\[1A\x1b\[2Kdone         5 of 5 steps", found)

    def fail():
        trainer = Trainer(runs.settings_of(data))
        monkeypatch.setattr(trainer, "step", mock.Mock(side_effect=OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            trainer.train()

    assert shown(fail).endswith("\x1b[1A\x1b[2K")


def test_files_that_are_not_read_are_named_at_the_start(data, tmp_path, capsys):
    shutil.copy(data, tmp_path / "tokens.bin")
    (tmp_path / "words.txt").write_text("words")
    Trainer(runs.settings_of(tmp_path)).train()
    said = capsys.readouterr().err
    assert f"warning: data: not read: {tmp_path}/words.txt (of a folder .bin and .npy files are read)" in said
    assert 'name its file in data.paths, with data.dtype = "uint8"' in said


def test_a_board_is_written_or_its_package_asked_for(data, tmp_path):
    trainer = Trainer(runs.settings_of(data, logging={"tensorboard": str(tmp_path)}))
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(ImportError, match="needs tensorboard; run: pip install tensorboard"):
            trainer.train()
        return
    trainer.train()
    (file,) = tmp_path.iterdir()
    assert all(name in file.read_bytes() for name in (b"loss", b"grad_norm", b"tokens_per_second", b"lr"))


def test_a_log_may_have_any_name(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("parallel_ops.train.launch.cli.dry_run", lambda found, *_, **__: print(found.logging.jsonl))
    (tmp_path / "run.toml").write_text(runs.RUN)
    for name in ("it's.jsonl", 'a "b".jsonl', "ü\\n.jsonl"):
        assert runs.parallel_ops("train", "run.toml", "--dry-run", "--json", name) == (0, f"{name}\n")
