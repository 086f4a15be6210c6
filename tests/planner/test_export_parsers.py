"""Exports, read by the parsers and validators of the systems themselves.

Needs megatron-core, deepspeed or torchtitan, each installed without its dependencies on GPU libraries; what is not
there is skipped. Megatron-LM's own ``validate_args`` is in no package: its ``TransformerConfig`` and layer layout,
which check most, are, and the parser is made of the options that their fields name.
"""

import argparse
import dataclasses
import importlib
import os
import shlex
import subprocess
import sys
import typing
import warnings
from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, SearchOptions, presets, search
from parallel_ops.planner.export import TARGETS, export, find_target
from parallel_ops.planner.export.launcher import script

CASES = {
    "llama3-8b": ("h100x16", 128),
    "gpt3-175b": ("a100-80x128", 1536),
    "mixtral-8x7b": ("h100x64", 512),
    "llama3-405b": ("h100x512", 2048),  # 126 layers, which few pipelines divide
}


def best_plans(target, cases=tuple(CASES), **changes):
    """The fastest plans that the system can run, of each case: what ``plan --for`` gives."""
    for name in cases:
        machine, batch = CASES[name]
        model, cluster = presets.model(name), presets.cluster(machine)
        if name == "mixtral-8x7b":
            model = replace(model, seq_length=4096)
        options = SearchOptions(target=target, micro_batches=(1,), context_tokens=model.seq_length, **changes)
        found = search(model, cluster, batch=batch, options=options, keep=2)
        for plan in found.plans:
            yield model, cluster, plan.plan


# Options of Megatron-LM that its arguments.py declares itself, without or with a value; the others come from the fields
# of its configuration classes.
FLAGS = (
    "--group-query-attention",
    "--swiglu",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
    "--bf16",
    "--fp16",
    "--use-distributed-optimizer",
    "--use-megatron-fsdp",
    "--no-gradient-accumulation-fusion",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--accumulate-allreduce-grads-in-fp32",
    "--grad-reduce-in-bf16",
    "--optimizer-cpu-offload",
    "--use-precision-aware-optimizer",
    "--no-scatter-gather-tensors-in-pipeline",
    "--multi-latent-attention",
)
VALUES = (
    "--seq-length",
    "--max-position-embeddings",
    "--vocab-size",
    "--position-embedding-type",
    "--num-experts",
    "--moe-layer-freq",
    "--micro-batch-size",
    "--global-batch-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
    "--attention-backend",
    "--data-parallel-sharding-strategy",
    "--ckpt-format",
    "--fp8-format",
)


def megatron_parser(configs):
    """Options as Megatron-LM has them: a field of a configuration class names its own."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in FLAGS:
        parser.add_argument(name, action="store_true")
    for name in VALUES:
        parser.add_argument(name)
    hints = {name: hint for config in configs for name, hint in typing.get_type_hints(config).items()}
    for field in (field for config in configs for field in dataclasses.fields(config)):
        names = field.metadata.get("argparse_meta", {}).get("arg_names", ["--" + field.name.replace("_", "-")])
        names = [name for name in names if name not in parser._option_string_actions]
        hint = hints[field.name]
        if not names or not field.init:
            continue
        if hint is bool:
            parser.add_argument(*names, dest=field.name, action="store_const", const=not field.default)
            continue
        kinds = [kind for kind in (int, float) if kind in (hint, *typing.get_args(hint))]
        many = any(typing.get_origin(one) is list for one in (hint, *typing.get_args(hint)))
        number = "+" if many and not kinds else None
        parser.add_argument(*names, dest=field.name, type=kinds[0] if kinds else str, nargs=number)
    return parser


@pytest.fixture(scope="module")
def megatron():
    """Reads arguments as Megatron-LM does and builds the configuration, whose checks raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        configs = pytest.importorskip("megatron.core.transformer.transformer_config", reason="needs megatron-core")
        layouts = importlib.import_module("megatron.core.transformer.pipeline_parallel_layer_layout")
    bfloat16 = importlib.import_module("torch").bfloat16
    parser = megatron_parser((configs.TransformerConfig, configs.MLATransformerConfig))

    def check(text):
        args = parser.parse_args(shlex.split(text.replace("\\\n", " ")))
        pp = args.pipeline_model_parallel_size
        config = configs.MLATransformerConfig if args.multi_latent_attention else configs.TransformerConfig
        given = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(config)}
        given = {name: value for name, value in given.items() if value is not None and name != "attention_backend"}
        # Arguments that core_transformer_config_from_args translates.
        given |= {
            "add_bias_linear": not args.disable_bias_linear,
            "gated_linear_unit": args.swiglu,
            "pipeline_dtype": bfloat16,
            "params_dtype": bfloat16,
            "fp8": args.fp8_format,
            "moe_layer_freq": eval(args.moe_layer_freq or "1", {}),
            "num_moe_experts": args.num_experts and int(args.num_experts),
        }
        # Conditions that validate_args asserts of the stages and of the optimizer.
        layout, virtual = args.pipeline_model_parallel_layout, args.num_virtual_stages_per_pipeline_rank
        if layout:
            stages = layouts.PipelineParallelLayerLayout.get_num_stages_from_str(layout)
            assert stages % pp == 0 and not virtual
            virtual = stages // pp
        else:
            assert args.num_layers % (pp * int(virtual or 1)) == 0
        given["virtual_pipeline_model_parallel_size"] = int(virtual) if int(virtual or 1) > 1 else None
        assert args.use_distributed_optimizer or not args.overlap_param_gather
        assert args.use_precision_aware_optimizer == args.optimizer_cpu_offload <= args.use_distributed_optimizer
        return config(**given)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield check


def test_megatron_accepts_the_plans_that_are_found_for_it(megatron):
    kinds = set()
    for model, cluster, plan in best_plans("megatron"):
        made = megatron(export("megatron", model, cluster, plan))
        assert made.tensor_model_parallel_size == plan.tp
        assert made.sequence_parallel == plan.sequence_parallel
        kinds.add(plan.schedule)
    assert "interleaved" in kinds


def test_megatron_has_the_stages_and_the_recomputation_of_the_plan(megatron):
    deepseek, cluster = presets.model("deepseek-v3"), presets.cluster("h800x2048")
    plan = Plan(
        dp=128,
        pp=16,
        ep=64,
        zero=1,
        schedule="interleaved",
        virtual_stages=2,
        global_batch=14336,
        recompute="selective",
    )
    made = megatron(export("megatron", deepseek, cluster, plan))
    assert made.recompute_modules == ["layernorm", "moe_act", "shared_experts", "mlp", "mla_up_proj"]
    layout = made.pipeline_model_parallel_layout
    layout.validate_layer_layout(61, None)
    # Chunks in the order of the model: 1 and 1 layers at the ends of 32, as even as they can be.
    decoders = [[str(kind).count("decoder") for kind in chunk].count(1) for rank in layout.layout for chunk in rank]
    assert sorted(decoders) == [1] * 3 + [2] * 29 and sum(decoders) == 61
    ahead = megatron(export("megatron", replace(deepseek, prediction_layers=1), cluster, plan))
    assert ahead.mtp_num_layers == 1
    ahead.pipeline_model_parallel_layout.validate_layer_layout(61, 1)
    dense, a100 = presets.model("llama3-405b"), presets.cluster("h100x256")
    uneven = Plan(
        dp=2, tp=8, pp=16, zero=1, sequence_parallel=True, global_batch=64, offload="optimizer", recompute="full"
    )
    made = megatron(export("megatron", dense, a100, uneven))
    made.pipeline_model_parallel_layout.validate_layer_layout(126, None)
    scores = replace(uneven, flash_attention=False, recompute="selective", offload="none")
    assert megatron(export("megatron", dense, a100, scores)).recompute_modules == ["core_attn"]


def test_megatron_has_the_recipes_of_2026(megatron, monkeypatch):
    """Low precision with bf16 gradients, modules of recomputation, dispatchers and graphs of attention."""
    config = "megatron.core.transformer.transformer_config"
    # Transformer Engine needs a GPU's toolkit to be installed.
    monkeypatch.setattr(f"{config}.is_te_min_version", lambda *version: True)
    deepseek, cluster = presets.model("deepseek-v3"), presets.cluster("b200x256")
    plan = Plan(
        dp=32, pp=8, ep=32, zero=1, schedule="interleaved", virtual_stages=2, global_batch=4096, fsdp=False,
        dtype="mxfp8", activation_dtype="fp8", grad_dtype="bf16", recompute="mla_up_proj+mlp", dispatcher="deepep",
        cuda_graph="attention",
    )  # fmt: skip
    text = export("megatron", deepseek, cluster, plan)
    made = megatron(text)
    assert made.recompute_modules == ["mla_up_proj", "mlp"]
    assert (made.moe_token_dispatcher_type, made.moe_flex_dispatcher_backend) == ("flex", "deepep")
    assert (made.fp8, made.fp8_recipe) == ("e4m3", "mxfp8") and "--grad-reduce-in-bf16" in text
    for dtype, option in (("fp8_blockwise", "--fp8-recipe blockwise"), ("nvfp4", "--fp4-recipe nvfp4")):
        assert option in export("megatron", deepseek, cluster, replace(plan, dtype=dtype))
    target, dense = find_target("megatron"), presets.model("llama3-70b")
    assert "scale a row" in target.problem(deepseek, cluster, replace(plan, dtype="fp8_rowwise"))
    assert "recompute=operators" in target.problem(deepseek, cluster, replace(plan, recompute="operators"))
    offload = Plan(dp=64, zero=3, fsdp=False, offload="activations", offload_layers=20, global_batch=256)
    assert "--cpu-offloading-num-layers 20" in export("megatron", dense, presets.cluster("gb200x64"), offload)
    whole = replace(offload, offload_layers=0)
    assert "of 1 to 79" in target.problem(dense, presets.cluster("gb200x64"), whole)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_scripts_for_megatron_pass_arguments_that_it_accepts(megatron, launcher, tmp_path):
    """Experts in a pipeline, whose layout has characters that a shell would read."""
    model, cluster = presets.model("deepseek-v3"), presets.cluster("h800x2048")
    plan = Plan(dp=128, pp=16, ep=64, zero=1, global_batch=14336, recompute="selective")
    target = find_target("megatron")
    text = export("megatron", model, cluster, plan)
    (tmp_path / "run.sh").write_text(script(target, text, cluster, plan, launcher))
    subprocess.run(["bash", "-n", "run.sh"], cwd=tmp_path, check=True)
    for name, body in {"torchrun": 'printf "%s\\n" "$@" > words', "srun": '"$@"', "scontrol": "echo node-1"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "node-1", "SLURM_JOB_NODELIST": "node"}
    subprocess.run(["bash", "run.sh"], cwd=tmp_path, env={**given, "SLURM_JOB_ID": "7"}, check=True)
    words = (tmp_path / "words").read_text().splitlines()
    arguments = words[words.index("pretrain_gpt.py") + 1 :]
    assert shlex.split(text.replace("\\\n", " ")) == arguments
    made = megatron(shlex.join(arguments))
    assert (made.pipeline_model_parallel_size, made.expert_model_parallel_size) == (16, 64)


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
