"""``parallelize``: a model trains over any ranks as in one process."""

import functools
import itertools

import pytest
import torch
from torch import nn

from parallel_ops import ParallelMesh
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.planner import Plan
from parallel_ops.train import parallelize
from support.parallelism import parallelized
from support.ranks.distributed import ranks

SIZES = [
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 4},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2},
    {"tp": 4},
    {"cp": 4},
    {"cp": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
    {"dp_replicate": 2, "cp": 2},
]


@functools.cache
def alone(kind):
    return parallelized.train(0, kind, {}, {})


def cases():
    """Every layout with every stage that it knows; the rest takes turns."""
    turns = zip(
        itertools.cycle(("none", "full", "selective")), itertools.cycle((1, 2)), itertools.cycle(("gpt", "llama"))
    )
    for sizes in SIZES:
        for zero in (1, 2, 3) if "dp_shard" in sizes else (0,):
            recompute, accumulation, kind = next(turns)
            sequence_parallel = "tp" in sizes
            yield (
                kind,
                sizes,
                {"zero": zero, "recompute": recompute, "sequence_parallel": sequence_parallel},
                accumulation,
            )


@pytest.mark.parametrize(("kind", "sizes", "options", "accumulation"), list(cases()), ids=str)
def test_any_plan_trains_as_one_process(kind, sizes, options, accumulation):
    losses, norms = alone(kind)
    for got_losses, got_norms in ranks(4).run(parallelized.train, kind, sizes, options, accumulation):
        torch.testing.assert_close(torch.tensor(got_losses), torch.tensor(losses), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(got_norms), torch.tensor(norms), rtol=1e-5, atol=0)


def recomputed(config, kinds):
    """Bytes that the forward keeps under each kind of recomputation; loss and gradients have the same bits."""
    kept, results = {}, []
    tokens, targets = torch.randint(31, (2, 8, 4), generator=torch.Generator().manual_seed(0))
    for kind in kinds:
        torch.manual_seed(0)
        model = parallelize(Transformer(config), ParallelMesh(), Plan(dtype="fp32", recompute=kind))
        assert list(model.state_dict()) == list(Transformer(config).state_dict())
        kept[kind] = parallelized.saved_bytes(model, tokens, targets)
        loss = model(tokens, targets)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(results[-1], results[0], strict=True))
    return kept


def test_recomputation_keeps_fewer_bytes_and_the_same_bits():
    kept = recomputed(parallelized.MODELS["gpt"], ("none", "selective", "full"))
    assert kept["full"] < kept["selective"] < kept["none"]


def test_experts_alone_are_recomputed():
    """Their matmuls and the activation; what every token uses is kept."""
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_heads=2, vocab_size=31, seq_length=8, activation="swiglu", bias=False,
        experts=ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=24, shared_experts=1),
    )  # fmt: skip
    kept = recomputed(config, ("none", "experts", "full"))
    # Of 64 rows in each of two layers: gate and up before the activation, and what comes out of it.
    assert kept["none"] - kept["experts"] == 2 * 64 * (2 + 1) * 24 * 4
    assert kept["full"] < kept["experts"]


def test_any_module_gets_recomputation():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    x = torch.randn(2, 4)
    before, names = model(x), list(model.state_dict())
    assert parallelize(model, ParallelMesh(), Plan(dtype="fp32", recompute="full"), blocks="*") is model
    assert torch.equal(model(x), before) and list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (Plan(tp=2), {}, r"the plan has tp=2, the mesh 1; make it ParallelMesh\(tp=2\)"),
        (Plan(recompute="operators"), {}, "recompute must be one of"),
        (Plan(recompute="experts"), {}, "recompute='experts' needs a model with experts"),
        (Plan(dtype="fp8"), {}, "dtype must be one of"),
        (Plan(offload="optimizer"), {}, "offload needs zero"),
        (Plan(offload="optimizer", zero=1), {}, r"offload needs dp_shard \* cp of 2 or more"),
        (None, {"recompute_every": 0}, "recompute_every must be at least 1, got 0"),
        (None, {"blocks": "blocks.*"}, "no module whose name is like 'blocks"),
        (None, {"precision": "mxfp8"}, "mxfp8 needs the plan's dtype to be 'bf16', got 'fp32'"),
        (Plan(), {"precision": "fp8"}, r"precision must be one of 'bf16', 'fp8_rowwise', .* got 'fp8'"),
        (Plan(), {"precision": "mxfp8", "float8_bf16_blocks": -1}, "float8_bf16_blocks must be at least 0, got -1"),
    ],
)
def test_a_wrong_argument_is_named(plan, options, message):
    with pytest.raises(ValueError, match=message):
        parallelize(nn.Sequential(nn.Linear(2, 2)), ParallelMesh(), plan, **{"blocks": "*", **options})


@pytest.mark.parametrize("grad_reduce", ["fp32", "backend"])
def test_the_trainers_model_has_the_reduction_of_its_settings(grad_reduce):
    pytest.importorskip("pydantic")
    model = {"vocab_size": 64, "seq_length": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 4}
    given = {
        "model": {**model, "grad_reduce": grad_reduce},
        "data": {"paths": ["tokens.bin"]},
        "parallel": {"dp": 2, "tp": 2, "global_batch": 8},
    }
    assert ranks(4).run(parallelized.reductions_of_settings, given) == [{grad_reduce}] * 4


def test_offloaded_parameters_are_on_the_host_and_buffers_on_the_device():
    """FSDP2 copies parameters to the device for each use. The bias of a router's choice is none."""
    pytest.importorskip("pydantic")
    given = {
        "model": {
            "vocab_size": 64, "seq_length": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 4,
            "activation": "swiglu", "bias": False,
            "experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "selection_bias": True},
        },
        "data": {"paths": ["tokens.bin"]},
        "parallel": {"dp": 2, "zero": 3, "offload": "optimizer", "global_batch": 4},
    }  # fmt: skip
    assert ranks(2).run(parallelized.devices_of_offloaded, given) == [({"cpu"}, {"meta"})] * 2


@pytest.mark.parametrize("zero", [0, 3])
def test_tables_of_rotary_positions_stay_in_fp32(zero):
    assert ranks(2).run(parallelized.dtypes_of_blocks, zero) == [({torch.bfloat16}, {torch.float32})] * 2
