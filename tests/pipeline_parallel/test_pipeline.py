"""The stages of a transformer under every schedule and parallelism, beside one process."""

import functools
import random
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as runtime

from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.pipeline_parallel import Stages, schedule_of
from parallel_ops.pipeline_parallel.cut import cut
from parallel_ops.pipeline_parallel.pipeline import defer_weight_gradients
from parallel_ops.planner import presets
from parallel_ops.planner.communication.step_traffic import PipelineTraffic
from parallel_ops.planner.compute.software import efficiency
from parallel_ops.planner.plan import SCHEDULES, Plan
from parallel_ops.train.planner_model import planner_model
from support.further import thinned
from support.parallelism.layers import mesh_of
from support.ranks import staged
from support.ranks.distributed import Raised, ranks
from support.ranks.staged import CONFIGS, inputs_of

_KINDS = {"F": runtime.F, "I": runtime.I, "W": runtime.W, "B": runtime.B}


class _Stage(Transformer):
    """One stage, as torch calls it: with the stream and the number of a micro-batch."""

    def __init__(self, config: TransformerConfig, stages: Stages, number: int, inputs: list[dict[str, Any]]) -> None:
        super().__init__(config, stages=stages, pp_rank=number)
        self._number, self._inputs = number, inputs

    def forward(self, stream: Tensor | None = None, micro_batch: Any = None) -> Tensor:  # type: ignore[override]
        given = self._inputs[int(micro_batch)]
        return super().forward(**given, stage=self._number, hidden_states=stream if self._number else None)


def step(rank: int, text: str, kind: str) -> dict[str, Tensor]:
    """The gradients of this rank's stages."""
    plan, config = Plan.parse(text), CONFIGS[kind]
    mesh, inputs = mesh_of(pp=plan.pp), inputs_of(config, plan, 0, False)
    placed = cut(config.num_layers, plan)
    # To torch each stage is a module of its own: a pipeline of as many ranks, some of which are on one.
    alone, schedule, held = Stages(placed.sizes, placed.count), schedule_of(plan), []
    models = {}
    for number in placed.on(rank):
        torch.manual_seed(0)
        model = models[number] = _Stage(config, alone, number, inputs)
        queue = defer_weight_gradients(model)
        assert queue is not None
        last = number == placed.count - 1
        stream = torch.zeros(model.stream_shape(config.seq_length, plan.micro_batch), requires_grad=True)
        out = torch.zeros((), requires_grad=True) if last else stream.detach().clone().requires_grad_()
        given = stream if number else torch.zeros(1)
        shapes: dict[str, Any] = {"input_args": (given,), "output_args": (out,)}
        # With shapes unknown, it runs an extra forward and backward, whose weight gradients would stay in the queue.
        shapes |= {"input_grads": (stream.detach() if number else None,), "output_grads": (out.detach().clone(),)}
        held.append(
            PipelineStage(
                model, number, placed.count, torch.device("cpu"), group=mesh.group("pp"), dw_builder=queue.dw_builder,
                **shapes,
            )
        )  # fmt: skip
    count, is_last = plan.micro_batches, placed.count - 1 in models
    run: Any = runtime._PipelineScheduleRuntime(held, count, loss_fn=lambda y, _: y / count, scale_grads=False)
    run._prepare_schedule_with_comms(
        {
            r: [runtime._Action(a.stage, _KINDS[a.kind], a.micro_batch) for a in order]
            for r, order in enumerate(schedule)
        }
    )
    for stage in run._stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    run._step_microbatches(
        [(torch.zeros(1),) if 0 in models else () for _ in range(count)],
        [{"micro_batch": torch.tensor(number)} for number in range(count)],
        [torch.zeros(1)] * count if is_last else None,
        [] if is_last else None,
        return_outputs=False,
    )
    return {name: p.grad for model in models.values() for name, p in model.named_parameters() if p.grad is not None}


@functools.cache
def one_process(text, kind, documents):
    return staged.one_process(staged.CONFIGS[kind], Plan.parse(text), documents)


def agrees(results, text, kind, documents=False, rtol=4e-6):
    """Loss, gradients and norm of all ranks are those of one process; each parameter is on some rank."""
    plan = Plan.parse(text)
    loss, grads = one_process(reference(text), kind, documents)
    norm = torch.stack([g.norm() for g in grads.values()]).norm().item()
    seen = set()
    for _, own, found, _ in results:
        seen |= set(own)
        for name, grad in own.items():
            # Of a bias of keys, whose gradient is zero, only rounding is left.
            error = (grad - grads[name]).norm().item() / max(grads[name].norm().item(), 1e-2 * norm)
            assert error < rtol, (text, name, error)
        assert found == pytest.approx(norm, rel=rtol), text
    assert seen == set(grads), text
    assert sum(own[0] for own in results) * plan.pp / plan.gpus == pytest.approx(loss, rel=rtol), text


def reference(text):
    """What of a plan one process needs: the replicas and their micro-batches."""
    plan = Plan.parse(text)
    return f"dp={plan.dp},global_batch={plan.global_batch},micro_batch={plan.micro_batch},dtype=fp32"


def test_any_schedule_and_parallelism_equals_one_process(trials):
    for text, kind, documents in staged.draws(0, trials or 10):
        agrees(ranks(4).run(staged.step, text, kind, documents), text, kind, documents)


def test_layers_that_predict_further_tokens_are_in_the_last_stage():
    """Where the first stage's table of tokens is too; in a V both are on one rank."""
    for plan, documents in (
        ("pp=2,tp=2,sequence_parallel=true,schedule=1f1b,global_batch=3", True),
        ("pp=2,cp=2,zero=1,schedule=zb-h1,global_batch=2", False),
        ("pp=2,dp=2,zero=3,recompute=full,schedule=dualpipe-v,virtual_stages=2,global_batch=8", False),
    ):
        text = f"{plan},dtype=fp32"
        agrees(ranks(4).run(staged.step, text, "further", documents), text, "further", documents)


def test_replicas_of_what_is_reduced_after_each_micro_batch():
    """The input halves of two micro-batches are reduced together, their weight halves are not."""
    text = "pp=2,dp=2,dp_replicate=2,schedule=zb-h1,global_batch=12,zero=3,dtype=fp32"
    agrees(ranks(4).run(staged.step, text, "gpt2"), text, "gpt2")
    text = "pp=2,dp=4,dp_replicate=2,schedule=zb-v,virtual_stages=2,global_batch=16,zero=3,dtype=bf16"
    agrees(ranks(8).run(staged.step, text, "llama"), text, "llama", rtol=0.05)


@pytest.mark.parametrize("schedule", thinned(["zb-v", "1f1b"]))
def test_eight_ranks(schedule):
    text = f"pp=2,dp=2,tp=2,zero=1,sequence_parallel=true,schedule={schedule},global_batch=8,dtype=fp32"
    text += ",virtual_stages=2" if schedule == "zb-v" else ""
    agrees(ranks(8).run(staged.step, text, "gpt2"), text, "gpt2")


@pytest.mark.parametrize("schedule", thinned(["zb-h1", "1f1b", "zb-v"], 3))
def test_dropout_is_that_of_one_process(schedule):
    """Masks depend on the micro-batch and the layer, not on the order in which a schedule computes them."""
    virtual = 2 if schedule == "zb-v" else 1
    text = f"pp=4,schedule={schedule},virtual_stages={virtual},global_batch=5,recompute=full,dtype=fp32"
    agrees(ranks(4).run(staged.step, text, "dropout"), text, "dropout")


def test_a_pipeline_alone_without_a_split_backward_has_the_bits_of_one_process():
    text = "pp=4,schedule=1f1b,global_batch=6,dtype=fp32"
    _, grads = one_process(reference(text), "untied", False)
    for _, own, _, _ in ranks(4).run(staged.step, text, "untied", False, 1, False):
        for name, grad in own.items():
            assert torch.equal(grad, grads[name]), name


@pytest.mark.parametrize("schedule", thinned(["dualpipe-v", "zb-h1"]))
def test_every_run_has_the_same_bits(schedule):
    virtual = 2 if schedule == "dualpipe-v" else 1
    text = f"pp=2,dp=2,zero=2,schedule={schedule},virtual_stages={virtual},global_batch=16,dtype=fp32"
    once, twice = (ranks(4).run(staged.step, text, "gpt2", False, steps) for steps in (1, 2))
    for (loss, grads, norm, _), (other_loss, other_grads, other_norm, _) in zip(once, twice, strict=True):
        assert (loss, norm) == (other_loss, other_norm)
        assert all(torch.equal(grad, other_grads[name]) for name, grad in grads.items())


def test_gradients_add_up_over_steps():
    """That of the table which both ends share, too."""
    for more in ("tp=2", "dp=2,zero=2"):
        text = f"pp=2,schedule=1f1b,global_batch=4,dtype=fp32,{more}"
        for (once, norm), (twice, double) in ranks(4).run(staged.accumulated, text):
            assert double == pytest.approx(2 * norm, rel=1e-5)
            for name, grad in twice.items():
                torch.testing.assert_close(grad, 2 * once[name], rtol=1e-5, atol=1e-5, msg=f"{more}: {name}")


@pytest.mark.parametrize("more", thinned(["dp=2,zero=3", "dp=2,zero=1", "tp=2", "cp=2,zero=2"]))
def test_bfloat16(more):
    """As close to fp32 as one process in bfloat16, but for the order of sums."""
    text = f"pp=2,schedule=zb-h1,global_batch=8,dtype=bf16,{more}"
    agrees(ranks(4).run(staged.step, text, "llama"), text, "llama", rtol=0.05)


# Without data parallelism bf16 is autocast's, whose residual stream is fp32.
ALONE = (
    "pp=4,schedule=1f1b,global_batch=6",
    "pp=4,schedule=interleaved,virtual_stages=2,global_batch=8,micro_batch=2",
    "pp=2,tp=2,schedule=zb-h1,global_batch=5",
    "pp=2,tp=2,schedule=zb-2p,global_batch=5,scatter_gather=false",
    "pp=2,tp=2,schedule=zb-v,virtual_stages=2,global_batch=5,sequence_parallel=true",
)
SHARDED = (
    "pp=2,cp=2,schedule=dualpipe-v,virtual_stages=2,global_batch=6",
    "pp=2,dp=2,zero=1,schedule=gpipe,global_batch=6",
)


@pytest.mark.parametrize(
    ("text", "dtype"),
    thinned([*((text, "fp32") for text in (*ALONE, *SHARDED)), *((text, "bf16") for text in SHARDED)]),
)
def test_bytes_and_peaks_are_the_planners(text, dtype):
    plan = Plan.parse(f"{text},dtype={dtype}")
    config = staged.CONFIGS["llama"]
    model = planner_model(config, config.seq_length)
    traffic = PipelineTraffic(model, presets.cluster("h100x8"), plan, efficiency("hopper"))
    (message,) = traffic.transfers(plan)
    results = ranks(4).run(staged.step, f"{text},dtype={dtype}", "llama")
    stages = plan.pp * plan.virtual_stages
    v_shaped = plan.schedule in ("zb-v", "dualpipe-v")
    crossings = stages - 1 - v_shaped  # the two stages in the tip of a V are on one rank
    replicas = plan.gpus // plan.pp
    each = message.bytes / message.count
    assert sum(counts["bytes"] for *_, counts in results) == 2 * plan.micro_batches * crossings * replicas * each
    simulation = staged.simulation(plan)
    for rank, (*_, counts) in enumerate(results):
        stage = rank // replicas
        assert counts["live"] / plan.virtual_stages == simulation.peak_activations[stage]
        assert counts["deferred"] == staged.peak_deferred(simulation.schedule[stage])


@pytest.mark.parametrize("recompute", thinned(["full", "none", "selective"], 3))
def test_a_split_backward_computes_and_sends_nothing_twice(recompute):
    """Matmuls and exchanges are those of 1F1B whose backward computes both gradients at once."""
    common = f"pp=2,tp=2,sequence_parallel=true,global_batch=2,recompute={recompute},dtype=fp32"
    whole = ranks(4).run(staged.work, f"{common},schedule=1f1b", False)
    for schedule in ("1f1b", "zb-h1"):
        split = ranks(4).run(staged.work, f"{common},schedule={schedule}", True)
        for (products, exchanges), (split_products, split_exchanges) in zip(whole, split, strict=True):
            # A weight gradient that is added to another is one call of addmm_ in place of mm.
            assert sum(split_products.values()) == sum(products.values())
            assert split_exchanges.keys() == exchanges.keys()
            for op, count in split_exchanges.items():
                if schedule == "zb-h1" and op == "linear_reduce_scatter":
                    # W that runs apart gathers the output gradient of a row-parallel linear again.
                    assert exchanges[op] < count <= 1.5 * exchanges[op]
                else:
                    assert count == exchanges[op], op


def test_models_that_a_pipeline_refuses():
    for outcome in ranks(4).outcomes(
        staged.step, "pp=4,schedule=zb-h1,global_batch=4,dtype=fp32", "gpt2", False, 1, False
    ):
        assert isinstance(outcome, Raised)
        assert "schedule 'zb-h1' computes weight gradients apart" in outcome.message
    for outcome in ranks(4).outcomes(staged.step, "pp=4,schedule=dualpipe-v,virtual_stages=2,global_batch=4", "gpt2"):
        assert isinstance(outcome, Raised)
        assert "DualPipe-V needs 8 micro-batches for PP 4; there are 4" in outcome.message


def test_plans_that_are_drawn_have_every_schedule():
    assert {Plan.parse(text).schedule for text, *_ in staged.draws(random.randint(0, 99), 35)} == set(SCHEDULES)


@pytest.mark.skipif(
    not hasattr(runtime, "_PipelineScheduleRuntime") or "input_grads" not in signature(PipelineStage).parameters,
    reason="this torch has another runtime",
)
@pytest.mark.parametrize("schedule", thinned(["zb-v", "1f1b", "zb-h1"], 3))
def test_torchs_runtime_gets_the_same_from_the_same_list(schedule):
    text = f"pp=2,schedule={schedule},virtual_stages={2 if schedule == 'zb-v' else 1},global_batch=6,dtype=fp32"
    theirs = ranks(2).run(step, text, "llama")
    for own, (_, grads, _, _) in zip(theirs, ranks(2).run(staged.step, text, "llama"), strict=True):
        assert set(own) == set(grads)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, own[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
