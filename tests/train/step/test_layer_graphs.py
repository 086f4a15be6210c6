"""Layers captured in CUDA graphs, by the fake of ``support.transports.fake_graphs``."""

import contextlib
import functools

import pytest
import torch

from parallel_ops.models import Transformer
from parallel_ops.train.data.batches import Batch
from parallel_ops.train.step.capturable import WARMUP, eager_reason
from parallel_ops.train.step.forward_backward import StepInputs
from parallel_ops.train.step.layer_graphs import LayerGraphs, units_of
from support.ranks.distributed import ranks
from support.runs import trainer as runs
from support.transports import fake_graphs, fake_memory

LLAMA, EXPERTS = {"model": runs.MODELS["llama"]}, {"model": runs.MODELS["experts"]}
DROPOUT = {"model": runs.MODELS["gpt"] | {"dropout": 0.1, "attention_dropout": 0.1}}
DOCUMENTS = LLAMA | {"data": {"document_mask": True}}
FULL, MUON, BF16 = {"recompute": {"kind": "full"}}, {"optimizer": {"kind": "muon"}}, {"precision": {"dtype": "bf16"}}
FOUR = {"model": runs.MODELS["llama"] | {"num_layers": 4}}
# By the number of ranks.
PLANS = {
    1: {
        "accumulation": {"parallel": {"global_batch": 3}},
        "dropout": DROPOUT | {"parallel": {"global_batch": 2}},
        "bf16": LLAMA | BF16 | {"parallel": {"global_batch": 2}},
        "float8": {"model": runs.MODELS["llama"] | {"num_layers": 3}, "parallel": {"global_batch": 2}}
        | {"precision": {"dtype": "bf16", "linears": "fp8_rowwise", "fp8_emulation": True}},
        "full recomputation": LLAMA | FULL | {"parallel": {"global_batch": 2}},
        "selective recomputation": LLAMA | {"recompute": {"kind": "selective"}, "parallel": {"global_batch": 2}},
        "experts": {"model": runs.MODELS["deepseek"], "parallel": {"global_batch": 2}},
        "GPT-OSS": {"model": runs.MODELS["gpt-oss"], "parallel": {"global_batch": 2}} | MUON,
        "documents": DOCUMENTS | {"parallel": {"global_batch": 4}},
        "frozen": {"model": runs.MODELS["llama"] | {"freeze": ["tokens.*", "layers.0.*"]}},
        "adapters": LLAMA | {"lora": {"rank": 2, "dropout": 0.1}, "parallel": {"global_batch": 2}},
    },
    2: {
        "zero 0": LLAMA | {"parallel": {"dp": 2, "zero": 0, "global_batch": 4}},
        "zero 1": LLAMA | MUON | {"parallel": {"dp": 2, "zero": 1, "global_batch": 4}},
        "zero 2": DROPOUT | BF16 | {"parallel": {"dp": 2, "zero": 2, "global_batch": 4}},
        "zero 3": LLAMA | FULL | {"parallel": {"dp": 2, "zero": 3, "global_batch": 4}},
        "offload": LLAMA | {"parallel": {"dp": 2, "zero": 3, "offload": "optimizer", "global_batch": 4}},
        "tp": LLAMA | {"parallel": {"tp": 2, "sequence_parallel": False, "global_batch": 2}},
        "sp": LLAMA | MUON | {"parallel": {"tp": 2, "sequence_parallel": True, "global_batch": 2}},
        "cp": LLAMA | {"parallel": {"cp": 2, "global_batch": 2}},
        "cp, documents": DOCUMENTS | {"parallel": {"cp": 2, "cp_layout": "balanced", "global_batch": 2}},
        "ep": EXPERTS | {"parallel": {"dp": 2, "ep": 2, "zero": 1, "global_batch": 4}},
        "pp": DROPOUT | {"parallel": {"pp": 2, "global_batch": 4}},
        "pp, interleaved": FOUR | {"parallel": {"pp": 2, "global_batch": 4, "schedule": "interleaved"}},
    },
    4: {
        "tp, zero 3": LLAMA | MUON | {"parallel": {"tp": 2, "dp": 2, "zero": 3, "global_batch": 4}},
        "pp, ep": EXPERTS | {"parallel": {"dp": 2, "ep": 2, "pp": 2, "zero": 2, "global_batch": 8}},
    },
}
STEPS = WARMUP + 2


def steps_of(rank, settings, *, fake):
    """Loss and norm of each step, and the parameters after them."""
    before = fake_graphs.CUDAGraph.replays
    with fake_graphs.cuda() if fake else contextlib.nullcontext(), runs.trainer_of(settings) as trainer:
        assert (trainer.eager_reason is None) == fake
        found = [(step.loss, step.grad_norm) for step in (trainer.step() for _ in range(STEPS))]
        weights = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.model.parameters()]
        # A first layer that is frozen has no backward.
        units = sum(any(p.requires_grad for p in u.parameters()) for u in units_of(trainer.model, settings))
    expected = 2 * units * settings.plan.micro_batches * (STEPS - WARMUP)
    assert fake_graphs.CUDAGraph.replays - before == (expected if fake else 0)
    return found, [w.detach().clone() for w in weights], units


def both(rank, plans):
    """By plan, steps that are eager, as there is no GPU, and steps with graphs."""
    return [[steps_of(rank, settings, fake=fake) for fake in (False, True)] for settings in plans]


@pytest.mark.parametrize("size", [pytest.param(size, marks=[pytest.mark.runs] * (size > 2)) for size in PLANS])
def test_replays_are_eager_steps(size, data):
    """Every plan has the bits of eager steps; each layer is replayed, forward and backward, for each micro-batch."""
    plans = [runs.settings_of(data, **sections, run={"cuda_graph": "layers"}) for sections in PLANS[size].values()]
    results = [both(0, plans)] if size == 1 else ranks(size).run(both, plans)
    for name, *of_ranks in zip(PLANS[size], *results, strict=True):
        assert sum(units for _, (_, _, units) in of_ranks), f"{name}: no rank has captured anything"
        for (eager, weights, _), (graphed, others, _) in of_ranks:
            assert graphed == eager, name
            assert all(torch.equal(a, b) for a, b in zip(others, weights, strict=True)), name


def gathered_in_place(rank, settings):
    """Graphs read parameters where FSDP2 has gathered them."""
    with fake_graphs.cuda(), runs.trainer_of(settings) as trainer:
        for layer in trainer.model.layers.values():
            layer.forward.args[0].managed = False
        for _ in range(WARMUP):
            trainer.step()
        with pytest.raises(RuntimeError, match=r"run\.cuda_graph: .* cannot be captured|freed or moved"):
            trainer.step()


def test_the_fake_finds_memory_that_is_gathered_elsewhere(data):
    settings = runs.settings_of(
        data, **LLAMA, parallel={"dp": 2, "zero": 2, "global_batch": 4}, run={"cuda_graph": "layers"}
    )
    ranks(2).run(gathered_in_place, settings)


class Given:
    """Steps of one model on batches of given lengths."""

    def __init__(self, data, *, fake):
        settings = runs.settings_of(data, **LLAMA)
        torch.manual_seed(0)
        self.model = Transformer(settings.config)
        self.graphs = LayerGraphs(self.model, settings, torch.device("cpu")) if fake else None

    def step(self, *lengths, further=False, reverse=False):
        """The gradients of a step whose forwards all come before their backwards."""
        generator = torch.Generator().manual_seed(sum(lengths))
        drawn = [torch.randint(runs.VOCABULARY, (2, length, 1), generator=generator) for length in lengths]
        batches = [Batch(*pair) for pair in drawn]
        ones = [1.0] * len(batches)
        inputs = StepInputs(batches, [1] * len(batches), ones, ones, [None] * len(batches), 1.0)

        def compute(given):
            losses = [self.model(batch.tokens, batch.targets) for batch in given.batches]
            if further:
                losses.append(self.model(drawn[0][1][1:], drawn[0][0][1:]))
            for loss in losses[::-1] if reverse else losses:
                loss.backward()

        self.model.zero_grad()
        compute(inputs) if self.graphs is None else self.graphs.step(inputs, compute)
        return [p.grad.clone() for p in self.model.parameters()]


def test_other_shapes_are_captured_anew(data):
    """Each list of lengths warms up and is captured; all have the gradients of eager steps."""
    lengths = [(16, 16)] * 5 + [(9, 9)] * 5 + [(16, 9, 9)] * 5
    eager, before = Given(data, fake=False), fake_graphs.CUDAGraph.replays
    with fake_graphs.cuda():
        graphed = Given(data, fake=True)
        for each in lengths:
            for a, b in zip(graphed.step(*each), eager.step(*each), strict=True):
                assert torch.equal(a, b), each
    # Two layers, forward and backward, for each micro-batch of two steps.
    assert fake_graphs.CUDAGraph.replays - before == 2 * 2 * (2 + 2 + 3) * 2


def test_other_calls_are_eager_with_a_warning(data):
    eager, before = Given(data, fake=False), fake_graphs.CUDAGraph.replays
    with fake_graphs.cuda():
        graphed = Given(data, fake=True)
        for further in [False] * 4 + [True] + [False] * 4:
            with pytest.warns(UserWarning, match="captured anew") if further else contextlib.nullcontext():
                found = graphed.step(16, 16, further=further)
            assert all(map(torch.equal, found, eager.step(16, 16, further=further))), further
    # The first replayed step, its forwards and backwards in the other, and the last.
    assert fake_graphs.CUDAGraph.replays - before == 3 * 2 * 2 * 2


def test_backwards_in_another_order_raise(data):
    with fake_graphs.cuda():
        graphed = Given(data, fake=True)
        for _ in range(4):
            graphed.step(16, 16)
        with pytest.raises(RuntimeError, match="backwards of layers run in another order"):
            graphed.step(16, 16, reverse=True)


REASONS = {
    "this run is on cpu": {},
    "recompute.offload": {"recompute": {"offload": "inputs"}},
    "on two threads": {"parallel": {"pp": 2, "schedule": "dualpipe-v"}, **FOUR},
    "for inputs and for weights": {"parallel": {"pp": 2, "schedule": "zb-h1"}},
    "run.compile": {"run": {"compile": True}},
    "parallel.cp_groups": {"data": {"document_mask": True}, "parallel": {"dp": 2, "cp_groups": "by_length"}},
    "the state of generators": DROPOUT | FULL,
    "all MLPs are experts": {"model": runs.MODELS["gpt-oss"], "data": {"document_mask": True}},
    "of which a part alone": {"model": runs.MODELS["gpt-oss"]} | FULL,
}


@pytest.mark.parametrize("text", REASONS)
def test_a_reason_against_graphs(text, data):
    sections = {"run": {}} | REASONS[text]
    settings = runs.settings_of(data, **sections | {"run": sections["run"] | {"cuda_graph": "layers"}})
    model = Transformer(settings.config, device="meta")
    assert text in eager_reason(settings, model, torch.device("cuda" if REASONS[text] else "cpu"))
    assert "is no Transformer" in eager_reason(settings, torch.nn.Linear(1, 1), torch.device("cuda"))


def captured(function, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), **({} if pool is None else {"pool": pool})):
        result = function()
    return graph, result


def test_the_fake_refuses_memory_that_is_gone():
    with fake_graphs.cuda():
        given = torch.ones(3)
        graph, _ = captured(lambda: given * 2)
        graph.replay()
        given.untyped_storage().resize_(0)
        given.untyped_storage().resize_(12)
        with pytest.raises(fake_memory.Freed):
            graph.replay()
        graph, _ = captured(functools.partial(torch.mul, torch.ones(3), 2))
        with pytest.raises(fake_memory.Freed):
            graph.replay()


def test_the_fake_uses_the_memory_of_a_pool_again():
    """A capture may take what was free; a replay out of order destroys what was captured after it."""
    with fake_graphs.cuda():
        pool, given = torch.cuda.graph_pool_handle(), torch.ones(3)
        first, x = captured(lambda: given * 2, pool)
        second, y = captured(functools.partial(torch.add, x, 1), pool)
        for graph in (first, second):
            graph.replay()
        assert torch.equal(y, torch.full((3,), 3.0))
        del x
        third, z = captured(lambda: given * 5, pool)
        for graph in (first, third, second):
            graph.replay()
        assert y.isnan().all() and z.isnan().all()


def test_the_fake_draws_in_replays():
    with fake_graphs.cuda():
        graph, drawn = captured(lambda: torch.rand(3))
        torch.manual_seed(5)
        graph.replay()
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.rand(3))
