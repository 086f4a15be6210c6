"""Evaluation in a run: the same value on every mesh, the training of a run without it, the best checkpoint."""

import itertools
import json
import math
import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from parallel_ops.train.checkpoint.checkpoints import steps_in
from parallel_ops.train.checkpoint.description import best_in
from parallel_ops.train.data.split import split
from parallel_ops.train.data.tokens import TokenStream
from parallel_ops.train.step.evaluation import Evaluation
from support.ranks.distributed import ranks
from support.runs import trainer as runs

BATCH = 8


@pytest.fixture(scope="module")
def held_out(data, tmp_path_factory):
    """Other tokens of the same rule: 29 sequences, which no number of ranks divides, and a rest."""
    path = tmp_path_factory.mktemp("held_out") / "other.bin"
    np.fromfile(data, "uint16")[1000 : 1000 + 29 * 16 + 9].tofile(path)
    return path


@pytest.mark.parametrize("plan", [{}, {"dp": 2, "tp": 2}], ids=str)
def test_steps_and_evaluations_without_a_target_say_so(data, tmp_path, plan):
    """The second half of the tokens is left out by the mask: of the steps, the last two have no target."""
    tokens = np.fromfile(data, "uint16")[: 16 * 8 * 4 + 1]
    for name, mask in (("half", np.arange(len(tokens)) <= 16 * 16), ("none", np.zeros(len(tokens)))):
        tokens.tofile(tmp_path / f"{name}.bin")
        mask.astype(np.uint8).tofile(tmp_path / f"{name}.mask")
    logs = tmp_path / "log.jsonl"
    own = runs.settings_of(
        data, model=runs.MODELS["llama"], run={"steps": 4},
        data={"paths": [str(tmp_path / "half.bin")], "shuffle": False, "eos_id": None},
        evaluation={"paths": [str(tmp_path / "none.bin")]}, logging={"jsonl": str(logs)}, parallel=plan,
        optimizer={"warmup": 0},
    )  # fmt: skip
    out, err = ranks(4).run(runs.printed, own)[0] if plan else runs.printed(0, own)
    assert "50.1% of the tokens count in the loss, by .mask" in out and "; no token counts in the loss, by .mask" in out
    assert "warning: evaluation: no token counts in the loss, since the masks leave out all" in err
    without = [
        line.startswith(("step 3/4", "step 4/4")) for line in out.splitlines() if "no target of this step" in line
    ]
    assert without == [True, True] and "evaluation loss nan (no target counts in the loss)" in out
    records = [json.loads(line) for line in logs.read_text().splitlines()]
    assert [record["loss"] is None for record in records] == [False, False, True, True]


def settings_of(data, held_out, /, **sections):
    sections["model"] = {**runs.MODELS["llama"], "num_layers": 4, **sections.pop("model", {})}
    sections["evaluation"] = {"paths": [str(held_out)], **sections.pop("evaluation", {})}
    return runs.settings_of(data, **sections)


@pytest.mark.parametrize("trial", range(20))
def test_the_two_parts_of_a_stream_are_the_whole(tmp_path, trial):
    draw = np.random.default_rng(trial)
    for number in range(draw.integers(1, 4)):
        tokens = draw.integers(1, 9, draw.integers(1, 60))
        tokens[draw.random(len(tokens)) < 0.2] = 0  # documents of one token among them
        tokens.astype("uint16").tofile(tmp_path / f"{number}.bin")
    stream = TokenStream([tmp_path], eos_id=0)
    share = float(draw.uniform(0.05, 0.95))
    if not 0 < round(len(stream) * share) < len(stream):
        pytest.skip("too few tokens")
    parts = split(stream, share)
    assert len(parts[1]) == round(len(stream) * share)

    def joined(documents):
        return list(itertools.chain(*documents))

    def all_of(stream):
        return [stream.document(number).tolist() for number in range(stream.documents)]

    documents = all_of(parts[0]) + all_of(parts[1])
    want = all_of(stream)
    assert joined(documents) == joined(want) and all(documents)
    assert len(documents) - len(want) in (0, 1)  # one may be cut
    for part in parts:
        blocks = np.concatenate([block for file in part.files for block, _ in file.blocks()])
        assert blocks.tolist() == joined(all_of(part))
        for number in range(part.documents):
            whole, start = part.document(number), int(draw.integers(0, 4))
            length = int(draw.integers(1, 5))
            assert part.document(number, start, length).tolist() == whole[start : start + length].tolist()
            assert part.document(number, start).tolist() == whole[start:].tolist()


@pytest.mark.parametrize("share", [0.00005, 0.99995])
def test_a_share_that_leaves_nothing(data, share):
    with pytest.raises(ValueError, match="of 6000 tokens leaves nothing to train on or to evaluate"):
        split(TokenStream([data]), share)


@pytest.mark.parametrize("sequences", [None, 1, 11])
def test_it_is_the_mean_over_all_targets(data, held_out, sequences):
    settings = settings_of(data, held_out, evaluation={"sequences": sequences}, parallel={"micro_batch": 4})
    trainer = runs.trainer_of(settings)
    tokens = torch.from_numpy(np.fromfile(held_out, "uint16").astype("int64"))
    losses = []
    with torch.no_grad():
        for start in range(0, 16 * (sequences or 29), 16):
            rows = tokens[start : start + 17]
            logits = trainer.model(rows[:-1, None])[:, 0].double()
            losses.append(F.cross_entropy(logits, rows[1:], reduction="sum"))
    assert trainer.evaluate() == pytest.approx(float(sum(losses)) / (16 * len(losses)), rel=1e-6)


PLANS = [
    {"dp": 2, "zero": 3, "micro_batch": 4},
    {"dp": 2, "zero": 1, "tp": 2, "sequence_parallel": True, "micro_batch": 2},
    {"cp": 2, "tp": 2, "zero": 2, "micro_batch": 4},
    {"pp": 2, "schedule": "zb-v", "dp": 2, "zero": 2, "micro_batch": 1},
    {"pp": 2, "schedule": "interleaved", "cp": 2, "micro_batch": 2},
    {"pp": 4, "schedule": "1f1b", "micro_batch": 2},
    {"dp": 4, "dp_replicate": 2, "zero": 3, "micro_batch": 1},
]


@pytest.mark.parametrize("document_mask", [False, True])
def test_it_is_the_same_on_every_mesh(data, held_out, document_mask):
    """After an update, of 11 sequences, which no number of ranks divides."""
    options = {"data": {"document_mask": document_mask}, "run": {"steps": 1}}
    options |= {"optimizer": {"warmup": 0}, "evaluation": {"sequences": 11}}
    want = runs.evaluated(0, settings_of(data, held_out, **options))
    for plan in PLANS[document_mask::2]:
        settings = settings_of(data, held_out, **options, parallel={"global_batch": BATCH, **plan})
        for got in ranks(settings.plan.gpus).run(runs.evaluated, settings):
            for now, then in zip(got, want, strict=True):
                assert now == pytest.approx(then, rel=5e-6), f"{plan}: {got}, not {want}"


def test_it_has_no_dropout_and_leaves_that_of_training_as_it_is(data, held_out):
    options = {"model": {"dropout": 0.3, "attention_dropout": 0.1}, "run": {"steps": 2}}
    settings = settings_of(data, held_out, **options)
    found, plain = runs.evaluated(0, settings), runs.steps_of(0, settings)
    assert [step[:2] for step in found] == plain
    trainer = runs.trainer_of(settings)
    assert trainer.evaluate() == trainer.evaluate()
    assert all(module.training for module in trainer.model.modules())


def test_steps_with_an_evaluation_between_them_have_the_same_bits(data, held_out):
    """FSDP2 gathers parameters in an evaluation, which must not be those of the next step."""
    for plan in ({"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"dp": 2}):
        parallel = {"global_batch": BATCH, "micro_batch": 2, **plan}
        settings = settings_of(data, held_out, parallel=parallel, run={"steps": 3}, recompute={"kind": "full"})
        plain = ranks(2).run(runs.steps_of, settings)
        for steps, want in zip(ranks(2).run(runs.evaluated, settings), plain, strict=True):
            assert [step[:2] for step in steps] == want


def test_a_share_of_the_data_is_not_trained_on(data):
    trainer = runs.trainer_of(runs.settings_of(data, evaluation={"share": 0.25}))
    whole, held = TokenStream([data], eos_id=0), trainer.evaluation.samples.stream
    assert (len(trainer.samples.stream), len(held)) == (4500, 1500)
    assert trainer.evaluation.sequences == 1499 // 16
    first = held.document(0).tolist()
    assert first == whole.document(whole.documents - held.documents)[-len(first) :].tolist()


def test_the_best_checkpoint_is_kept(data, held_out, tmp_path, capsys):
    losses = [3.0, 2.0, 2.5, math.nan, 2.2, 2.4]
    folder, log = tmp_path / "checkpoints", tmp_path / "log.jsonl"
    given = {
        "run": {"steps": 6}, "evaluation": {"interval": 1, "sequences": 4},
        "checkpoint": {"dir": str(folder), "interval": 3, "keep": 1, "keep_best": True},
        "logging": {"jsonl": str(log), "plot": str(tmp_path / "plot.png")},
    }  # fmt: skip
    settings = settings_of(data, held_out, **given)
    with mock.patch.object(Evaluation, "run", side_effect=losses):
        result = runs.train(0, settings)
    assert sorted(steps_in(folder)) == [2, 6]
    assert result.best == best_in(folder) == (2.0, folder / "step-00000002")
    assert (result.evaluation_loss, result.checkpoint.name) == (2.4, "step-00000006")
    logged = [json.loads(line).get("evaluation_loss") for line in log.read_text().splitlines()]
    assert logged == [3.0, 2.0, 2.5, None, 2.2, 2.4]
    out = capsys.readouterr().out
    assert "evaluation   4 sequences of" in out and "step-00000002, with an evaluation loss of 2.0000" in out
    assert "evaluation loss 2.5000" in out
    # A run that goes on knows it.
    trainer = runs.trainer_of(settings)
    trainer.resume()
    trainer.evaluation.begin()
    assert not trainer.evaluation.is_best(2.1)
    assert trainer.evaluation.is_best(1.9)
    # Losses on other data are others.
    changed = {**given, "run": {"steps": 8}, "evaluation": {"interval": 1, "sequences": 3}}
    trainer = runs.trainer_of(settings_of(data, held_out, **changed))
    trainer.resume()
    with mock.patch.object(Evaluation, "run", side_effect=[9.0, 9.5]):
        assert trainer.train().best == best_in(folder) == (9.0, folder / "step-00000007")
    assert sorted(steps_in(folder)) == [7, 8]


def test_the_best_of_a_run_on_several_ranks(data, held_out, tmp_path):
    parallel = {"dp": 2, "zero": 2, "global_batch": BATCH}
    own = {"run": {"steps": 4}, "evaluation": {"interval": 2}, "checkpoint": {"dir": str(tmp_path), "keep_best": True}}
    found = ranks(2).run(runs.train, settings_of(data, held_out, parallel=parallel, **own))
    assert found[0] == found[1]
    assert found[0].best[1].name == "step-00000004"  # the loss falls
    assert found[0].best[0] == found[0].evaluation_loss < 3.4


def test_the_loss_of_other_weights_is_not_that_of_a_checkpoint(data, held_out, tmp_path):
    folders = {name: {"checkpoint": {"dir": str(tmp_path / name)}} for name in ("run", "phase")}
    trainer, phase = (
        runs.trainer_of(runs.settings_of(data, evaluation={"paths": [str(held_out)]}, **own))
        for own in folders.values()
    )
    trainer.step()
    trainer.save()
    for other in (trainer, phase):
        other.step()
        other.evaluate()
    trainer.resume()
    phase.begin_phase(tmp_path / "run")
    for other, name in ((trainer, "run"), (phase, "phase")):
        other.save()
        assert best_in(tmp_path / name) is None


def test_too_little_to_evaluate_on(data, tmp_path):
    path = tmp_path / "short.bin"
    np.ones(16, "uint16").tofile(path)
    with pytest.raises(ValueError, match=r"evaluation\.paths: the data has 16 tokens, but a sequence needs 17"):
        runs.trainer_of(settings_of(data, path))
    with pytest.raises(ValueError, match=r"evaluation\.share: the data has 6 tokens"):
        runs.trainer_of(runs.settings_of(data, evaluation={"share": 0.001}))
    trainer = runs.trainer_of(runs.settings_of(data))
    with pytest.raises(ValueError, match=r"no data to evaluate on; set evaluation\.paths or evaluation\.share"):
        trainer.evaluate()


def test_ranks_with_other_data_to_evaluate_on(data, held_out, tmp_path):
    other = tmp_path / "other.bin"
    np.fromfile(held_out, "uint16")[:100].tofile(other)
    parallel = {"dp": 2, "global_batch": BATCH}
    each = [settings_of(data, path, parallel=parallel) for path in (held_out, other)]
    for outcome in ranks(2).outcomes(runs.steps_of_each, each):
        assert outcome.type == "Disagreement" and "evaluation.tokens" in outcome.message


def test_order_of_forward_passes():
    """Any number of micro-batches and any placement: every F once, in an order that can run, with little waiting."""
    from parallel_ops.planner.placement import chunk_rank
    from parallel_ops.planner.schedules.forward_only import forward_only

    def earlier(action):
        return action.stage - 1, action.micro_batch

    for trial in range(200):
        draw = random.Random(trial)
        pp, chunks, count = draw.randint(1, 5), draw.randint(1, 3), draw.randint(1, 12)
        v_shaped = chunks == 2 and draw.random() < 0.5
        schedule = forward_only(pp, pp * chunks, lambda s, pp=pp, v=v_shaped: chunk_rank(s, pp, v), count)
        seen = sorted((a.stage, a.micro_batch) for order in schedule for a in order)
        assert seen == [(stage, n) for stage in range(pp * chunks) for n in range(count)]
        assert all(a.kind == "F" for order in schedule for a in order)
        done, clock, left = {}, [0] * pp, [list(order) for order in schedule]
        while any(left):
            able = [r for r in range(pp) if left[r] and (left[r][0].stage == 0 or earlier(left[r][0]) in done)]
            assert able, "locked up"
            for rank in able:
                action = left[rank].pop(0)
                clock[rank] = max(clock[rank], done.get(earlier(action), 0)) + 1
                done[action.stage, action.micro_batch] = clock[rank]
        end = max(clock)
        # The bound of a pipeline without chunks, in units of a rank's forward.
        assert end <= chunks * (count + pp - 1) + pp
