"""Exports, read by the parsers of DeepSpeed and torchtitan, each installed without its dependencies on GPU libraries.

What is not there is skipped.
"""

import importlib
import sys
from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, presets
from parallel_ops.planner.export import TARGETS, export
from support.planning.exports import best_plans


def test_deepspeed_accepts_the_plans_that_are_found_for_it(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    configs = importlib.import_module("deepspeed.runtime.config")
    engine = importlib.import_module("deepspeed.runtime.engine")
    json = importlib.import_module("json")
    monkeypatch.setattr(configs.dist, "get_rank", lambda: 0)

    class Ranks:
        def __init__(self, plan):
            self.plan = plan

        def get_data_parallel_world_size(self):
            return self.plan.dp

    plans = [*best_plans("deepspeed"), *best_plans("deepspeed", zero=(0,), pp=(8,))]
    assert {plan.zero for _, _, plan in plans} >= {0, 1}
    for model, cluster, plan in plans:
        config = json.loads(export("deepspeed", model, cluster, plan))
        read = configs.DeepSpeedConfig(config, mpu=Ranks(plan))
        assert (read.train_batch_size, read.zero_optimization_stage) == (plan.global_batch, plan.zero)
        assert read.gradient_accumulation_steps == plan.micro_batches
        # The dtypes that the engine has an optimizer for: its own check, on an engine without one.
        made = object.__new__(engine.DeepSpeedEngine)
        made.__dict__ |= {"_config": read, "pipeline_parallelism": plan.pp > 1, "global_rank": 0}
        monkeypatch.setattr(engine, "is_zero_supported_optimizer", lambda optimizer: True)
        made._do_optimizer_sanity_check(None)


@pytest.fixture
def torchtitan(tmp_path, monkeypatch):
    """Imports an exported module and has torchtitan's configuration manager load it."""
    trainer = pytest.importorskip("torchtitan.trainer", reason="needs torchtitan and what it imports")
    manager = importlib.import_module("torchtitan.config").ConfigManager
    monkeypatch.syspath_prepend(tmp_path)

    def load(text, number):
        name = f"planned_{number}"
        (tmp_path / f"{name}.py").write_text(text)
        config = manager().parse_args(["--module", name, "--config", "planned"])
        assert isinstance(config, trainer.Trainer.Config)
        del sys.modules[name]
        return config

    return load


def test_torchtitan_accepts_the_plans_that_are_found_for_it(torchtitan):
    pipelines = importlib.import_module("torchtitan.distributed.pipeline_parallel")
    plans = [*best_plans("torchtitan"), *best_plans("torchtitan", pp=(4,), schedules=("interleaved", "zb-v"))]
    schedules = set()
    for number, (model, cluster, plan) in enumerate(found for found in plans if "llama3" in found[0].name):
        config = torchtitan(export("torchtitan", model, cluster, plan), number)
        sizes = config.parallelism
        assert (
            sizes.pipeline_parallel_degree
            * sizes.tensor_parallel_degree
            * sizes.context_parallel_degree
            * max(sizes.data_parallel_shard_degree, sizes.data_parallel_replicate_degree)
            == plan.gpus
        )
        kept = {"none": "NoneType", "selective": "KeepProducts", "full": "FullAC"}[plan.recompute]
        assert kept in type(config.activation_checkpoint).__qualname__
        if plan.pp == 1:
            continue
        # The stages that it was asked for, and the placement that its schedule has.
        parts = sizes.module_fqns_per_model_part
        assert len(parts) == plan.pp * plan.virtual_stages
        assert sum(name.startswith("layers.") for part in parts for name in part) == model.num_layers
        for rank in range(plan.pp):
            held = pipelines._get_pp_rank_to_stage_indices_mapping(
                rank, plan.pp, sizes.pipeline_parallel_schedule, len(parts)
            )
            assert len(held) == plan.virtual_stages
        schedules.add(sizes.pipeline_parallel_schedule)
    assert schedules >= {"Interleaved1F1B"}


def test_selective_recomputation_keeps_every_product_in_torchtitan(torchtitan):
    torch = importlib.import_module("torch")
    model, cluster = presets.model("llama3-8b"), presets.cluster("h100x16")
    plan = Plan(dp=16, zero=3, global_batch=128, recompute="selective")
    policy = torchtitan(export("torchtitan", model, cluster, plan), 0).activation_checkpoint.build()

    products = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                products.append(func)
            return func(*args, **(kwargs or {}))

    block = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    wrapped = policy._wrap_block(block)
    with Counted():
        wrapped(torch.randn(4, 8, requires_grad=True)).sum().backward()
    # Four forward, two each backward: none again.
    assert len(products) == 12


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_search_for_a_system_gives_plans_that_it_can_run(target):
    found = False
    for model, cluster, plan in best_plans(target, ("llama3-8b", "llama3-405b")):
        found = True
        assert TARGETS[target].problem(model, cluster, plan) is None
        assert export(target, model, cluster, plan)
    assert found


def test_the_trainers_parallel_section_is_the_plan():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    for model, cluster, plan in best_plans("parallel_ops", ("llama3-8b",)):
        written = tomllib.loads(export("parallel_ops", model, cluster, plan))
        elsewhere = {"dtype": written["precision"]["dtype"], "recompute": written["recompute"]["kind"]}
        assert Plan(**written["parallel"], **elsewhere, fused_loss=True) == plan
        float8 = tomllib.loads(export("parallel_ops", model, cluster, replace(plan, dtype="mxfp8")))
        assert float8["precision"] == {"dtype": "bf16", "linears": "mxfp8"}
        assert (written["model"]["hidden_size"], written["model"]["seq_length"]) == (
            model.hidden_size,
            model.seq_length,
        )
