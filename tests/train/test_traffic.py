"""What a step sends and holds is what the planner says of its plan, to the byte.

One group of four ranks takes all plans in turn. What a person sees is not the planner's: agreements before collectives,
a few numbers for the progress line, sums of scalars.
"""

import itertools
import random

import numpy as np
import pytest

from parallel_ops.planner.export.trainer import TRAINER
from parallel_ops.train.config_file import settings_of
from parallel_ops.train.planner_bridge import cluster_of, forecast, model_of, rank_memory
from support.ranks.distributed import ranks
from support.transports import traffic

GPT = {"vocab_size": 64, "seq_length": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 4}
LLAMA = {
    **GPT, "num_kv_heads": 2, "activation": "swiglu", "norm": "rms_norm", "bias": False, "positions": "rotary",
    "tied_embeddings": False,
}  # fmt: skip
# With this capacity every rank sends as many rows as with equal loads, which the planner assumes.
EXPERTS = {
    **LLAMA,
    "experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_experts": 1, "capacity_factor": 1.0},
}
LATENT = {
    **LLAMA,
    "num_kv_heads": None,
    "latent": {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}
DEEPSEEK = {**EXPERTS, "num_kv_heads": None, "latent": {**LATENT["latent"], "q_lora_rank": None}}
ROOMY = {**EXPERTS, "experts": {**EXPERTS["experts"], "capacity_factor": 1.5}}
AHEAD = {"prediction_layers": 1}
# Model, plan, dtype, recomputation: every ZeRO stage, with and without accumulation, every dimension, both dtypes.
CASES = [
    (LLAMA, "dp=4,global_batch=8", "bf16", "none"),
    (GPT, "dp=4,zero=1,global_batch=8", "bf16", "none"),
    (LLAMA, "dp=4,zero=2,global_batch=8", "fp32", "none"),
    (GPT, "dp=4,zero=3,global_batch=16,micro_batch=2", "bf16", "none"),
    (GPT, "dp=4,dp_replicate=2,zero=3,global_batch=8", "fp32", "none"),
    (GPT, "tp=2,dp=2,zero=2,global_batch=4", "fp32", "none"),
    (LLAMA, "tp=2,dp=2,zero=3,sequence_parallel=true,global_batch=8,micro_batch=2", "bf16", "full"),
    (GPT, "tp=2,cp=2,zero=3,cp_kind=all_to_all,global_batch=2", "bf16", "none"),
    (LLAMA, "tp=2,cp=2,zero=3,global_batch=2", "fp32", "selective"),
    (LLAMA, "dp=2,cp=2,global_batch=4", "bf16", "full"),
    (EXPERTS, "dp=4,ep=2,global_batch=8", "bf16", "none"),
    (EXPERTS, "dp=4,ep=4,zero=1,global_batch=8", "fp32", "experts"),
    (EXPERTS, "dp=4,ep=2,zero=3,global_batch=8", "bf16", "full"),
    (EXPERTS, "dp=4,dp_replicate=2,ep=2,zero=2,global_batch=8", "bf16", "none"),
    (EXPERTS, "tp=2,dp=2,ep=2,zero=1,global_batch=4", "bf16", "none"),
    (EXPERTS, "tp=2,dp=2,ep=4,zero=3,sequence_parallel=true,global_batch=4,micro_batch=2", "fp32", "full"),
    (EXPERTS, "tp=2,dp=2,zero=2,global_batch=4", "fp32", "none"),
    (EXPERTS, "tp=2,dp=2,zero=3,sequence_parallel=true,global_batch=4", "bf16", "full"),
    (GPT, "tp=2,dp=2,zero=1,sequence_parallel=true,global_batch=4", "bf16", "none"),
    (LATENT, "tp=2,dp=2,zero=2,global_batch=4", "bf16", "none"),
    (LATENT, "tp=2,dp=2,zero=3,sequence_parallel=true,global_batch=4", "bf16", "full"),
    (DEEPSEEK, "tp=2,dp=2,ep=2,zero=3,sequence_parallel=true,global_batch=4", "fp32", "selective"),
    (ROOMY, "dp=4,ep=4,zero=1,global_batch=8", "bf16", "none"),
    (LLAMA | AHEAD, "dp=4,zero=2,global_batch=8", "bf16", "none"),
    (DEEPSEEK | AHEAD, "dp=4,ep=2,zero=3,global_batch=8", "bf16", "full"),
    (LLAMA | AHEAD, "tp=2,dp=2,zero=1,global_batch=4", "fp32", "none"),
    (LLAMA | AHEAD, "tp=2,dp=2,zero=3,sequence_parallel=true,global_batch=8,micro_batch=2", "bf16", "full"),
    (EXPERTS | AHEAD, "dp=2,cp=2,ep=2,zero=1,global_batch=4", "bf16", "none"),
]
MODELS = {"gpt": GPT, "llama": LLAMA, "experts": EXPERTS, "latent": LATENT, "deepseek": DEEPSEEK}
IDS = [
    f"{plan} {dtype} {recompute}" + " mtp" * ("prediction_layers" in model) + " roomy" * (model is ROOMY)
    for model, plan, dtype, recompute in CASES
]  # fmt: skip
# The weights of rows are 4 bytes beside thousands.
NOT_PLANNED = ("agreement", "report", "weights")


def given(case):
    model, plan, dtype, recompute = case
    return {"model": model, "parallel": plan, "precision": {"dtype": dtype}, "recompute": {"kind": recompute}}


def run(folder, case):
    """What a step of a case sends and holds on each rank."""
    file = folder / "tokens.bin"
    np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16).tofile(file)
    return ranks(4).run(traffic.a_step, {"data": {"paths": [str(file)]}, **given(case)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def settings(case):
    return settings_of({**given(case), "data": {"paths": ["tokens.bin"]}})


def check_sent(case, counts):
    found = settings(case)
    planned = {}
    for transfer in forecast(found, cluster_of("h100", found.plan)).transfers:
        # Shards are over dp_shard and cp together, which are one group where either has one rank.
        name = "data" if transfer.group == "dp" else transfer.group
        if transfer.collective == "all-to-all":
            name = "ep"  # which may be the ranks of cp
        planned[name, transfer.collective] = planned.get((name, transfer.collective), 0) + transfer.bytes
    sent = {}
    for name, kind in {key for count in counts for key in count}:
        if kind not in NOT_PLANNED:
            data = name in ("loss", "fsdp", "dp_shard", "efsdp") or (
                name == "cp" and kind in ("all-gather", "reduce-scatter", "all-reduce")
            )
            key = ("data" if data else name, kind)
            if kind == "all-to-all" or (name == "dp_replicate" and not found.plan.zero):
                key = ("ep" if kind == "all-to-all" else "data", kind)
            # Of a causal ring some ranks send more than others: the planner has their mean.
            sent[key] = sent.get(key, 0) + sum(count.get((name, kind), 0) for count in counts) / 4
    assert {key: size for key, size in sent.items() if size} == planned
    reported = 100 if "experts" not in case[0] else 300  # the loads of all layers
    assert all(sum(size for (_, kind), size in count.items() if kind == "report") < reported for count in counts)


def check_held(case, samples):
    found = settings(case)
    planned = rank_memory(found, gpu=True)
    plan, ranked = found.plan, found.plan.dp_shard * found.plan.cp
    parameters, gradients, optimizer = map(max, zip(*samples, strict=True))
    gathers = plan.zero == 3 and ranked > 1
    gathered = min(held for held, *_ in samples) if gathers else parameters
    # Master weights are the parameters that the optimizer has.
    master = 0 if plan.dtype == "fp32" else planned.optimizer / 3
    # A rank that shares its parameters with no other has them in 16 bits as casts of autocast alone.
    casts = planned.parameters if plan.dtype == "bf16" and plan.dp * plan.cp == 1 else 0
    assert gathered == planned.parameters + master - casts
    assert gradients == planned.gradients
    assert optimizer == planned.optimizer - master
    if gathers:  # beside the shards, at the end of a forward: what is beside the layers
        assert gathered < parameters <= gathered * (1 + ranked)


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
def test_a_step_sends_and_holds_what_the_planner_says(folder, number):
    counts, samples = zip(*run(folder, CASES[number]), strict=True)
    check_sent(CASES[number], counts)
    for each in samples:
        check_held(CASES[number], each)


def drawn(number):
    """A random case of four ranks that the trainer runs."""
    draw = random.Random(number)
    layouts = [sizes for sizes in itertools.product((1, 2, 4), repeat=4) if np.prod(sizes) == 4]
    while True:
        replicate, shard, cp, tp = draw.choice(layouts)
        kind, dp = draw.choice(list(MODELS)), replicate * shard
        micro_batch = draw.choice((1, 2))
        experts = "experts" in MODELS[kind]
        fields = {
            "dp": dp, "dp_replicate": replicate, "cp": cp, "tp": tp, "ep": draw.choice((1, 2, 4)) if experts else 1,
            "zero": draw.randint(0, 3), "sequence_parallel": str(tp > 1 and draw.random() < 0.5).lower(),
            "micro_batch": micro_batch, "global_batch": dp * micro_batch * draw.choice((1, 2, 3)),
            "cp_kind": draw.choice(("ring", "all_to_all")),
        }  # fmt: skip
        kinds = ("none", "selective", "full", *["experts"] * experts)
        text = ",".join(f"{name}={value}" for name, value in fields.items())
        case = MODELS[kind], text, draw.choice(("bf16", "fp32")), draw.choice(kinds)
        try:
            found = settings(case)
        except ValueError:
            continue
        if TRAINER.problem(model_of(found), cluster_of("h100", found.plan), found.plan) is None:
            return case


def test_a_random_plan_sends_and_holds_what_the_planner_says(folder, trials):
    for number in range(2 if trials is None else trials):
        case = drawn(number)
        try:
            counts, samples = zip(*run(folder, case), strict=True)
            check_sent(case, counts)
            for each in samples:
                check_held(case, each)
        except AssertionError as error:
            raise AssertionError(f"plan {number}: {case}: {error}") from error
