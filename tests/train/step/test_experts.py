"""``Trainer`` with experts: the steps of one process under any plan, their balance, and what a run says of them."""

import functools
import json

import pytest
import torch

from parallel_ops.models import Transformer
from parallel_ops.pipeline_parallel.cut import Stages
from support.further import thinned
from support.ranks.distributed import ranks
from support.runs import trainer as runs

BATCH = 8
FOUR = {**runs.MODELS["experts"], "num_layers": 4}


def settings_of(data, parallel, /, experts=None, **sections):
    model = {**FOUR, "experts": {**FOUR["experts"], **(experts or {})}}
    return runs.settings_of(
        data, model=model, parallel={"global_batch": BATCH, **parallel}, **{"run": {"steps": 3}, **sections}
    )


PLANS = [
    ({"dp": 2, "ep": 2, "micro_batch": 2, "global_batch": 8}, "none"),
    ({"dp": 4, "ep": 2, "zero": 3, "global_batch": 8}, "full"),
    ({"dp": 4, "ep": 4, "zero": 2}, "selective"),
    ({"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}, "none"),
    ({"tp": 2, "dp": 2, "ep": 2, "zero": 1}, "selective"),
    ({"cp": 2, "dp": 2, "ep": 4, "zero": 3}, "none"),
    ({"tp": 2, "dp": 2, "ep": 4, "zero": 3, "sequence_parallel": True}, "none"),
    ({"tp": 4, "ep": 4, "global_batch": 2}, "full"),
    ({"dp": 4, "dp_replicate": 2, "ep": 2, "zero": 1}, "none"),
    ({"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-v", "global_batch": 8}, "full"),
    ({"pp": 2, "dp": 2, "ep": 2, "zero": 3, "schedule": "zb-h1", "global_batch": 8}, "experts"),
    ({"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipe-v", "global_batch": 12}, "full"),
    ({"pp": 2, "tp": 2, "ep": 2, "sequence_parallel": True, "schedule": "dualpipe-v", "global_batch": 6}, "none"),
    ({"pp": 2, "dp": 2, "ep": 2, "zero": 2, "schedule": "dualpipe-v", "global_batch": 8}, "experts"),
    ({"pp": 2, "cp": 2, "ep": 2, "zero": 2, "schedule": "1f1b", "micro_batch": 2, "global_batch": 8}, "selective"),
]
PLANS_WITH_SINKS = [
    ({"cp": 2, "dp": 2, "zero": 3}, "none"),
    ({"cp": 4, "global_batch": 2}, "selective"),
    ({"cp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "zero": 2, "global_batch": 2}, "experts"),
    ({"dp": 4, "ep": 4, "zero": 1}, "full"),
    ({"pp": 2, "cp": 2, "ep": 2, "schedule": "zb-v"}, "none"),
    ({"pp": 2, "tp": 2, "schedule": "zb-h1"}, "full"),
]


def with_layers(kind, plan):
    """The model of a kind: no deeper than the plan's stages need."""
    model = runs.MODELS[kind] | {"num_layers": 4 if "pp" in plan else 2}
    return model | {"window": (5, None) * 2} if kind == "gpt-oss" and "pp" in plan else model


@functools.cache
def alone(data, kind, layers, batch, micro_batch):
    """Steps in one process. The auxiliary loss is that of a micro-batch, so its size counts."""
    model = with_layers(kind, {"pp": 2} if layers == 4 else {})
    return runs.steps_of(0, steps(data, model, {"global_batch": batch, "micro_batch": micro_batch}))


def steps(data, model, plan, kind="none"):
    """Two steps, so that the second has the weights that the first updated."""
    return runs.settings_of(
        data, model=model, parallel={"global_batch": 4, **plan}, run={"steps": 2}, recompute={"kind": kind},
        optimizer={"weight_decay": 0.1},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "plan", "kind"),
    [
        *thinned(("experts", *plan) for plan in PLANS),
        *thinned(("gpt-oss", *plan) for plan in PLANS_WITH_SINKS),
    ],
)
def test_any_plan_takes_the_steps_of_one_process(data, model, plan, kind):
    settings = steps(data, with_layers(model, plan), plan, kind)
    layers, parallel = settings.model.num_layers, settings.plan
    want = alone(data, model, layers, parallel.global_batch, parallel.micro_batch)
    for got in ranks(parallel.gpus).run(runs.steps_of, settings):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("plan", "kind", "dtype"),
    [
        pytest.param({"pp": 2, "schedule": "1f1b"}, "none", "bf16", marks=pytest.mark.runs),
        ({"pp": 2, "schedule": "zb-v", "dp": 2, "ep": 2, "zero": 2}, "full", "fp32"),
        pytest.param({"pp": 2, "schedule": "interleaved", "tp": 2}, "experts", "bf16", marks=pytest.mark.runs),
        ({"pp": 2, "schedule": "dualpipe-v", "cp": 2, "ep": 2, "global_batch": 8}, "none", "fp32"),
    ],
    ids=str,
)
def test_stages_have_the_auxiliary_loss_of_the_whole_model(data, plan, kind, dtype):
    """Its gradient in each stage has the loads of all, so a large coefficient shows in the norms."""
    model = {**FOUR, "experts": {**FOUR["experts"], "aux_loss": 3.0}}

    def found(over, plan, kind="none"):
        given = {**model, "experts": {**model["experts"], "aux_loss_over": over}}
        return runs.settings_of(
            data, model=given, parallel={"global_batch": 4, **plan}, run={"steps": 2}, recompute={"kind": kind},
            precision={"dtype": dtype},
        )  # fmt: skip

    batch = {"global_batch": plan.get("global_batch", 4)}
    of_model, of_layers = (
        torch.tensor(runs.steps_of(0, found(over, batch | {"micro_batch": 1}))) for over in ("model", "layer")
    )
    settings = found("model", plan, kind)
    for got in ranks(settings.plan.gpus).run(runs.steps_of, settings):
        tight = {"rtol": 2e-6, "atol": 1e-6} if dtype == "fp32" else {"rtol": 2e-2, "atol": 1e-3}
        torch.testing.assert_close(torch.tensor(got), of_model, **tight)
    assert (of_model - of_layers)[:, 1].abs().max() > (1e-3 if dtype == "fp32" else 5e-2)


def test_biases_and_sinks_do_not_decay(data):
    trainer = runs.trainer_of(runs.settings_of(data, model=runs.MODELS["gpt-oss"], optimizer={"weight_decay": 0.1}))
    trainer.loader.close()
    decays = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        own = name.endswith(("bias", "sink")) or "norm" in name
        assert decays[id(parameter)] == (0.0 if own else 0.1), name


def test_metrics_and_a_capacity(data, tmp_path):
    log = tmp_path / "log.jsonl"
    settings = settings_of(data, {}, experts={"capacity_factor": 1.0}, logging={"jsonl": str(log)})
    runs.train(0, settings)
    plan = {"pp": 2, "dp": 2, "ep": 2, "micro_batch": 1}
    other = settings_of(data, plan, logging={"jsonl": str(tmp_path / "other.jsonl")})
    ranks(4).run(runs.train, other)
    for file, drops in ((log, True), (tmp_path / "other.jsonl", False)):
        for record in map(json.loads, file.read_text().splitlines()):
            assert 1 <= record["expert_load"] <= 8
            assert 0.5 < record["expert_entropy"] <= 1
            assert (record["expert_dropped"] > 0) == drops


def test_the_bias_balances(data):
    """Without auxiliary losses the loads stay more even than without the bias, which is part of a checkpoint."""
    last = []
    for rate in (0.0, 0.01):
        own = {"balance_rate": rate, "aux_loss": 0.0, "z_loss": 0.0, "groups": 1, "top_groups": 1}
        model = runs.MODELS["experts"]
        model = {**model, "init_std": 0.1, "experts": {**model["experts"], **own}}
        parallel = {"global_batch": BATCH, "micro_batch": BATCH}
        settings = runs.settings_of(data, model=model, parallel=parallel, run={"steps": 40})
        trainer = runs.trainer_of(settings)
        last.append([trainer.step().experts["expert_entropy"] for _ in range(40)][-10:])
        trainer.loader.close()
    assert sum(last[1]) / 10 > 0.98 > sum(last[0]) / 10
    state = trainer.state_dict()["model"]
    assert state["layers.1.mlp.router.selection_bias"].abs().max() > 0.02


@pytest.mark.parametrize(("freeze", "sections"), [(["layers.1.*"], {}), ([], {"lora": {"rank": 2}})], ids=str)
def test_the_bias_of_a_frozen_router_stays(data, freeze, sections):
    model = {**runs.MODELS["deepseek"], "num_layers": 3, "freeze": freeze}
    trainer = runs.trainer_of(runs.settings_of(data, model=model, run={"steps": 2}, **sections))
    list(runs.taken(trainer))
    moved = [bool(trainer.model.layers[n].mlp.router.selection_bias.any()) for n in "12"]
    assert moved == [False, not sections]


def test_a_stage_without_a_pipeline_has_no_loads():
    config = runs.settings_of(
        "tokens.bin", model={**FOUR, "experts": {**FOUR["experts"], "aux_loss_over": "model"}}
    ).config
    model = Transformer(config, stages=Stages((2, 2), 2), device="cpu")
    with pytest.raises(ValueError, match="aux_loads must be given for stages and an auxiliary loss over the whole"):
        model(torch.zeros(4, 1, dtype=torch.int64), stage=0, aux_scale=1.0)
