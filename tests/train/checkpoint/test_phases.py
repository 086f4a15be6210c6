"""A new phase of training from a checkpoint: what is kept, what begins anew, and that it is said."""

import json

import pytest
import torch

from parallel_ops.train import CheckpointError, Trainer
from support.further import thinned
from support.ranks.distributed import ranks
from support.runs import trainer as runs
from support.runs.trainer import parallel_ops

LLAMA = runs.MODELS["llama"]


def first_phase(data, folder, **sections):
    settings = runs.settings_of(data, **{"model": LLAMA, **sections}, checkpoint={"dir": str(folder)})
    trainer = Trainer(settings)
    for _ in range(2):
        trainer.step()
    trainer.save()
    trainer.loader.close()
    return trainer


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_gradual_unfreezing(data, tmp_path):
    """Moments of what was trained are kept; what thaws begins with zeros; the data go on."""
    before = first_phase(data, tmp_path, model={**LLAMA, "freeze": ["tokens.*", "layers.0.*"]})
    trainer = Trainer(runs.settings_of(data, model={**LLAMA, "freeze": ["tokens.*"]}))
    said = trainer.begin_phase(tmp_path)
    assert "kept: 21 weights" in said and "kept: the position in the data, sample 16" in said
    thawed = [line for line in said if line.startswith("anew: the optimizer's state of layers.0.")]
    assert len(thawed) == 1 and "and 5 more" in thawed[0]
    assert said[-1] == "anew: steps and learning rate; 2 steps were taken before"
    assert (trainer.global_step, trainer.samples_seen) == (0, 16)
    for name, value in weights(before).items():
        assert torch.equal(value, weights(trainer)[name]), name
    moments = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    for name, parameter in moments.items():
        own = trainer.optimizer.state[parameter]["exp_avg"]
        assert bool(own.any()) != name.startswith("layers.0."), name
    with pytest.raises(
        CheckpointError, match=r"no state of the optimizer for layers\.0\..*; --resume PATH --new-phase"
    ):
        Trainer(runs.settings_of(data, model={**LLAMA, "freeze": ["tokens.*"]})).resume(tmp_path)
    trainer.step()
    trainer.loader.close()


@pytest.mark.parametrize(
    "change",
    [
        {"seq_length": 32},
        {"seq_length": 32, "rotary_base": 500_000.0},
        {"seq_length": 32, "rotary_scaling": {"kind": "linear", "factor": 2.0}},
        {"seq_length": 32, "rotary_scaling": {"kind": "dynamic", "factor": 2.0, "original_length": 16}},
        {"seq_length": 32, "rotary_scaling": {"kind": "yarn", "factor": 2.0, "original_length": 16}},
        {"seq_length": 8, "window": 5},
        {"vocab_size": 40},
    ],
)
def test_longer_sequences_and_other_rotary_positions(data, tmp_path, change):
    """The weights are those before; the first loss is that of the new model with them."""
    before = first_phase(data, tmp_path)
    settings = runs.settings_of(data, model={**LLAMA, **change})
    trainer = Trainer(settings)
    said = trainer.begin_phase(tmp_path)
    for name, value in change.items():
        if name != "rotary_scaling":
            assert f"changed: {name} {LLAMA.get(name, 10000.0 if name == 'rotary_base' else None)} -> {value}" in said
    for name, value in weights(before).items():
        assert torch.equal(value, weights(trainer)[name][: len(value)]), name
    if "seq_length" in change:
        assert trainer.samples_seen == 0 and any(line.startswith("anew: the data") for line in said)
    trainer.step()
    trainer.loader.close()


def test_learned_positions_keep_their_first_rows(data, tmp_path):
    before = first_phase(data, tmp_path, model=runs.MODELS["gpt"])
    for length in (24, 9):
        trainer = Trainer(runs.settings_of(data, model={**runs.MODELS["gpt"], "seq_length": length}))
        fresh = weights(trainer)["positions.weight"]
        assert "kept: the first rows of positions.weight" in trainer.begin_phase(tmp_path)
        old, new = weights(before)["positions.weight"], weights(trainer)["positions.weight"]
        assert torch.equal(new[:16], old[:length]) and torch.equal(new[16:], fresh[16:])


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_to_adapters_and_back(data, tmp_path, kind):
    """Adapters of what a run has trained, saved with it, resumed and exported; then all weights again, merged."""
    model = runs.MODELS[kind]
    full = first_phase(data, tmp_path / "full", model=model)
    lora = {"model": model, "lora": {"rank": 2}}
    tuned = Trainer(runs.settings_of(data, **lora, checkpoint={"dir": str(tmp_path / "lora")}))
    said = tuned.begin_phase(tmp_path / "full")
    assert any(line.startswith("anew: weights of layers.0.attention.") and ".lora." in line for line in said)
    assert all(torch.equal(value, weights(tuned)[name]) for name, value in weights(full).items())
    tuned.step()
    tuned.step()
    tuned.save()
    again = Trainer(runs.settings_of(data, **lora))
    again.resume(tmp_path / "lora")
    assert again.own_base and all(torch.equal(p, weights(again)[name]) for name, p in weights(tuned).items())
    with pytest.raises(ValueError, match="no folder has the base of these adapters: save a checkpoint, and export it"):
        again.save_pretrained(tmp_path / "hf")
    losses = [again.step().loss, tuned.step().loss]
    assert losses[0] == losses[1]

    whole = Trainer(runs.settings_of(data, model=model))
    assert any("added to the weights" in line for line in whole.begin_phase(tmp_path / "lora"))
    tokens = torch.arange(12)[:, None] % runs.VOCABULARY
    code, out = parallel_ops("export", str(tmp_path / "lora"), str(tmp_path / "hf"))
    assert code == 0, out
    same = Trainer(runs.settings_of(data, model={"dir": str(tmp_path / "hf")}))
    reference = Trainer(runs.settings_of(data, **lora))
    reference.resume(tmp_path / "lora")
    with torch.no_grad():
        want = reference.model.eval()(tokens)
        torch.testing.assert_close(whole.model.eval()(tokens), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(same.model.eval()(tokens), want, rtol=1e-5, atol=1e-5)
    # Other adapters: the old ones are merged first.
    other = Trainer(runs.settings_of(data, model=model, lora={"rank": 3, "targets": ["layers.1.*"]}))
    other.begin_phase(tmp_path / "lora")
    with torch.no_grad():
        torch.testing.assert_close(other.model.eval()(tokens), want, rtol=1e-5, atol=1e-5)
    for trainer in (tuned, again):
        trainer.loader.close()


PLANS = [
    {"tp": 2, "dp": 2, "zero": 2, "sequence_parallel": True}, {"dp": 4, "zero": 3},
    {"pp": 2, "tp": 2, "schedule": "zb-h1"}, {"cp": 2, "dp": 2},
]  # fmt: skip


@pytest.mark.parametrize("plan", thinned(PLANS), ids=str)
def test_a_phase_begins_on_any_plan(data, tmp_path, plan):
    """Longer sequences, a larger vocabulary, another base and merged adapters: as one process begins it."""
    first_phase(data, tmp_path / "full")
    change = {"model": {**LLAMA, "seq_length": 24, "rotary_base": 1e5, "vocab_size": 40}}
    batch = {"global_batch": 8, "micro_batch": 1}
    alone, want = runs.steps_of_phase(0, runs.settings_of(data, **change, parallel=batch), tmp_path / "full")
    for said, got in ranks(4).run(
        runs.steps_of_phase, runs.settings_of(data, **change, parallel=batch | plan), tmp_path / "full"
    ):
        assert said == alone
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)
    lora = runs.settings_of(
        data, model=LLAMA, lora={"rank": 2}, parallel=batch, checkpoint={"dir": str(tmp_path / "lora")}
    )
    runs.steps_of_phase(0, lora, tmp_path / "full")
    alone, want = runs.steps_of_phase(0, runs.settings_of(data, model=LLAMA, parallel=batch), tmp_path / "lora")
    for _, got in ranks(4).run(
        runs.steps_of_phase, runs.settings_of(data, model=LLAMA, parallel=batch | plan), tmp_path / "lora"
    ):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)


def test_another_model_is_no_phase(data, tmp_path):
    first_phase(data, tmp_path)
    for change, message in (
        ({"hidden_size": 64}, "is of a model with hidden_size 32, not 64; a new phase may change seq_length"),
        ({"activation": "gelu"}, "is of a model with activation 'swiglu', not 'gelu'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Trainer(runs.settings_of(data, model={**LLAMA, **change})).begin_phase(tmp_path)
    with pytest.raises(CheckpointError, match="seq_length 16, not 32; --resume PATH --new-phase"):
        Trainer(runs.settings_of(data, model={**LLAMA, "seq_length": 32})).resume(tmp_path)


def test_the_command(data, tmp_path, monkeypatch):
    """It needs a checkpoint and another folder, says what it keeps, and is resumed as any run is."""
    monkeypatch.chdir(tmp_path)
    text = runs.RUN.replace("dp = 2", "dp = 1").replace("zero = 3", "").replace("[run]", "[run]\ndevice = 'cpu'")
    text = text.replace("num_heads = 4", "num_heads = 4\npositions = 'rotary'")
    (tmp_path / "run.toml").write_text(text)
    runs.write_tokens(tmp_path / "tokens.bin", seed=0, count=4000)
    assert parallel_ops("train", "run.toml", "--set", "run.steps=2")[0] == 0
    phase = ["train", "run.toml", "--set", "model.seq_length=64", "--set", "run.steps=3", "--new-phase"]
    code, said = parallel_ops(*phase)
    assert code == 2 and "--new-phase needs --resume PATH" in said
    code, said = parallel_ops(*phase, "--resume", "checkpoints")
    assert code == 2 and "name another checkpoint.dir for the new phase" in said
    code, said = parallel_ops(*phase, "--resume", "checkpoints", "--set", "checkpoint.dir=second")
    assert code == 0, said
    assert "a new phase from checkpoints/step-00000002\nkept: " in said and "changed: seq_length 32 -> 64" in said
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps[-3:] == [1, 2, 3]
    again = ["train", "run.toml", "--set", "model.seq_length=64", "--set", "checkpoint.dir=second", "--resume"]
    code, said = parallel_ops(*again, "--set", "run.steps=4")
    assert code == 0 and "resumes from second/step-00000003" in said, said


def test_a_folder_with_other_rotary_positions(data, tmp_path):
    """``model.dir`` beside what changes no weight."""
    first_phase(data, tmp_path / "ck").save_pretrained(tmp_path / "hf")
    shape = {"seq_length": 32, "rotary_scaling": {"kind": "linear", "factor": 2.0}}
    trainer = Trainer(runs.settings_of(data, model={"dir": str(tmp_path / "hf"), **shape}))
    step = trainer.step()
    trainer.loader.close()
    assert trainer.settings.seq_length == 32 and step.tokens == 8 * 32
    trainer.save_pretrained(tmp_path / "longer")
    config = json.loads((tmp_path / "longer" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rope_scaling"]["rope_type"]) == (32, "linear")
    with pytest.raises(ValueError, match=r"at most 16; model\.seq_length sets more"):
        runs.settings_of(data, model={"dir": str(tmp_path / "hf")}, data={"seq_length": 32})
    with pytest.raises(ValueError, match="leave out hidden_size"):
        runs.settings_of(data, model={"dir": str(tmp_path / "hf"), "hidden_size": 8, "seq_length": 32})
