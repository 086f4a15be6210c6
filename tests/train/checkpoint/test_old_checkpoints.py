"""Checkpoints of an earlier version, whose keys and classes had other names, are read as ever."""

import json
import tarfile
from pathlib import Path

import pytest

from parallel_ops.train.checkpoint.export import export
from parallel_ops.train.checkpoint.inspection import inspect
from support.runs import trainer as runs

STORED = Path(__file__).parent / "checkpoints.tar.xz"
MODEL = {
    "vocab_size": runs.VOCABULARY, "seq_length": 8, "num_layers": 1, "hidden_size": 8, "num_heads": 2,
    "ffn_hidden_size": 16, "activation": "swiglu", "norm": "rms_norm", "bias": False, "positions": "rotary",
    "tied_embeddings": True, "overlap": "off",
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "shared_experts": 1, "score": "sigmoid", "selection_bias": True,
    "balance_rate": 0.01, "aux_loss": 0.05,
}  # fmt: skip
# Loss, gradient norm and learning rate of the steps that the version which wrote them took next.
NEXT_STEPS = {
    "adamw": (
        MODEL,
        [(3.3420143127441406, 0.6383647322654724, 0.0055), (3.325563669204712, 0.5822221040725708, 0.001)],
    ),
    "muon": (
        MODEL | {"experts": EXPERTS},
        [(3.344755172729492, 0.6622177362442017, 0.0055), (3.3312392234802246, 0.5917103290557861, 0.001)],
    ),
}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    with tarfile.open(STORED) as file:
        file.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    runs.data_file(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", NEXT_STEPS)
def test_a_run_goes_on_from_it(stored, kind):
    model, wanted = NEXT_STEPS[kind]
    trainer = runs.trainer_of(
        runs.settings_of(
            Path("tokens.bin"), model=model, optimizer={"kind": kind, "schedule": "wsd", "decay": 2},
            evaluation={"share": 0.1, "sequences": 4},
        )
    )  # fmt: skip
    trainer.resume(stored / kind)
    assert (trainer.global_step, trainer.samples_seen) == (3, 24)
    steps = [trainer.step() for _ in wanted]
    trainer.close()
    assert [(step.loss, step.grad_norm, step.lr) for step in steps] == [pytest.approx(row, rel=1e-5) for row in wanted]


@pytest.mark.parametrize("kind", NEXT_STEPS)
def test_commands_read_it(stored, kind):
    found = inspect(stored / kind, verify=True)
    assert (found["step"], found["best"]) == (3, str(stored / kind / "step-00000003"))
    assert found["plan"] == "cp_kind=all_to_all,global_batch=8,dtype=fp32,fused_loss=true"
    assert found["settings"]["parallel"]["cp_kind"] == "all_to_all"
    assert found["settings"]["model"]["grad_reduce"] == "backend" and "reduction" not in found["settings"]["model"]
    if kind == "adamw":
        assert export(stored / kind, stored / "folder")["step"] == 3
        assert json.loads((stored / "folder" / "config.json").read_text())["hidden_size"] == 8
