"""``Trainer``: any plan takes the steps that one process takes, and goes on where another stopped."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from parallel_ops.train import CheckpointError, NotFinite, Trainer
from parallel_ops.train.step.reductions import count_targets
from support.ranks.distributed import ranks
from support.runs import trainer as runs

BATCH = 8


def close(got, want):
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("processes", "plan"), [(2, {"cp": 2}), (4, {"cp": 4}), (4, {"tp": 4}), (4, {"cp": 2, "tp": 2})]
)
def test_dropout_is_the_same_at_any_number_of_ranks(data, processes, plan):
    sections = {"model": {**runs.MODELS["llama"], "dropout": 0.2, "attention_dropout": 0.1}, "run": {"steps": 2}}
    batches = {"global_batch": 4, "micro_batch": 2}
    want = runs.steps_of(0, runs.settings_of(data, parallel=batches, **sections))
    plan = {**batches, "zero": 2, "sequence_parallel": plan.get("tp", 1) > 1, **plan}
    for got in ranks(processes).run(runs.steps_of, runs.settings_of(data, parallel=plan, **sections)):
        close(got, want)


def with_dropout(data, dtype, **sections):
    return runs.settings_of(
        data, model={**runs.MODELS["gpt"], "dropout": 0.1}, precision={"dtype": dtype},
        parallel={"dp": 2, "zero": 2, "global_batch": BATCH, "micro_batch": 2}, **sections,
    )  # fmt: skip


@functools.cache
def whole_with_dropout(data, dtype):
    return ranks(2).run(runs.steps_of, with_dropout(data, dtype))[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_run_goes_on_bit_by_bit(data, tmp_path, dtype):
    """With dropout, on the ranks that it was on."""
    settings, whole = with_dropout(data, dtype), whole_with_dropout(data, dtype)
    saving = with_dropout(data, dtype, checkpoint={"dir": str(tmp_path)})
    assert ranks(2).run(runs.steps_of, saving, None, 3)[0] == whole[:3]
    assert ranks(2).run(runs.steps_of, settings, tmp_path)[0] == whole[3:]
    if dtype == "fp32":
        assert len(set(whole)) == 5
        return
    exact = [loss for loss, _ in whole_with_dropout(data, "fp32")]
    assert [loss for loss, _ in whole] == pytest.approx(exact, rel=2e-3)


def test_a_save_is_of_the_moment_it_began(data, tmp_path):
    settings = runs.settings_of(data, checkpoint={"dir": str(tmp_path / "one")})
    assert runs.saved_while_it_changes(0, settings)
    two = runs.settings_of(
        data, parallel={"dp": 2, "zero": 3, "global_batch": BATCH}, checkpoint={"dir": str(tmp_path / "two")}
    )
    assert ranks(2).run(runs.saved_while_it_changes, two) == [True, True]


def test_a_loss_that_is_not_finite_stops_or_is_left_out(data, tmp_path, capsys):
    class Poisoned(nn.Module):
        """A model whose loss is NaN in its second step."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Embedding(runs.VOCABULARY, 8), nn.Linear(8, runs.VOCABULARY)])
            self.calls = 0

        def forward(self, tokens, targets):
            self.calls += 1
            logits = self.layers[1](self.layers[0](tokens))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return loss * math.nan if self.calls == 2 else loss

    options = {"parallel": {"global_batch": 4, "micro_batch": 4}}
    trainer = Trainer(runs.settings_of(data, **options), model=Poisoned())
    with pytest.raises(NotFinite, match=r"step 2, samples 4 to 7: loss nan, gradient norm nan; no parameter"):
        trainer.train()
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    said = capsys.readouterr().out
    assert "not finite, the run stops: samples 4 to 7" in said and "skipped" not in said

    logs = tmp_path / "m.jsonl"
    skipping = runs.settings_of(data, **options, run={"on_nan": "skip"}, logging={"jsonl": str(logs)})
    trainer = Trainer(skipping, model=Poisoned())
    before = None
    take = trainer.step

    def step(**kwargs):
        nonlocal before
        before = [p.detach().clone() for p in trainer.model.parameters()]
        taken = take(**kwargs)
        same = all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before, strict=True))
        assert same == (taken.number == 2)
        return taken

    trainer.step = step
    assert trainer.train().step == 5
    assert "not finite, skipped: samples 4 to 7" in capsys.readouterr().out
    records = [json.loads(line) for line in logs.read_text().splitlines()]
    assert [record["loss"] is None for record in records] == [False, True, False, False, False]
    assert all(state["step"] == 4 for state in trainer.optimizer.state.values())


def test_a_micro_batch_without_a_target_counts_for_nothing(tmp_path):
    """Most documents are one token, after which comes another document: few samples have a target at all."""
    draw = np.random.default_rng(0)
    tokens = np.zeros(3000, "uint16")
    for start in draw.choice(2900, 60, replace=False):
        tokens[start : start + 12] = draw.integers(1, runs.VOCABULARY, 12)
    tokens.tofile(tmp_path / "some.bin")
    sections = {"data": {"document_mask": True}, "parallel": {"global_batch": BATCH, "micro_batch": 1}}
    settings = runs.settings_of(tmp_path / "some.bin", **sections)
    trainer = Trainer(settings)
    own = {"mesh": trainer.mesh, "device": trainer.device, "ignores": True}
    counts = [count_targets(trainer.loader.step(BATCH * step), **own)[0] for step in range(2)]
    assert all(0 in found and sum(found) for found in counts)
    want = runs.steps_of(0, settings, None, 2)
    assert all(math.isfinite(value) for step in want for value in step)
    balanced = {"cp": 2, "cp_layout": "balanced"}
    tensor = {"tp": 2, "dp": 2, "zero": 2, "sequence_parallel": True}
    for plan in ({"dp": 4, "zero": 3}, {**balanced, "dp": 2}, {**balanced, "pp": 2}, tensor):
        given = runs.settings_of(tmp_path / "some.bin", **{**sections, "parallel": {**sections["parallel"], **plan}})
        for got in ranks(4).run(runs.steps_of, given, None, 2):
            close(got, want)

    np.zeros(3000, "uint16").tofile(tmp_path / "none.bin")
    given = runs.settings_of(tmp_path / "none.bin", **sections)
    assert runs.steps_of(0, given) == [(0.0, 0.0)] * 5

    class Mean(nn.Module):
        """A model whose loss is NaN where there is no target."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Embedding(runs.VOCABULARY, 8), nn.Linear(8, runs.VOCABULARY)])

        def forward(self, tokens, targets, positions, cu_seqlens):
            logits = self.layers[1](self.layers[0](tokens))
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    step = Trainer(settings, model=Mean()).step()
    assert math.isfinite(step.loss) and math.isfinite(step.grad_norm)


def test_a_token_that_the_model_does_not_know(tmp_path):
    np.full(200, 77, "uint16").tofile(tmp_path / "a.bin")
    known = np.zeros(200, "uint16")
    known[50] = 7  # the token that ends a document
    known.tofile(tmp_path / "b.bin")
    data = {"paths": [str(tmp_path / "b.bin"), str(tmp_path / "a.bin")], "eos_id": 7}
    trainer = Trainer(runs.settings_of(tmp_path, data=data))
    message = r"data: \S*a\.bin has token 77, in its document 0, outside the model's vocabulary of 31; is"

    def epoch():
        while trainer.samples_seen < trainer.samples.in_epoch:
            trainer.step()

    with pytest.raises(ValueError, match=message):
        epoch()


def test_a_token_of_the_held_out_share_that_the_model_does_not_know(tmp_path):
    """The error counts documents from the start of the file."""
    tokens = np.zeros(400, "uint16")
    tokens[49::50] = 7
    tokens[360] = 77
    tokens.tofile(tmp_path / "a.bin")
    data = {"paths": [str(tmp_path / "a.bin")], "eos_id": 7}
    trainer = Trainer(runs.settings_of(tmp_path, data=data, evaluation={"share": 0.25}))
    with pytest.raises(ValueError, match=r"a\.bin has token 77, in its document 7, outside"):
        trainer.evaluate()


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_samples_is_part_of_the_data(data, tmp_path, shuffle):
    """A run goes on in the order it had; another order begins with its first sample."""

    def trainer(**more):
        return Trainer(runs.settings_of(data, data={"shuffle": shuffle, **more}, checkpoint={"dir": str(tmp_path)}))

    first = trainer()
    first.step()
    first.save()
    again, other = trainer(), trainer(shuffle=not shuffle)
    for resumed in (again, other):
        resumed.resume()
    assert (again.samples_seen, other.samples_seen, other.global_step) == (BATCH, 0, 1)


def test_a_run_does_not_begin_beside_the_checkpoints_of_another(data, tmp_path):
    settings = runs.settings_of(data, run={"steps": 2}, checkpoint={"dir": str(tmp_path)})
    Trainer(settings).train()
    with pytest.raises(CheckpointError, match="has a checkpoint of step 2 already"):
        Trainer(settings).train()


def test_a_llama_is_tuned_and_opens_in_transformers(data, tmp_path):
    """On two ranks that share its weights: 20 steps, after which the folder has the trained logits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=runs.VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    first = transformers.LlamaForCausalLM(config)
    first.save_pretrained(tmp_path / "first")
    settings = runs.settings_of(
        data, model={"dir": str(tmp_path / "first")}, run={"steps": 20},
        parallel={"dp": 2, "zero": 3, "global_batch": BATCH, "micro_batch": 4},
    )  # fmt: skip
    losses, logits = ranks(2).run(runs.tuned, settings, tmp_path / "tuned")[0]
    assert losses[-1] < 0.8 * losses[0]
    tuned = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tuned")
    tokens = torch.arange(12)[None] % runs.VOCABULARY
    with torch.no_grad():
        torch.testing.assert_close(tuned(tokens).logits[0], logits, rtol=1e-4, atol=1e-4)
        assert (tuned(tokens).logits - first(tokens).logits).abs().max() > 0.5
