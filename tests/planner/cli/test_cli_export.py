"""``--output`` of ``plan`` and ``estimate``: the configuration of each system, and the plans that it cannot run."""

import json
from dataclasses import replace

import pytest

from parallel_ops.planner import Plan, presets
from parallel_ops.planner.export import export

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from support.planning.planner_cli import PLAN, SMALL


def exported(run, format, *plan, model="llama3-70b"):
    given = ["--model", model, "--cluster", "h100x64", "--batch", "4M", "--for", format, "--output", "-"]
    code, out, err = run("estimate", *given, *(["--plan", ",".join(plan)] if plan else []))
    return err if code == 2 else out


def test_a_plan_that_does_not_fit_is_written_and_said_so(run, tmp_path):
    given = ["--model", "llama3-70b", "--cluster", "h100x64", "--batch", "4M", "--for", "megatron"]
    code, out, err = run("estimate", *given, "--plan", "tp=1", "--output", "-")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("does not fit: stage 0 needs") and "--tensor-model" in out
    file = tmp_path / "run.sh"
    code, found, _ = run("estimate", *given, "--plan", "tp=1", "--output", file, "--json")
    assert (code, json.loads(found)["fits"], file.read_text()) == (1, False, out)
    assert run("estimate", *given, "--plan", "tp=8,pp=4,zero=1", "--output", "-")[2] == ""


def test_deepspeed(run):
    config = json.loads(exported(run, "deepspeed", "tp=8", "zero=3", "micro_batch=2", "offload=optimizer"))
    assert config["train_batch_size"] == 512
    replicas = 8
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * replicas == 512
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "offload_param" not in config["zero_optimization"]
    config = json.loads(exported(run, "deepspeed", "tp=8", "zero=3", "offload=optimizer+parameters"))
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"


def test_megatron(run):
    out = exported(run, "megatron", "tp=8", "pp=4", "schedule=interleaved", "virtual_stages=5", "zero=1")
    options = [line.removesuffix(" \\").split(" ") for line in out.splitlines()]
    for option in (
        ["--num-layers", "80"],
        ["--num-query-groups", "8"],
        ["--tensor-model-parallel-size", "8"],
        ["--num-virtual-stages-per-pipeline-rank", "5"],
        ["--use-distributed-optimizer"],
        ["--sequence-parallel"],
        ["--bf16"],
    ):
        assert option in options


def test_megatron_experts_and_uneven_stages(run):
    out = exported(run, "megatron", "ep=8", "zero=2", model="deepseek-v3")
    for option in ("--num-experts 256", "--multi-latent-attention", "--expert-model-parallel-size 8"):
        assert option in out
    assert "--moe-layer-freq '([0]*3+[1]*58)'" in out
    assert "--data-parallel-sharding-strategy optim_grads " in out
    out = exported(run, "megatron", "tp=8", "pp=2", "layers_per_chunk=41:39")
    assert "--pipeline-model-parallel-layout 'Et*41|t*39L'" in out
    # 126 layers over 2 x 8 chunks: as even as the planner counts them.
    out = exported(run, "megatron", "tp=8", "pp=8", "schedule=interleaved", "virtual_stages=2", model="llama3-405b")
    assert f"--pipeline-model-parallel-layout 'Et*7|{'t*8|' * 14}t*7L'" in out
    out = exported(run, "megatron", "tp=8", "pp=2", "zero=1", "offload=optimizer")
    assert "--optimizer-cpu-offload" in out and "--use-precision-aware-optimizer" in out


def test_megatron_names_what_is_not_its_default(run):
    out = exported(run, "megatron", "tp=8", "pp=4", "grad_dtype=bf16", "sequence_parallel=false")
    assert "--grad-reduce-in-bf16" in out and "fp32" not in out
    # Megatron-core reads no option about it: sequence parallelism splits messages, and nothing else does.
    assert "scatter" not in out


def test_torchtitan(run):
    out = exported(run, "torchtitan", "tp=8", "pp=4", "zero=2", "schedule=interleaved", "virtual_stages=5")
    for line in (
        'pipeline_parallel_schedule="Interleaved1F1B",',
        "data_parallel_shard_degree=2,",
        # A pipeline takes the micro-batches of a step as one batch.
        "config.training.local_batch_size = 256",
        "config.training.global_batch_size = 512",
        '["layers.76", "layers.77", "layers.78", "layers.79", "norm", "lm_head"],',
        "config = with_plan(config_registry.llama3_70b())",
    ):
        assert line in out
    assert out.count('["layers.') + out.count('["tok_embeddings"') == 20
    compile(out, "planned.py", "exec")
    # Fields that a plan leaves open are as torchtitan does it: its zero-bubble schedules run no compiled modules.
    assert "CompileConfig(enable=False)" in exported(run, "torchtitan", "tp=8", "pp=4", "zero=2", "schedule=zb-v")
    assert "SelectiveAC.Config()" in exported(run, "torchtitan", "tp=8", "zero=3", "recompute=operators")


def test_torchtitan_converts_the_linears_of_layers_to_fp8_by_row(run):
    """Its converters know no scale of a whole tensor, and take the output embedding and the router, too."""
    out = exported(run, "torchtitan", "tp=8", "zero=3", "dtype=fp8_rowwise")
    assert 'Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)]' in out
    assert "GroupedExperts" not in out
    experts = [
        "--model",
        "deepseek-v3",
        "--cluster",
        "h100x512",
        "--batch",
        2048,
        "--plan",
        "ep=64,zero=3,dtype=fp8_rowwise",
    ]
    _, out, _ = run("estimate", *experts, "--for", "torchtitan", "--output", "-")
    assert 'filter_fqns=["lm_head", "router.gate"]' in out
    assert "import Float8GroupedExpertsConverter, Float8LinearConverter" in out
    assert "converters=[Float8GroupedExpertsConverter.Config(model_compile_enabled=True), " in out
    compile(out, "planned.py", "exec")


def test_fp8_is_offered_in_a_format_that_the_system_has(run):
    for system, offered in (("megatron", "bf16:fp8 "), ("torchtitan", "bf16:fp8_rowwise "), ("deepspeed", "")):
        out = run("plan", *SMALL, "--for", system, "--only", "micro_batch=1")[1]
        assert (f"--only dtype={offered}" if offered else "") in out and ("--only dtype" in out) == bool(offered)


def test_the_trainer(run):
    out = exported(run, "parallel_ops", "tp=8", "zero=3")
    assert "[parallel]\ndp = 8\ntp = 8\nzero = 3\n" in out and "hidden_size = 8192\n" in out
    assert 'dtype = "uint32"' in out  # of 128,256 tokens
    assert "dp_shard * cp of 2 or more: FSDP2 offloads shards" in exported(
        run, "parallel_ops", "tp=8", "zero=1", "dp_replicate=8", "offload=optimizer"
    )
    out = exported(run, "parallel_ops", "tp=8", "pp=4", "zero=3", "schedule=interleaved", "virtual_stages=5")
    pipeline = 'schedule = "interleaved"\nvirtual_stages = 5\n'
    assert f"[parallel]\ndp = 2\ntp = 8\npp = 4\nzero = 3\nsequence_parallel = true\n{pipeline}" in out
    assert "\ninput_grad_first = true\n" in out
    out = exported(run, "parallel_ops", "tp=8", "pp=2", "layers_per_chunk=41:39")
    assert "\nlayers_per_chunk = [41, 39]\n" in out


def test_sliding_windows_are_written_as_the_layers_have_them(run):
    """A run without them would be another model, with other times than those of the plan."""
    assert "\nwindow = 4096\n" in exported(run, "parallel_ops", "tp=8", model="mistral-7b")
    out = exported(run, "megatron", "tp=8", model="mistral-7b")
    assert "--window-size 4095,0" in out and "--window-attn-skip-freq" not in out
    out = exported(run, "megatron", "ep=8", model="gpt-oss-120b")
    assert "--window-size 127,0" in out and f"--window-attn-skip-freq '[{','.join(['1,0'] * 18)}]'" in out
    mixed = replace(presets.model("mistral-7b"), layers=("window", "full"))
    made = export("parallel_ops", mixed, presets.cluster("h100x8"), Plan(dp=8, fused_loss=True, global_batch=8))
    assert 'window = [4096, "none", 4096, "none", ' in made
    assert "window" not in exported(run, "parallel_ops", "tp=8")


def test_without_a_plan_it_is_the_fastest_that_the_system_runs(run):
    """The fastest plan of all has a schedule that Megatron-LM lacks."""
    given = ["--model", "llama3-70b", "--cluster", "h100x64", "--batch", "4M", "--for", "megatron", "--output", "-"]
    code, out, err = run("estimate", *given)
    assert (code, err) == (0, "")
    assert "--tensor-model-parallel-size" in out
    assert run("plan", *given) == (code, out, err)


def test_torchrun(run):
    out = exported(run, "torchrun", "tp=8", "pp=4")
    assert "ParallelMesh(pp=4, dp_replicate=2, cp=1, tp=8, ep=1)" in out
    assert "ParallelMesh(pp=4, dp_shard=2, cp=1, tp=8, ep=1)" in exported(run, "torchrun", "tp=8", "pp=4", "zero=1")
    assert "torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d" in out


def test_what_a_system_cannot_run_is_refused(run):
    for format, plan, reason in (
        ("deepspeed", ["pp=4", "tp=8", "zero=2"], "its pipeline runs with ZeRO 0 and 1, not 2"),
        ("deepspeed", ["cp=2"], "Ulysses"),
        (
            "deepspeed",
            ["tp=8", "grad_dtype=fp32"],
            "without ZeRO it accumulates gradients in bf16; add grad_dtype=bf16",
        ),
        ("deepspeed", ["tp=8", "zero=1", "pp=2", "layers_per_chunk=41:39"], "PipelineModule divides the layers"),
        ("deepspeed", ["zero=3", "recompute=selective"], "it recomputes whole layers"),
        ("megatron", ["tp=8", "zero=1", "recompute=selective"], "the activation function of a dense MLP alone"),
        ("megatron", ["tp=8", "offload=optimizer"], "it offloads the optimizer of its distributed optimizer, ZeRO 1"),
        ("megatron", ["tp=8", "fused_loss=true"], "as an op of its own, not fused_loss=true"),
        ("megatron", ["tp=8", "zero=1", "recompute=operators"], "not recompute=operators"),
        ("torchtitan", ["pp=4", "tp=8", "schedule=zb-v", "zero=2", "fused_ops=true"], "torch.compile"),
        ("deepspeed", ["zero=2", "offload=optimizer+activations"], "only the inputs of recomputed layers"),
        ("megatron", ["pp=4", "schedule=zb-v"], "its pipeline runs 1f1b and interleaved, not schedule=zb-v"),
        ("megatron", ["dtype=fp16", "grad_dtype=fp16"], "accumulates gradients in fp32 or bf16, not fp16"),
        ("torchtitan", ["zero=1"], "ZeRO 0, 2 or 3"),
        ("torchtitan", ["zero=3", "dtype=fp8"], "it trains in bf16, fp8_rowwise or fp32, not dtype=fp8"),
        ("torchtitan", ["pp=4", "tp=8", "schedule=zb-v"], "zb-v with replicated parameters loses gradients"),
        ("torchtitan", ["pp=4", "tp=8", "schedule=zb-2p", "zero=2"], "not schedule=zb-2p"),
        ("torchtitan", ["zero=3", "recompute=mlp"], "or norms and activation functions, not recompute=mlp"),
        ("parallel_ops", ["ep=1", "offload=optimizer+activations"], "its trainer offloads the optimizer"),
        ("parallel_ops", ["pp=4", "tp=8", "input_grad_first=false"], "add input_grad_first=true"),
        ("parallel_ops", ["pp=64", "schedule=zb-v"], "is 128 stages, but the model has 80 layers; nearest: pp=32"),
        ("parallel_ops", ["tp=8", "schedule=zb-v"], "zb-v needs pp of 2 or more, got 1; nearest: schedule=1f1b"),
    ):
        err = exported(run, format, *plan)
        assert err.startswith(f"error: export: {format} cannot run this plan: ")
        assert reason in err


def test_experts_are_placed_as_the_system_places_them(run):
    """torchtitan spreads experts over tensor-parallel ranks, too; DeepSpeed's have no ZeRO-3."""
    given = {"model": "deepseek-v3"}
    refused = "cannot run this plan: its tensor parallelism does not split experts that are spread over ranks"
    assert refused in exported(run, "torchtitan", "tp=8", "ep=8", "zero=3", "expert_tp=0", **given)
    assert "expert_parallel_degree=8" in exported(run, "torchtitan", "tp=8", "ep=8", "zero=3", **given)
    plan = ["--model", "deepseek-v3", "--cluster", "h100x64", "--batch", "4M", "--plan", "tp=8,ep=8,zero=3"]
    assert json.loads(run("estimate", *plan, "--for", "torchtitan", "--json")[1])["plan"]["expert_tp"] == 1
    refused = "splits experts without expert parallelism; leave expert_tp out"
    assert refused in exported(run, "torchtitan", "tp=8", "zero=3", "expert_tp=1", **given)
    assert "its MoE layers run with ZeRO 0 to 2" in exported(run, "deepspeed", "ep=8", "zero=3", **given)
    assert '"stage": 2' in exported(run, "deepspeed", "ep=8", "zero=2", **given)


def test_to_a_file(run, tmp_path):
    given, file = [*SMALL, *PLAN, "--for", "torchrun"], tmp_path / "run.sh"
    shown = run("estimate", *given)
    assert run("estimate", *given, "--output", file) == shown
    assert file.read_text() == run("estimate", *given, "--output", "-")[1]
