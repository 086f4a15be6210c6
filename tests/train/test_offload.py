"""Activations in host memory: the same bits, in order, bounded, and nothing left over."""

import contextlib
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("pydantic")

from parallel_ops.planner import presets
from parallel_ops.train import offload
from parallel_ops.train.config_file import read_settings
from parallel_ops.train.offload import offload_activations
from parallel_ops.train.planner_bridge import Device, changed, forecast, replan
from parallel_ops.train.recompute import recompute
from support.ranks.distributed import ranks
from support.runs import trainer as runs


class Late(offload.CopyEngine):
    """Copies when a computation waits for it, as late as a stream may. Until then the target has other bytes."""

    def start(self, target, source):
        target.fill_(0x7F)
        return target, source

    def wait(self, event):
        if event is not None:
            event[0].copy_(event[1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, table):
        return x + self.other(torch.sin(self.linear(x)) * table)


class Blocks(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x, table):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, table)
        return x.square().mean()


def blocks(kind="none", recomputed="none", engine=offload.CopyEngine, **options):
    torch.manual_seed(0)
    model = Blocks()
    names = [f"layers.{n}" for n in range(len(model.layers))]
    recompute(model, names, recomputed)
    found = offload_activations(model, names, kind, **{"least_bytes": 0, **options})
    found.engine = engine()
    return model, found


def gradients(model, micro_batches=2, dtype=None, rows=32):
    losses = []
    for number in range(micro_batches):
        generator = torch.Generator().manual_seed(number)
        x, table = (torch.randn(rows, 64, generator=generator) for _ in range(2))
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            losses.append(model(x, table))
    for loss in losses:  # as a pipeline does
        loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("engine", [offload.CopyEngine, Late])
@pytest.mark.parametrize(
    ("kind", "recomputed", "tensors"),
    # Of a block: its input, the sine's argument and the second linear's input.
    [("inputs", "none", 1), ("all", "none", 3), ("inputs", "full", 1), ("all", "full", 1), ("inputs", "selective", 1)],
)
def test_gradients_are_the_same_and_nothing_is_left(engine, kind, recomputed, tensors):
    want = gradients(blocks(recomputed=recomputed)[0])
    for in_flight in (1, 3, 9):
        model, found = blocks(kind, recomputed, engine, in_flight=in_flight)
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), want, strict=True))
        assert found.moved_bytes == 2 * 6 * tensors * 32 * 64 * 4
        assert found.host_bytes == 0


class Sizes(offload.CopyEngine):
    """Notes the bytes of each copy."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def start(self, target, source):
        self.sizes.add(source.nbytes)
        return super().start(target, source)


def test_parameters_in_any_form_stay():
    """Autocast saves casts of weights, of 64 x 64 x 2 bytes."""
    want = gradients(blocks()[0], dtype=torch.bfloat16, rows=16)
    model, found = blocks("all", engine=Sizes)
    got = gradients(model, dtype=torch.bfloat16, rows=16)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert found.engine.sizes and max(found.engine.sizes) <= 16 * 64 * 4


def test_small_and_shared_tensors_stay():
    model, found = blocks("all", least_bytes=32 * 64 * 4 + 1)
    gradients(model)
    assert found.moved_bytes == 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_bounded_number_of_blocks_is_on_the_device(in_flight):
    model, found = blocks("all", in_flight=in_flight)
    most, calls = 0, []
    release, hooks = found._release, found._hooks

    def count():
        nonlocal most
        most = max(most, sum(any(e.on_device is not None for e in call.alive()) for call in calls))

    def released(call):
        release(call)
        count()

    @contextlib.contextmanager
    def hooked(*args):
        with hooks(*args):
            calls.append(found._leaving[-1])
            yield

    found._release, found._hooks = released, hooked
    gradients(model, micro_batches=1)
    assert 1 <= most <= 2 * in_flight + 1 < 6


def test_graphs_that_are_walked_twice_or_dropped():
    model, found = blocks("all", engine=Late)
    x, table = torch.randn(2, 32, 64)
    loss = model(x, table)
    once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert found.host_bytes > 0
    twice = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert found.host_bytes == 0
    loss = model(x, table)
    assert found.host_bytes > 0
    del loss
    gc.collect()
    assert found.host_bytes == 0
    with torch.no_grad():
        model(x, table)
    assert found.host_bytes == 0


def steps_with_offload(rank, each):
    """Losses and norms of two steps for each of several settings, bytes moved and bytes left in host memory."""
    found = []
    for settings in each:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offload, "CopyEngine", Late)
            trainer = runs.trainer_of(settings)
            steps = [trainer.step() for _ in range(2)]
        trainer.loader.close()
        own = getattr(trainer.model, "activation_offload", None)
        gc.collect()
        left = (0, 0) if own is None else (own.moved_bytes, own.host_bytes)
        found.append(([(step.loss, step.grad_norm) for step in steps], *left))
    return found


OFFLOADS = [("inputs", "full"), ("all", "none"), ("inputs", "selective"), ("all", "full")]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gpt", "bf16"), pytest.param("llama", "fp32", marks=pytest.mark.runs), ("experts", "bf16")]
)
def test_a_run_has_the_same_losses(data, kind, dtype):
    some = OFFLOADS + ([("all", "experts")] if kind == "experts" else [])
    for what, recomputed in some:
        sections = {"model": runs.MODELS[kind] | ({"dropout": 0.1} if kind == "gpt" else {})}
        settings = [
            runs.settings_of(
                data, **sections, precision={"dtype": dtype},
                recompute={"kind": recomputed, "offload": offloaded, "offload_least_bytes": 0},
            )
            for offloaded in ("none", what)
        ]  # fmt: skip
        for want, got in zip(*[iter(steps_with_offload(0, settings))] * 2, strict=True):
            assert got[0] == want[0] and got[1] > 0 and got[2] == 0


@pytest.mark.parametrize(
    ("size", "plans"),
    [
        pytest.param(2, [{"tp": 2, "sequence_parallel": True}], marks=pytest.mark.runs),
        (4, [{"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-v"}]),
        pytest.param(2, [{"cp": 2}, {"pp": 2, "schedule": "zb-h1"}, {"dp": 2, "zero": 3}], marks=pytest.mark.runs),
        pytest.param(4, [{"pp": 2, "tp": 2, "schedule": "interleaved"}], marks=pytest.mark.runs),
    ],
)
def test_any_plan_has_the_same_losses(data, size, plans):
    settings = [
        runs.settings_of(
            data, model=runs.MODELS["llama"] | {"num_layers": 4}, parallel=plan,
            recompute={"kind": recomputed, "offload": what, "offload_least_bytes": 0},
        )
        for plan in plans for recomputed, offloaded in (("none", "all"), ("full", "inputs"))
        for what in ("none", offloaded)
        if recomputed == "none" or plan.get("schedule", "").startswith("zb") is False
    ]  # fmt: skip
    for found in ranks(size).run(steps_with_offload, settings):
        for want, got in zip(found[::2], found[1::2], strict=True):
            assert got[0] == want[0] and got[1] > 0 and got[2] == 0


def test_experts_of_ranks(data):
    """Their parameters are gathered within a block."""
    settings = [
        runs.settings_of(data, model=runs.MODELS["experts"], parallel={"dp": 2, "ep": ep, "zero": 3},
                         recompute={"offload": what, "offload_least_bytes": 0})
        for ep in (1, 2) for what in ("none", "all")
    ]  # fmt: skip
    for found in ranks(2).run(steps_with_offload, settings):
        for want, got in zip(found[::2], found[1::2], strict=True):
            assert got[0] == want[0] and got[1] > 0 and got[2] == 0


def test_the_forecast_counts_it(data):
    plans = [
        runs.settings_of(
            data, model=runs.MODELS["gpt"] | {"num_layers": 12},
            precision={"dtype": "bf16"}, recompute={"kind": kind, "offload": what},
        )
        for kind, what in (("none", "none"), ("none", "all"), ("full", "none"), ("full", "inputs"))
    ]  # fmt: skip
    memory = [forecast(each, presets.cluster("h100x1")).memory[0].activations for each in plans]
    assert memory[1] < memory[0] and memory[3] < memory[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "some"}, "kind must be one of 'none', 'inputs', 'all', got 'some'"),
        ({"kind": "all", "in_flight": 0}, "in_flight must be at least 1, got 0"),
        ({"kind": "all", "least_bytes": -1}, "least_bytes must be at least 0, got -1"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        blocks(**options)
    with pytest.raises(ValueError, match=r"no module 'layer\.0'"):
        offload_activations(Blocks(), ["layer.0"])


@pytest.mark.runs
def test_the_example_equals_one_process():
    """MXFP8, activations in host memory and Muon by owner, under a schedule that splits the backward."""
    pytest.importorskip("tomllib", reason="needs Python 3.11")
    root = Path(__file__).parents[2]
    changes = ["run.steps=3", "optimizer.warmup=1", "checkpoint.dir='none'", "logging.jsonl='none'", "run.device='cpu'"]
    changes.append(f"data.paths=['{root / 'CONTRIBUTING.md'}', '{root / 'README.md'}']")
    settings = read_settings(root / "examples/float8.toml", changes)
    alone = replan(settings, 1, Device("", 2.0**40, gpu=False))
    alone = changed(alone, {"zero": 0})
    without = read_settings(root / "examples/float8.toml", [*changes, "recompute.offload='none'"])
    want = runs.steps_of(0, alone)
    got, same = (ranks(4).run(runs.steps_of, each) for each in (settings, without))
    assert got == same
    for steps in got:
        np.testing.assert_allclose(np.array(steps)[:, 0], np.array(want)[:, 0], rtol=3e-3)
    assert want[-1][0] < want[0][0]
