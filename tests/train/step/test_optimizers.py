"""Parameter groups and frozen parameters on any plan."""

import numpy as np
import pytest
import torch
from torch import nn

from parallel_ops.models import Transformer
from parallel_ops.train.step.optimizer import optimizer_of
from parallel_ops.train.step.settings import GroupSettings, OptimizerSettings
from support.further import thinned
from support.ranks.distributed import ranks
from support.runs import trainer as runs


class TestGroups:
    def test_rates_and_decay_by_name(self):
        layers = nn.ModuleDict({"0": nn.Linear(5, 9), "1": nn.Linear(9, 4)})
        layers["0"].router = nn.Linear(5, 3)
        model = nn.ModuleDict({"tokens": nn.Embedding(7, 5), "layers": layers})
        groups = (
            GroupSettings(match="layers.0.router.*", lr_ratio=0.5, weight_decay=0.0),
            GroupSettings(match="layers.*", weight_decay=0.3),
            GroupSettings(match="*.bias", weight_decay=0.7),
        )
        optimizer = optimizer_of(model, OptimizerSettings(weight_decay=0.1, groups=groups))
        of = {id(p): (g["lr_ratio"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
        found = {name: of[id(p)] for name, p in model.named_parameters()}
        assert found == {
            "tokens.weight": (1.0, 0.1),
            "layers.0.weight": (1.0, 0.3), "layers.0.bias": (1.0, 0.3),
            "layers.0.router.weight": (0.5, 0.0), "layers.0.router.bias": (0.5, 0.0),
            "layers.1.weight": (1.0, 0.3), "layers.1.bias": (1.0, 0.3),
        }  # fmt: skip

    def test_a_ratio_is_of_the_schedule(self, data):
        groups = [{"match": "tokens.*", "lr_ratio": 0.0}, {"match": "layers.0.*", "lr_ratio": 0.25}]
        trainer = runs.trainer_of(runs.settings_of(data, optimizer={"groups": groups, "weight_decay": 0.0}))
        before = trainer.model.tokens.weight.detach().clone()
        step = trainer.step()
        trainer.step()
        trainer.loader.close()
        assert torch.equal(trainer.model.tokens.weight, before)
        assert {g["lr"] / g["lr_ratio"] for g in trainer.optimizer.param_groups if g["lr_ratio"]} == {2 * step.lr}

    def test_any_plan_has_the_same_groups(self, data):
        groups = [{"match": "layers.1.*", "lr_ratio": 0.1, "weight_decay": 0.5}]
        settings = {"optimizer": {"groups": groups}, "model": runs.MODELS["llama"]}
        want = runs.steps_of(0, runs.settings_of(data, **settings), steps=3)
        for plan in ({"pp": 2}, {"tp": 2}):
            got = ranks(2).run(runs.steps_of, runs.settings_of(data, **settings, parallel=plan), None, 3)
            np.testing.assert_allclose(got[0], want, rtol=1e-4)


FROZEN = {**runs.MODELS["llama"], "freeze": ["tokens.*", "layers.0.*", "*.mlp.*"]}


class TestFrozen:
    @pytest.mark.parametrize(
        "plan",
        [{"tp": 2}, {"dp": 2, "zero": 3}, {"cp": 2}, {"pp": 2}, {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-h1"}],
        ids=str,
    )
    def test_they_stay_as_they_are_and_all_plans_agree(self, data, tmp_path, plan):
        sections = {"model": FROZEN, "checkpoint": {"dir": str(tmp_path / "a")}}
        want = runs.steps_of(0, runs.settings_of(data, **sections))
        settings = runs.settings_of(data, model=FROZEN, parallel=plan, checkpoint={"dir": str(tmp_path / "b")})
        got = ranks(settings.plan.gpus).run(runs.steps_of, settings, None, 3)
        np.testing.assert_allclose(got[0], want[:3], rtol=1e-4)
        resumed = runs.steps_of(0, runs.settings_of(data, model=FROZEN), tmp_path / "b")
        np.testing.assert_allclose(resumed, want[3:], rtol=1e-3)
        assert want[-1][0] < want[0][0]
        trained = runs.trainer_of(runs.settings_of(data, **sections))
        fresh = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
        trained.resume()
        moved = {name for name, p in trained.model.named_parameters() if not torch.equal(p, fresh[name])}
        assert moved and all(name.startswith(("layers.1.", "norm", "head")) and ".mlp." not in name for name in moved)
        shapes = Transformer.global_shapes(trained.settings.config)
        assert len(trained.optimizer.state) == len(moved) < len(shapes)

    @pytest.mark.parametrize("kind", ["llama", "gpt", "experts"])
    @pytest.mark.parametrize("schedule", thinned(["zb-v", "1f1b"]))
    def test_gradients_pass_stages_that_are_frozen(self, data, kind, schedule):
        """The last stage, or all linears, with tied embeddings and experts, with recomputation."""
        freeze = {"llama": ["layers.[23].*", "norm*", "head*"], "gpt": ["layers.*.mlp.*", "layers.1.*"],
                  "experts": ["layers.*.mlp.*", "layers.3.*"]}  # fmt: skip
        sections = {
            "model": {**runs.MODELS[kind], "num_layers": 4, "freeze": freeze[kind]}, "recompute": {"kind": "full"}
        }  # fmt: skip
        want = runs.steps_of(0, runs.settings_of(data, **sections), steps=2)
        plan = {"pp": 2, "schedule": schedule}
        got = ranks(2).run(runs.steps_of, runs.settings_of(data, **sections, parallel=plan), None, 2)
        np.testing.assert_allclose(got[1], want, rtol=1e-5)

    @pytest.mark.parametrize("kind", ["adamw", "muon"])
    def test_a_rank_with_nothing_to_train_resumes(self, data, tmp_path, kind):
        sections = {
            "model": {**runs.MODELS["llama"], "freeze": ["tokens.*", "layers.0.*"]}, "parallel": {"pp": 2},
            "optimizer": {"kind": kind}, "checkpoint": {"dir": str(tmp_path)},
        }  # fmt: skip
        settings = runs.settings_of(data, **sections)
        whole = ranks(2).run(runs.steps_of, runs.settings_of(data, **{**sections, "checkpoint": {}}))
        assert ranks(2).run(runs.steps_of, settings, None, 2)[0] == whole[0][:2]
        assert ranks(2).run(runs.steps_of, settings, tmp_path)[0] == whole[0][2:]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"optimizer": {"groups": [{"match": "layer.*"}]}},
            r"optimizer\.groups\.0\.match: 'layer\.\*' matches no",
        ),
        (
            {"model": {**runs.MODELS["gpt"], "freeze": ["x"]}},
            r"model\.freeze: 'x' matches no parameter; their names",
        ),
        ({"model": {**runs.MODELS["gpt"], "freeze": ["*"]}}, r"model\.freeze: all parameters are frozen"),
    ],
)
def test_patterns_that_match_nothing(data, sections, message):
    with pytest.raises(ValueError, match=message):
        runs.trainer_of(runs.settings_of(data, **sections))
