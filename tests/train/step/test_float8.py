"""Training with float8 matmuls in the layers' linears, emulated."""

import functools

import pytest
import torch
from torch import nn

from parallel_ops.comm import ParallelMesh
from parallel_ops.layers.linear_base import ParallelLinear
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.ops.float8_recipes import RECIPES
from parallel_ops.planner.plan import Plan
from parallel_ops.train import parallelize
from support.ranks.distributed import ranks
from support.runs import trainer as runs

MODEL = runs.MODELS["llama"] | {"num_layers": 3, "ffn_hidden_size": 64}
FP8 = {"dtype": "bf16", "linears": "fp8_rowwise", "fp8_emulation": True}
# Sizes that blocks of 128 divide, on two ranks too.
WIDE = MODEL | {"hidden_size": 256, "ffn_hidden_size": 256}


def settings_of(data, precision=FP8, **sections):
    return runs.settings_of(data, **{"model": MODEL, "precision": precision, **sections})


def losses(data, precision=FP8, **sections):
    return [loss for loss, _ in runs.steps_of(0, settings_of(data, precision, **sections))]


@functools.cache
def alone(data):
    return losses(data)


@pytest.mark.runs
@pytest.mark.parametrize("linears", ["fp8_rowwise", "mxfp8"])
def test_200_steps_reach_the_loss_of_bf16(data, linears):
    long = {"run": {"steps": 200}, "parallel": {"global_batch": 8, "micro_batch": 8}, "optimizer": {"lr": 3e-3}}
    plain, fp8 = (losses(data, precision, **long) for precision in ({"dtype": "bf16"}, FP8 | {"linears": linears}))
    assert plain[-1] < 0.6 * plain[0]  # it learns
    ends = [sum(each[-20:]) for each in (plain, fp8)]
    assert ends[1] == pytest.approx(ends[0], rel=5e-3) and plain != fp8


@pytest.mark.parametrize("zero", [0, 3])
def test_data_parallel_ranks_are_as_one(data, zero):
    settings = settings_of(data, parallel={"dp": 2, "zero": zero, "global_batch": 8, "micro_batch": 1})
    for steps in ranks(2).run(runs.steps_of, settings):
        assert [loss for loss, _ in steps] == pytest.approx(alone(data), rel=2e-3)


@pytest.mark.parametrize(
    ("plan", "bias"),
    [({"tp": 2, "sequence_parallel": True}, True),
     pytest.param({"tp": 2, "sequence_parallel": False}, False, marks=pytest.mark.runs),
     pytest.param({"pp": 2, "layers_per_chunk": [1, 2]}, False, marks=pytest.mark.runs),
     pytest.param({"pp": 3, "schedule": "zb-h1"}, True, marks=pytest.mark.runs),
     ({"pp": 2, "dp": 2, "zero": 2, "layers_per_chunk": [1, 2], "schedule": "zb-h1"}, False),
     pytest.param({"tp": 2, "pp": 2, "layers_per_chunk": [2, 1], "schedule": "gpipe"}, True, marks=pytest.mark.runs)],
    ids=str,
)  # fmt: skip
def test_tensor_and_pipeline_parallel_ranks_are_as_one(data, plan, bias):
    model = MODEL | {"bias": bias}
    want = torch.tensor(runs.steps_of(0, settings_of(data, model=model)))
    settings = settings_of(data, model=model, parallel=plan)
    for steps in ranks(settings.plan.gpus).run(runs.steps_of, settings):
        got = torch.tensor(steps)
        torch.testing.assert_close(got[:, 0], want[:, 0], rtol=2e-3, atol=0)
        torch.testing.assert_close(got[:2, 1], want[:2, 1], rtol=1e-2, atol=0)  # gradient norms


def test_heads_that_ranks_share_under_a_split_backward(data):
    """Gradients of the weights of keys and values are summed over ranks, when the schedule computes them."""
    model = MODEL | {"num_heads": 2, "num_kv_heads": 1}
    want = [loss for loss, _ in runs.steps_of(0, settings_of(data, model=model))]
    plan = {"tp": 2, "pp": 2, "layers_per_chunk": [1, 2], "schedule": "zb-h1"}
    for steps in ranks(4).run(runs.steps_of, settings_of(data, model=model, parallel=plan)):
        assert [loss for loss, _ in steps] == pytest.approx(want, rel=2e-3)


def test_blocks_and_mxfp8_over_ranks(data):
    for linears in ("fp8_blockwise", "mxfp8"):
        precision = FP8 | {"linears": linears}
        options = {"model": WIDE, "run": {"steps": 2}}
        want = losses(data, precision, **options)
        assert want != losses(data, {"dtype": "bf16"}, **options)
        for plan in ({"tp": 2}, {"dp": 2, "zero": 3}):
            settings = settings_of(data, precision, **options, parallel={"global_batch": 8, "micro_batch": 1} | plan)
            for steps in ranks(2).run(runs.steps_of, settings):
                assert [loss for loss, _ in steps] == pytest.approx(want, rel=2e-3)


@pytest.mark.parametrize("kind", ["selective", pytest.param("full", marks=pytest.mark.runs)])
def test_recomputation_changes_nothing(data, kind):
    assert losses(data, recompute={"kind": kind}) == alone(data)


def test_compiled_blocks(data, monkeypatch):
    # Traced as Inductor would have it, without its C++, which takes long to compile.
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="aot_eager"))
    assert losses(data, run={"compile": True}) == pytest.approx(alone(data), rel=2e-3)


def test_first_and_last_layers_stay_and_gradients_reach_all(data):
    trainer = runs.trainer_of(settings_of(data))
    linears = {name: m for name, m in trainer.model.named_modules() if isinstance(m, ParallelLinear)}
    for name, linear in linears.items():
        assert linear.precision == ("fp8_rowwise" if name.startswith("layers.1.") else "bf16")
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for _ in range(2):  # the first rate of the warmup may be 0
        trainer.step()
    trainer.loader.close()
    assert all(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize(
    ("precision", "sections", "message"),
    [
        ({"fp8_emulation": False}, {}, r"precision\.linears: fp8_rowwise products need a GPU.*fp8_emulation = true"),
        ({"linears": "bf16"}, {}, "needs precision.linears fp8_rowwise, fp8_blockwise, mxfp8, got 'bf16'"),
        ({"linears": "fp8_blockwise"}, {}, r"(?s)precision\.linears.* that 128 divides on each rank.*layers\.1"),
        ({"fp8_bf16_layers": 2}, {}, "is 2, at the start and at the end, which leaves none of the 3 layers"),
        (
            {"experts": "mxfp8"},
            {"model": {**MODEL, "experts": {"num_experts": 2, "top_k": 1, "ffn_hidden_size": 48}}},
            r"(?s)precision\.experts.*that 32 divides: experts' ffn_hidden_size is 48; .*= .bf16. keeps",
        ),
        ({"experts": "mxfp8"}, {}, r"(?s)precision\.experts.*must be left out for a model without experts"),
        ({}, {"model": {**MODEL, "ffn_hidden_size": 72}}, r"layers\.1\.mlp\.gate has 32 x 72"),
        ({}, {"parallel": {"tp": 4, "global_batch": 8}}, r"on each rank of tp: layers\.1\.attention\.q has 32 x 8"),
    ],
)
def test_refusals_name_the_key(data, precision, sections, message):
    with pytest.raises(ValueError, match=message):
        runs.trainer_of(settings_of(data, {**FP8, **precision}, **sections))


def test_a_model_whose_layers_all_stay_in_16_bits_is_refused():
    config = TransformerConfig(vocab_size=32, seq_length=16, num_layers=2, hidden_size=32, num_heads=4)
    with pytest.raises(ValueError, match=r"mxfp8 has no linear of parallel_ops\.layers in the blocks 1 to 0 of 2"):
        parallelize(Transformer(config), ParallelMesh(), Plan(global_batch=1, dtype="bf16"), precision="mxfp8")


EXPERTS = MODEL | {
    "hidden_size": 128, "ffn_hidden_size": 128, "num_layers": 2,
    "experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 128, "shared_experts": 1, "aux_loss": 0.01},
}  # fmt: skip
EXPERT_PLANS = [
    {"dp": 2, "ep": 2, "zero": 3}, {"tp": 2, "dp": 2, "ep": 2, "zero": 1, "sequence_parallel": True}, {"tp": 2},
    {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "schedule": "zb-h1"},
]  # fmt: skip


@pytest.mark.parametrize(
    "recipe", ["mxfp8", *(pytest.param(r, marks=pytest.mark.runs) for r in RECIPES if r != "mxfp8")]
)
def test_experts_over_ranks(data, recipe):
    """Experts alone in float8; gradient norms are as close as those of linears."""
    options = {"model": EXPERTS, "run": {"steps": 2}}
    precision = FP8 | {"linears": "bf16", "experts": recipe, "fp8_bf16_layers": 0}
    want, plain = (
        torch.tensor(runs.steps_of(0, settings_of(data, each, **options))) for each in (precision, {"dtype": "bf16"})
    )
    assert (want != plain).any() and (want[:, 0] - plain[:, 0]).abs().max() < 0.02
    for plan in EXPERT_PLANS if recipe == "fp8_rowwise" else EXPERT_PLANS[-1:]:
        settings = settings_of(data, precision, **options, parallel={"global_batch": 8, "micro_batch": 1} | plan)
        for steps in ranks(settings.plan.gpus).run(runs.steps_of, settings):
            torch.testing.assert_close(torch.tensor(steps)[:, 0], want[:, 0], rtol=2e-3, atol=0)
            torch.testing.assert_close(torch.tensor(steps)[:1, 1], want[:1, 1], rtol=1e-2, atol=0)
