"""Steps captured in a CUDA graph, by the fake of ``support.transports.fake_graphs``."""

import contextlib
import dataclasses

import pytest
import torch

from parallel_ops.models import Transformer
from parallel_ops.pipeline_parallel import link
from parallel_ops.train.report import outputs
from parallel_ops.train.report.progress import Progress
from parallel_ops.train.step import capturable
from parallel_ops.train.step.capturable import WARMUP, eager_reason
from support.ranks.distributed import ranks
from support.runs import trainer as runs
from support.transports import fake_graphs

LLAMA, EXPERTS = {"model": runs.MODELS["llama"]}, runs.MODELS["experts"]
CAPACITY = EXPERTS | {"experts": EXPERTS["experts"] | {"capacity_factor": 1.0}}
FULL, MUON, BF16 = {"recompute": {"kind": "full"}}, {"optimizer": {"kind": "muon"}}, {"precision": {"dtype": "bf16"}}
DYNAMIC = {"kind": "dynamic", "factor": 2.0, "original_length": 4}
# By the number of ranks.
PLANS = {
    1: {
        "accumulation": {"parallel": {"global_batch": 4}},
        "fp16": LLAMA | {"precision": {"dtype": "fp16", "initial_scale": 2.0**24, "growth_interval": 2}},
        "float8": {"model": runs.MODELS["llama"] | {"num_layers": 3}}
        | {"precision": {"dtype": "bf16", "linears": "fp8_rowwise", "fp8_emulation": True}},
        "experts": {"model": EXPERTS},
        "GPT-OSS": {"model": runs.MODELS["gpt-oss"]} | MUON,
        "selective recomputation": LLAMA | {"recompute": {"kind": "selective"}},
        "positions that scale": {"model": runs.MODELS["llama"] | {"rotary_scaling": DYNAMIC}},
    },
    2: {
        "zero 0": LLAMA | {"parallel": {"dp": 2, "zero": 0, "global_batch": 4}},
        "zero 1": LLAMA | MUON | {"parallel": {"dp": 2, "zero": 1, "global_batch": 4}},
        "zero 2": LLAMA | BF16 | {"parallel": {"dp": 2, "zero": 2, "global_batch": 4}},
        "zero 3": LLAMA | FULL | {"parallel": {"dp": 2, "zero": 3, "global_batch": 4}},
        "tp": LLAMA | {"parallel": {"tp": 2, "sequence_parallel": False, "global_batch": 2}},
        "sp": LLAMA | MUON | {"parallel": {"tp": 2, "sequence_parallel": True, "global_batch": 2}},
        "cp": LLAMA | {"parallel": {"cp": 2, "global_batch": 2}},
        "cp, all to all": LLAMA | {"parallel": {"cp": 2, "cp_kind": "all_to_all", "global_batch": 2}},
        "ep": {"model": CAPACITY, "parallel": {"dp": 2, "ep": 2, "zero": 1, "global_batch": 4}},
        "pp": LLAMA | {"parallel": {"pp": 2, "global_batch": 4}},
        "pp, zero bubble": LLAMA | {"parallel": {"pp": 2, "global_batch": 4, "schedule": "zb-h1"}},
    },
    4: {"tp, zero 3": LLAMA | MUON | {"parallel": {"tp": 2, "dp": 2, "zero": 3, "global_batch": 4}}},
}
STEPS = WARMUP + 2


def steps_of(rank, settings, *, fake):
    """Loss, norm, use of experts and if it was skipped, of each step; the parameters after them; which were redone."""
    before = fake_graphs.CUDAGraph.replays
    with fake_graphs.cuda() if fake else contextlib.nullcontext(), runs.trainer_of(settings) as trainer:
        assert trainer.eager_reason is None
        found, redone = [], []
        for _ in range(STEPS):
            step = trainer.step()
            redone.append(step.redone)
            experts = tuple(step.experts.values()) if step.experts else ()
            found.append((step.loss, step.grad_norm, *experts, step.skipped))
        weights = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.model.parameters()]
    assert fake_graphs.CUDAGraph.replays - before == (STEPS - WARMUP if fake else 0)
    return found, [w.detach().clone() for w in weights], redone


def both(rank, plans):
    """By plan, steps that are eager and steps by a graph."""
    return [[steps_of(rank, settings, fake=number == 1) for number, settings in enumerate(pair)] for pair in plans]


@pytest.mark.parametrize("size", [pytest.param(size, marks=[pytest.mark.runs] * (size > 2)) for size in PLANS])
def test_replays_are_eager_steps(size, data):
    """Every plan can be captured; what replays compute is what eager steps compute, up to the rounding of the rates,
    which are of fp32 on the device."""
    plans = [
        [runs.settings_of(data, **sections, run={"cuda_graph": kind}) for kind in (False, "step")]
        for sections in PLANS[size].values()
    ]
    results = [both(0, plans)] if size == 1 else ranks(size).run(both, plans)
    for rank in results:
        for name, ((eager, weights, _), (graphed, others, _)) in zip(PLANS[size], rank, strict=True):
            for step, other in zip(eager, graphed, strict=True):
                assert other == pytest.approx(step, rel=1e-3, nan_ok=True), (name, eager, graphed)
            torch.testing.assert_close(
                others, weights, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
            if name == "fp16":
                assert any(step[-1] for step in eager[WARMUP:]), "no replayed step was skipped"


# With dropless experts; the first stage of the pipeline has none.
SHARED = {
    2: {"parallel": {"dp": 2, "ep": 2, "zero": 1, "global_batch": 4}},
    4: {"parallel": {"dp": 2, "ep": 2, "pp": 2, "zero": 2, "global_batch": 4}},
}


@pytest.mark.parametrize("size", [pytest.param(size, marks=[pytest.mark.runs] * (size > 2)) for size in SHARED])
def test_dropless_experts_of_several_ranks(size, data):
    """Steps in which no capacity is full are eager steps up to rounding, others bit by bit, on all ranks alike."""
    capacities = [4.0, 0.1, 2.5]  # never full, always, in some steps
    plans = [
        [
            runs.settings_of(data, model=EXPERTS, **SHARED[size], **(MUON if capacity == 0.1 else {}), run=run)
            for run in ({}, {"cuda_graph": "step", "cuda_graph_capacity": capacity})
        ]
        for capacity in capacities
    ]
    for rank in ranks(size).run(both, plans):
        for capacity, ((eager, weights, _), (graphed, others, redone)) in zip(capacities, rank, strict=True):
            if capacity == 0.1:
                assert all(redone) and graphed == eager
                assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
                continue
            assert any(redone[WARMUP:]) == (capacity == 2.5) and not all(redone[WARMUP:]), redone
            for step, other in zip(eager, graphed, strict=True):
                assert other == pytest.approx(step, rel=1e-3), capacity
            torch.testing.assert_close(others, weights, rtol=1e-3, atol=2e-4)


def test_a_redone_step_has_a_line(data, capsys):
    settings = runs.settings_of(data, run={"steps": 2}, logging={"interval": 9})
    with runs.trainer_of(settings) as trainer, Progress(trainer) as progress:
        progress.add(dataclasses.replace(trainer.step(), redone=True))
    assert "more rows for an expert than run.cuda_graph_capacity" in capsys.readouterr().out


def evaluated(rank, settings, *, fake):
    """Losses with evaluations between the steps, and steps from a state that is loaded after a capture."""
    with fake_graphs.cuda() if fake else contextlib.nullcontext(), runs.trainer_of(settings) as trainer:
        found = []
        for step in range(STEPS):
            found.append(trainer.step().loss)
            if step >= WARMUP:
                found.append(trainer.evaluate())
        trainer.save()
        after = [trainer.step().loss for _ in range(STEPS)]
        trainer.resume()
        return found, after, [trainer.step().loss for _ in range(STEPS)]


def evaluated_both(rank, eager, graphed):
    return evaluated(rank, eager, fake=False), evaluated(rank, graphed, fake=True)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("step", {"dp": 2, "zero": 2}),
        ("layers", {"dp": 2, "zero": 3}),
        pytest.param("layers", {"pp": 2}, marks=pytest.mark.runs),
    ],
)
def test_evaluations_and_loaded_states(data, tmp_path, kind, plan):
    settings = [
        runs.settings_of(
            data, **LLAMA, **BF16, parallel={"global_batch": 4, **plan}, run={"cuda_graph": kind},
            evaluation={"paths": [str(data)], "sequences": 4}, checkpoint={"dir": tmp_path / name},
        )
        for name in ("eager", "graphed")
    ]  # fmt: skip
    for eager, graphed in ranks(2).run(evaluated_both, *settings):
        assert graphed == eager if kind == "layers" else graphed[0] == pytest.approx(eager[0], rel=1e-3)
        assert graphed[1] == graphed[2], "a resumed run takes other steps"


REASONS = {
    "this run is on cpu": {},
    "data.document_mask": {"data": {"document_mask": True}},
    "dropout": {"model": runs.MODELS["gpt"] | {"dropout": 0.1}},
    "does not divide data.seq_length": {"model": EXPERTS, "parallel": {"dp": 2, "ep": 2, "cp": 3}},
    "parallel.offload": {"parallel": {"dp": 2, "zero": 3, "offload": "optimizer"}},
    "recompute.offload": {"recompute": {"offload": "inputs"}},
    "logging.trace": {"parallel": {"pp": 2}, "logging": {"trace": "trace"}},
    "parallel.schedule": {"parallel": {"pp": 2, "schedule": "dualpipe-v"}, "model": LLAMA["model"] | {"num_layers": 4}},
    "computes experts one by one": {"model": EXPERTS, "precision": {"dtype": "fp16"}},
}


@pytest.mark.parametrize("text", REASONS)
def test_a_reason_against_a_graph(text, data):
    settings = runs.settings_of(data, **REASONS[text], run={"cuda_graph": "step"})
    model = Transformer(settings.config, device="meta")
    device = torch.device("cuda" if REASONS[text] else "cpu")
    assert text in eager_reason(settings, model, device)
    assert "is no Transformer" in eager_reason(settings, torch.nn.Linear(1, 1), torch.device("cuda"))


# As Qwen3-MoE: adapters are of models of a Hugging Face family.
QWEN = runs.MODELS["llama"] | {
    "num_layers": 3, "qk_norm": True, "experts": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 128}
}  # fmt: skip
ODD = QWEN | {"experts": QWEN["experts"] | {"ffn_hidden_size": 20}}
ROWWISE, HOPPER = {"dtype": "bf16", "experts": "fp8_rowwise"}, (9, 0)


@pytest.mark.parametrize(
    ("capability", "sections", "captured"),
    [
        ((8, 0), BF16, False), (HOPPER, BF16, True), ((12, 0), BF16, False), (HOPPER, BF16 | {"model": ODD}, False),
        (HOPPER, BF16 | {"lora": {"rank": 4, "targets": ["layers.*.attention.q"]}}, True),
        (HOPPER, BF16 | {"lora": {"rank": 4}}, False),
        (HOPPER, {"precision": ROWWISE}, True), (HOPPER, {"precision": ROWWISE | {"fp8_emulation": True}}, False),
        (HOPPER, {"precision": ROWWISE | {"experts": "fp8_blockwise"}, "model": QWEN | {"hidden_size": 128}}, False),
    ],
)  # fmt: skip
def test_experts_that_can_be_captured(data, monkeypatch, capability, sections, captured):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(capturable, "one_float8_kernel_for", lambda _, recipe: recipe == "fp8_rowwise")
    settings = runs.settings_of(data, **{"model": QWEN} | sections, run={"cuda_graph": "step"})
    reason = eager_reason(settings, Transformer(settings.config, device="meta"), torch.device("cuda"))
    assert (reason is None) == captured, reason


@pytest.mark.parametrize("driver", [12080, 12090])
def test_drivers_with_which_pipelines_can_be_captured(data, monkeypatch, driver):
    monkeypatch.setattr(link, "_driver", lambda: driver)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    settings = runs.settings_of(data, **LLAMA, parallel={"pp": 2, "global_batch": 4}, run={"cuda_graph": "step"})
    reason = eager_reason(settings, Transformer(settings.config, device="meta"), torch.device("cuda"))
    assert (reason is None) == (driver == 12090), reason


def test_without_a_gpu_a_warning_and_eager_steps(data, monkeypatch):
    said = []
    monkeypatch.setattr(outputs, "warn", said.append)
    settings = [runs.settings_of(data, run={"steps": 2, "cuda_graph": kind}) for kind in (False, "step")]
    eager, declined = (runs.train(0, each) for each in settings)
    assert said == ["run.cuda_graph: nothing is captured: it needs a GPU, and this run is on cpu"]
    assert eager.loss == declined.loss


def side_stream(wait, join):
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    if wait:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        torch.ones(2).add_(1)
    if join:
        main.wait_stream(side)


OLD = torch.ones(3)
# Each refused by another rule. Looked up in a capture, where what the host calls is replaced.
FORBIDDEN = {
    "host reads": lambda: OLD.sum().item(),
    "tolist": lambda: [*OLD.tolist()],
    "nonzero": OLD.nonzero,
    "host become": lambda: torch.tensor([1.0]),
    "manual_seed": lambda: torch.manual_seed(0),
    "get_rng_state": lambda: torch.get_rng_state().sum(),
    "not joined": lambda: side_stream(True, False),
    "has not joined": lambda: side_stream(False, True),
    "for the device": lambda: torch.cuda.synchronize("cuda"),
    "queried": lambda: torch.cuda.Event().query(),
    "for an event": lambda: torch.cuda.Event().synchronize(),
}


@pytest.mark.parametrize("text", FORBIDDEN)
def test_the_fake_refuses_what_cuda_refuses(text):
    with fake_graphs.cuda():
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

        def capture():
            with torch.cuda.graph(graph, stream=stream):
                torch.ones(2)
                FORBIDDEN[text]()

        with pytest.raises(fake_graphs.NotCapturable, match=text):
            capture()


def test_the_fake_computes_nothing_until_it_replays_and_keeps_numbers():
    with fake_graphs.cuda():
        stream, graph, number, total = torch.cuda.Stream(), torch.cuda.CUDAGraph(), 3.0, torch.zeros(2)
        given = torch.ones(2)
        with torch.cuda.graph(graph, stream=stream):
            side_stream(True, True)
            out = given * number
            total += out
        assert out.isnan().all() and torch.equal(total, torch.zeros(2))
        number = 5.0
        for value in (1.0, 2.0):
            given.fill_(value)
            graph.replay()
            assert torch.equal(out, torch.full((2,), 3 * value))
        assert torch.equal(total, torch.full((2,), 9.0))
