"""Settings that do not fit together are refused before anything starts, with the key and the reason in one line."""

import contextlib
import itertools
import re
from dataclasses import replace

import pytest
from pydantic import ValidationError

from parallel_ops.planner import Plan, presets
from parallel_ops.planner.export import find_target
from parallel_ops.train.config_file import describe_errors, settings_of
from support.runs import trainer as runs

GPT, LLAMA, DEEPSEEK = runs.MODELS["gpt"], runs.MODELS["llama"], runs.MODELS["deepseek"]
COMPILED = {"run": {"compile": True}}


def plan(model=None, **fields):
    """A plan for a GPT of four layers, with other fields of the model."""
    return {"model": {**GPT, "num_layers": 4, **(model or {})}, "parallel": fields}


def experts(fields, model=None, **parallel):
    """Experts with other fields."""
    own = {**runs.MODELS["experts"], "num_layers": 4}
    return {"model": {**own, **(model or {}), "experts": {**own["experts"], **fields}}, "parallel": parallel}


def few_experts(fields, model=None, **parallel):
    """Experts that have nothing but their sizes."""
    sizes = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
    swiglu = {"activation": "swiglu", "bias": False, "positions": "rotary"}
    return {"model": {**GPT, **swiglu, **(model or {}), "experts": {**sizes, **fields}}, "parallel": parallel}


def lora(options, **sections):
    return {"model": LLAMA, **sections, "lora": {"rank": 4, **options}}


def by_length(model=None, sections=None, **parallel):
    given = {"data": {"document_mask": True}, **(sections or {})}
    return {"model": {**LLAMA, **(model or {})}, "parallel": {**parallel, "cp_groups": "by_length"}, **given}


REFUSED = [
    # Plans.
    (plan({"seq_length": 3}, tp=4), "model.seq_length is 3, of which one of the tp=4 ranks would have no row"),
    (plan({"vocab_size": 5}, tp=4), "model.vocab_size is 5, of which one of the tp=4 ranks would have no row"),
    (plan(pp=2, layers_per_chunk=[4, 0]), "layers_per_chunk leaves pipeline rank 1 without a layer"),
    (plan(pp=4, schedule="zb-v"), r"pp \* virtual_stages is 8 stages, but the model has 4 layers; nearest: "),
    (
        plan(pp=2, schedule="interleaved", micro_batch=8),
        r"parallel\.global_batch interleaved 1F1B needs micro-b.* nearest: global_batch=16, micro_batch=4",
    ),
    (plan(pp=2, schedule="dualpipe-v", micro_batch=4), r"needs 4 micro-batches .* nearest: global_batch=16"),
    (plan(pp=2, layers_per_chunk=[1, 2]), "layers_per_chunk add up to 3, not to 4 layers"),
    (plan(pp=2, schedule="zb-x"), r"schedule must be one of .*zb-v.*; did you mean 'zb-v'"),
    (plan(schedule="zb-v"), "zb-v needs pp of 2 or more, got 1"),
    (plan(pp=2, schedule="zb-h1") | COMPILED, r"run\.compile must be false with schedule 'zb-h1'"),
    ({"logging": {"trace": "folder"}}, r"logging\.trace needs parallel\.pp of 2 or more"),
    # Experts.
    (
        few_experts({"shared_experts": 1, "ffn_hidden_size": 7}, tp=2),
        "model.experts have shared experts of width 7 together, which tp=2 must divide",
    ),
    (
        few_experts({"capacity_factor": 1.0}, {"seq_length": 15}, cp=2, ep=2),
        "data.seq_length is 15, which cp=2 must divide with capacity_factor and ep",
    ),
    (
        few_experts({}, tp=2, dp=2, dp_replicate=2, ep=2, zero=1),
        "parallel.ep with dp_replicate needs zero of 1 or more, and dp_shard . cp of 2 or more",
    ),
    (few_experts({}, dp=4, dp_replicate=2, ep=2, zero=0), "parallel.ep with dp_replicate needs zero of 1 or more"),
    (experts({"num_experts": 4, "groups": 2, "top_groups": 2}, dp=8, ep=8), r"parallel\.ep must divide the model's 4"),
    (experts({}, dp=2, ep=2, dp_replicate=2), r"ep must divide dp_shard \* cp \(1\), got 2"),
    (experts({}, tp=4, ep=2), r"parallel\.ep must be tp \(4\) where dp_shard and cp are 1, got 2"),
    (experts({}, tp=2, dp=2, expert_tp=2), r"parallel\.expert_tp must be 0 or 1, got 2: its experts are not split"),
    (experts({"top_k": 9}), "top_k must be at most 4, the experts to choose from, got 9"),
    (experts({"topk": 2}), "unexpected keyword argument 'topk'"),
    (experts({"dense_layers": 4}), r"experts\.dense_layers must be below num_layers \(4\), got 4"),
    (experts({"aux_loss": -1.0}), "aux_loss must be at least 0, got -1.0"),
    (experts({"selection_bias": False}), "balance_rate needs selection_bias=True"),
    # Groups of ranks by length of documents.
    (by_length(pp=2, cp=2, cp_layout="auto"), "must not be auto with pp"),
    (by_length(sections={"data": {"document_mask": False}}, dp=2), "by_length needs data.document_mask"),
    (by_length(), "by_length needs an even dp"),
    (by_length(dp=2, pp=2), "by_length needs parallel.pp of 1"),
    (by_length(dp=2, tp=2, sequence_parallel=True), "by_length needs sequence_parallel of false"),
    (by_length(cp=2, cp_kind="all_to_all"), "by_length needs parallel.cp_kind of ring"),
    (by_length({"experts": runs.MODELS["experts"]["experts"]}, dp=2), "by_length needs a model without"),
    (by_length(sections=COMPILED, dp=2), "by_length needs run.compile of false"),
    # Adapters.
    (lora({"targets": ["qproj"]}), r"'qproj' matches no linear; their names are like layers\.0\.attention\.q "),
    (lora({"dropout": 0.1}, parallel={"cp": 2}), r"needs parallel\.cp of 1, got 2"),
    (lora({}, model={**LLAMA, "freeze": ["tokens.*"]}), "must be left out with lora"),
    (
        lora({"dropout": 0.1}, model=DEEPSEEK),
        r"need dropout of 0, as peft's do, got 0\.1 for layers\.1\.mlp\.experts\.gate_up",
    ),
    (lora({"targets": ["layers.2.*"]}, model=DEEPSEEK), r"'layers\.2\.\*' matches no linear"),
    # Data, evaluation and recomputation.
    (
        {"data": {"sources": [{"paths": ["a"], "weight": 1.0}], "growing": True}},
        r"data\.growing needs data\.paths: a mix",
    ),
    ({"data": {"growing": True}, "evaluation": {"share": 0.1}}, r"evaluation\.share must be 0 with data\.growing"),
    ({"evaluation": {"paths": ["a"], "share": 0.1}}, r"evaluation\.share must be 0 with evaluation\.paths"),
    ({"evaluation": {"interval": 5}}, r"evaluation\.interval needs data to evaluate on"),
    ({"evaluation": {"sequences": 5}}, r"evaluation\.sequences needs data to evaluate on"),
    (
        {"evaluation": {"paths": ["a"]}, "checkpoint": {"keep_best": True}},
        r"checkpoint\.dir is needed with checkpoint\.keep_best",
    ),
    ({"checkpoint": {"keep_best": True, "dir": "x"}}, r"checkpoint\.keep_best needs an evaluation"),
    ({"recompute": {"kind": "selective", "offload": "all"}}, r"recompute\.offload must be 'inputs'"),
    ({"recompute": {"offload": "inputs"}} | COMPILED, r"run\.compile must be false with"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_does_not_fit_is_refused(sections, message):
    with pytest.raises(ValidationError) as raised:
        runs.settings_of("tokens.bin", **sections)
    said = describe_errors(raised.value)
    assert re.search(message, said) and "\n" not in said, said


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "qwen2-72b", "deepseek-v3", "glm-4.5-air"])
def test_the_planner_knows_which_sizes_float8_takes(name):
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    model, cluster, target = presets.model(name), presets.cluster("b200x8"), find_target("parallel_ops")
    model = replace(model, num_layers=model.dense_layers + 3)
    for tp, dtype in itertools.product((1, 4, 8), ("fp8_rowwise", "fp8_blockwise", "mxfp8")):
        plan = Plan(dp=8 // tp, tp=tp, sequence_parallel=tp > 1, dtype=dtype, global_batch=8, fused_loss=True,
                    expert_tp=int(bool(model.experts)))  # fmt: skip
        data = tomllib.loads(target.write(model, cluster, plan))
        runs = target.runs(model, cluster, plan)
        with contextlib.nullcontext() if runs else pytest.raises(ValueError, match=r"sizes of (linears|experts) that"):
            settings_of(data)
