"""Exports for Megatron-LM, read by megatron-core, which is skipped if it is not there.

Megatron-LM's own ``validate_args`` is in no package: its ``TransformerConfig`` and layer layout, which check most, are,
and the parser is made of the options that their fields name.
"""

import argparse
import dataclasses
import importlib
import shlex
import typing
import warnings
from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, SearchOptions, presets, search
from parallel_ops.planner.export import export, find_target
from support.planning.exports import best_plans

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
    text = export("megatron", dense, presets.cluster("gb200x64"), offload)
    # arguments.py has no --cpu-offloading: the number of layers turns it on.
    assert "--cpu-offloading-num-layers 20" in text and "--cpu-offloading " not in text
    whole = replace(offload, offload_layers=0)
    assert "of 1 to 79" in target.problem(dense, presets.cluster("gb200x64"), whole)


def test_megatron_has_what_its_arguments_are_checked_for():
    """Conditions of ``validate_args`` and ``TransformerConfig`` of Core 0.16 to 0.19."""
    target, cluster = find_target("megatron"), presets.cluster("h100x64")
    experts = presets.model("qwen3-30b-a3b")
    plan = Plan(dp=64, ep=8, zero=1, fsdp=False, global_batch=256, cuda_graph="full")
    text = export("megatron", experts, cluster, plan)
    assert "--no-check-for-nan-in-loss-and-grad" in text and "--moe-pad-experts-for-cuda-graph-inference" in text
    plan = replace(plan, cuda_graph="none")
    assert "--no-check" not in export("megatron", experts, cluster, plan)
    padded = replace(plan, capacity_factor=1.25)
    assert "capacity" in target.problem(experts, cluster, replace(padded, dispatcher="deepep"))
    assert target.problem(experts, cluster, replace(padded, dispatcher="hybridep")) is None
    assert "16 bits" in target.problem(experts, cluster, replace(plan, ep_overlap=True, dtype="fp32"))
    ahead = replace(experts, prediction_layers=1)
    assert "multi-token" in target.problem(ahead, cluster, replace(plan, ep_overlap=True))
    split = Plan(dp=16, tp=4, ep=8, zero=1, fsdp=False, sequence_parallel=True, global_batch=256)
    biased = presets.model("gpt-oss-20b")
    assert "expert_tp=1" in target.problem(biased, cluster, split)
    assert target.problem(biased, cluster, replace(split, expert_tp=1)) is None
    absolute = replace(presets.model("gpt3-175b"), prediction_layers=1)
    assert "rotary" in target.problem(absolute, cluster, Plan(dp=64, fsdp=False, global_batch=64))
    dropout = presets.model("gpt3-5b")
    graphs = Plan(dp=64, fsdp=False, global_batch=64, recompute="core_attn", cuda_graph="attention")
    assert dropout.dropout and "dropout" in target.problem(dropout, cluster, graphs)
    assert target.problem(replace(dropout, dropout=False), cluster, graphs) is None
    offload = Plan(dp=64, fsdp=False, global_batch=64, offload="activations", offload_layers=2, cuda_graph="full")
    assert "graph" in target.problem(replace(dropout, dropout=False), cluster, offload)
    whole = Plan(dp=8, tp=4, pp=2, fsdp=False, global_batch=64)
    assert "scatter_gather=false" in target.problem(dropout, cluster, whole)
    assert target.runs(dropout, cluster, whole)


def test_a_search_finds_experts_with_a_capacity_for_megatron():
    options = SearchOptions(
        target="megatron", tp=(1,), pp=(1,), cp=(1,), micro_batches=(1,), fixed={"capacity_factor": 1.25}
    )
    best = search(presets.model("qwen3-30b-a3b"), presets.cluster("h100x64"), batch=256, options=options, keep=1).best
    assert best.plan.ep > 1 and best.plan.dispatcher == "all_to_all"
