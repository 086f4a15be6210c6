"""``apply(deterministic=True)`` in Megatron's GPT: run twice, restarted from a checkpoint, against recorded losses."""

import json
from pathlib import Path

import pytest
import torch

from support.ranks.distributed import ranks

pytest.importorskip("megatron", reason="megatron-core is not installed")

from megatron.core.transformer import TransformerConfig

from parallel_ops.integrations import megatron
from parallel_ops.integrations.megatron.determinism import _environment
from support.integrations import megatron as trained
from support.integrations.megatron import GATED, Case

RECORDED = Path(__file__).parent / "recorded_losses.json"
# What Megatron's deterministic mode asks to switch off is on: the fused loss, and the overlap of the linears (spec).
BOTH = {
    "sequence_parallel": True, "cross_entropy_loss_fusion": True, "deterministic_mode": True,
    "hidden_dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
LLAMA = GATED | {"normalization": "RMSNorm", "num_query_groups": 2}
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.01,
    "moe_ffn_hidden_size": 64,
}  # fmt: skip
CASES = {
    "gpt": Case("spec", tp=2, steps=4, deterministic=True, config=BOTH),
    "llama": Case("spec", tp=2, steps=4, deterministic=True, config=BOTH | LLAMA),
    "experts": Case("spec", tp=2, ep=2, etp=1, steps=4, deterministic=True, config=BOTH | LLAMA | EXPERTS),
    "pipeline": Case("spec", pp=2, steps=4, deterministic=True, config=BOTH | {"sequence_parallel": False}),
    "functions alone": Case("apply", tp=2, steps=4, deterministic=True, config=BOTH),
}


@pytest.mark.runs
def test_the_same_bits_on_every_run_and_after_a_restart():
    cases = list(CASES.values())
    first, again = ranks(2).run(trained.train, *cases), ranks(2).run(trained.train, *cases)
    assert first == again
    assert [[list(part) for part in case] for case in ranks(2).run(trained.restart, *cases)[-1]] == [
        [list(part) for part in case] for case in first[-1]
    ]
    # To the digits that another CPU gives, too: a change of an op, of its order of sums or of its masks shows here.
    found = {name: result[0] for name, result in zip(CASES, first[-1], strict=True)}
    recorded = json.loads(RECORDED.read_text())
    for name, losses in found.items():
        assert losses == pytest.approx(recorded[name], rel=2e-6), f"{name}: {losses}"


def test_the_state_of_before_comes_back():
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with megatron.apply(deterministic=True):
            assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
            with pytest.raises(RuntimeError, match="applied already"):
                megatron.apply()
        assert torch.backends.cudnn.benchmark and torch.are_deterministic_algorithms_enabled() == before[0]
        with megatron.apply():
            assert torch.are_deterministic_algorithms_enabled() == before[0]
    finally:
        torch.backends.cudnn.benchmark = before[1]


def test_what_may_differ_is_said():
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, cross_entropy_loss_fusion=True, use_cpu_initialization=True
    )
    model = torch.nn.Module()
    model.config = config
    with megatron.apply("softmax", deterministic=True) as applied:
        reasons = applied.unreplaced(model)
    assert {name.rpartition(".")[2] for name in reasons} == {"deterministic_mode", "cross_entropy_loss_fusion"}
    config.deterministic_mode = True
    with megatron.apply(deterministic=True) as applied:
        assert not [why for why in applied.unreplaced(model).values() if why.startswith("deterministic")]


@pytest.mark.parametrize(
    ("variables", "started", "named"),
    [
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, False, "CUBLAS_WORKSPACE_CONFIG to be one of :4096:8, :16:8, got ':0:0'"),
        ({"NCCL_ALGO": "NVLS"}, False, "NCCL_ALGO to be one of"),
        ({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, False, "NVTE_ALLOW_NONDETERMINISTIC_ALGO to be one of 0, got '1'"),
        ({}, True, "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before the first call of CUDA"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, True, "NCCL_ALGO=.*in the environment before init_process_group"),
    ],
)
def test_variables_of_the_environment(variables, started, named):
    with pytest.raises(ValueError, match=f"apply: deterministic=True needs {named}"):
        _environment(variables, True, started, started)
    assert _environment(variables, False, started, started) == {}


def test_variables_that_are_missing_are_set():
    assert _environment({"NCCL_ALGO": "Ring"}, True, False, False) == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }  # fmt: skip
