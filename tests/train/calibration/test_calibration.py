"""``parallel-ops calibrate``: a machine is measured, and the planner reads what it writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel_ops.planner import Plan, estimate, presets
from parallel_ops.planner.cli import inputs
from parallel_ops.planner.cluster import GPU, Cluster, Interconnect
from parallel_ops.planner.communication.network import all_gather_seconds, all_reduce_seconds, all_to_all_seconds
from parallel_ops.planner.compute.attention import attention_seconds
from parallel_ops.planner.compute.software import constants_of, efficiency
from parallel_ops.planner.compute.work import work_of
from parallel_ops.planner.passes import layer_costs
from parallel_ops.planner.step import StepTime
from parallel_ops.train import planner_bridge
from parallel_ops.train.calibration import command
from parallel_ops.train.calibration.command import calibrate
from parallel_ops.train.calibration.fit import (
    MORE,
    OPTIMIZER_BYTES,
    SHARED,
    Measured,
    as_json,
    cluster_of,
    link,
    scatter_share,
)
from support.transports.bound_device import bound_devices

LINK = Interconnect(name="truth", latency=2e-5, bandwidth=3e9)
TINY = {
    "products": ((32, 32, 32), (64, 32, 64)),
    "layer": {"hidden_size": 32, "num_heads": 2, "seq_length": 32, "vocab_size": 64},
    "sequences": 1,
    "update": 2**12,
    "collectives": (2**12, 2**24),
}


def collectives(ranks, sizes):
    for size in sizes:
        yield "all-gather", size, all_gather_seconds(ranks, size, LINK)
        yield "reduce-scatter", size, all_gather_seconds(ranks, size, replace(LINK, bandwidth=LINK.bandwidth / 4))
        yield "all-reduce", size, 2 * all_gather_seconds(ranks, size, LINK)
        yield "all-to-all", size, all_to_all_seconds(ranks, size, LINK)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_link_of_known_collectives(ranks):
    found = link(collectives(ranks, (2**14, 2**20, 2**24)), ranks, "gloo")
    assert found.latency == pytest.approx(LINK.latency)
    assert found.bandwidth == pytest.approx(LINK.bandwidth)
    assert all_reduce_seconds(ranks, 2**22, found)[1] == pytest.approx(all_reduce_seconds(ranks, 2**22, LINK)[1])
    assert scatter_share(collectives(ranks, (2**14, 2**24)), ranks, found) == pytest.approx(0.25)


def test_link_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="unknown collective 'broadcast'"):
        link([("broadcast", 8, 1.0)], 2, "gloo")
    with pytest.raises(ValueError, match="large collectives took no longer than small ones"):
        link([("all-gather", 2**10, 1.0), ("all-gather", 2**20, 0.5)], 2, "gloo")


def as_if_measured(gpu, constants, dtype, ranks):
    """What a machine with these constants would measure."""
    model = replace(presets.model("llama2-7b"), num_layers=1)
    plan = Plan(dtype=dtype, fused_loss=True)
    machine = Cluster(name="truth", gpu=gpu, gpus=ranks, gpus_per_node=ranks, intra=LINK, inter=LINK)

    def layer(changed: Plan) -> float:
        return sum(each.total for each in layer_costs(model, machine, gpu, constants, work_of(changed), False))

    def longer(tp: int, zero: int, micro_batches: int) -> float:
        dp = ranks // tp
        changed = Plan(
            dp=dp, tp=tp, sequence_parallel=tp > 1, zero=zero, global_batch=dp * micro_batches, dtype=dtype,
            fused_loss=True,
        )  # fmt: skip
        one, three = (
            StepTime(replace(model, num_layers=layers), machine, changed, constants).data_parallel()
            for layers in (1, 3)
        )
        return (three - one) / 2

    work = work_of(plan)
    rate = gpu.peak(dtype) * constants.matmul
    attention = attention_seconds(model, gpu, constants, work, model.seq_length)
    return Measured(
        products=((1024, 1024, 1024, 2 * 1024**3 / rate), (512, 4096, 512, 2 * 512 * 4096 * 512 / rate)),
        attention=attention,
        layer=layer(plan),
        layer_of_more=layer(replace(plan, micro_batch=MORE, global_batch=MORE)),
        layer_over_ranks=layer(replace(plan, tp=2, sequence_parallel=True)),
        sharded=(1.0, 1.0 + longer(1, 2, 3) - longer(1, 2, 2), 1.0 + longer(1, 3, 1)),
        sharded_over_ranks=(1.0, 1.0 + longer(SHARED, 3, 1)) if ranks > SHARED else (0.0, 0.0),
        update=(10**6, OPTIMIZER_BYTES * 10**6 / (gpu.bandwidth * constants.memory)),
        collectives=tuple(collectives(ranks, (2**14, 2**24))),
        product_beside=1.0,
        collective_beside=0.5,
        both=1.2,
        launch=0.0,
        model=model,
        sequences=1,
        dtype=dtype,
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_constants_of_a_known_machine_are_found_again(ranks, tmp_path):
    gpu = GPU(name="cpu", generation="cpu", memory=2**34, bandwidth=2e10, fp32=1e11, fp16=0, bf16=0, fp8=0, watts=0)
    truth = replace(efficiency("ampere", "parallel_ops"), matmul=1.0, memory=1.0, flash_forward=0.7, flash_backward=0.6)
    truth = replace(truth, elementwise=3.0, serial=2e-2, collective=5e-3, host=0.0, links=1.0, interference=0.4)
    truth = replace(truth, reduce_scatter=0.25, gather_copies=6.0, reduce_copies=9.0)
    truth = replace(truth, tp_copies=2.5 if ranks > SHARED else 1.0)
    truth = replace(truth, tp_overlap=min(truth.tp_overlap, 0.6))  # what overlap costs is not hidden
    unknown = replace(gpu, fp32=0.0, bandwidth=1.0)
    measured = as_if_measured(gpu, truth, "fp32", ranks)
    found = cluster_of(measured, unknown, ranks, "gloo")
    assert found.gpu.fp32 == pytest.approx(gpu.fp32)
    assert found.gpu.bandwidth == pytest.approx(gpu.bandwidth)
    constants = constants_of(found)
    kinds = "flash_forward", "flash_backward", "elementwise", "serial", "collective", "reduce_scatter"
    for name in (*kinds, "gather_copies", "reduce_copies", "tp_copies"):
        # A launch between matmuls is part of a layer, not of the rate of large matmuls.
        assert getattr(constants, name) == pytest.approx(getattr(truth, name), rel=0.01)
    assert constants.interference == pytest.approx(0.4)
    assert found.intra.bandwidth == pytest.approx(LINK.bandwidth)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(as_json(found, measured)))
    assert constants_of(inputs.cluster(str(path))) == constants


def test_a_layer_that_sharding_makes_no_longer_has_no_copies():
    gpu = GPU(name="cpu", generation="cpu", memory=2**34, bandwidth=2e10, fp32=1e11, fp16=0, bf16=0, fp8=0, watts=0)
    measured = as_if_measured(gpu, efficiency("ampere", "parallel_ops"), "fp32", 4)
    hidden = replace(measured, sharded=(1.0, 0.9, 0.9), sharded_over_ranks=(1.0, 0.9))
    constants = constants_of(cluster_of(hidden, gpu, 4, "gloo"))
    assert constants.gather_copies == constants.reduce_copies == 0.0 and constants.tp_copies == 1.0
    alone = replace(hidden, sharded=(0.0, 0.0, 0.0), sharded_over_ranks=(0.0, 0.0), layer_over_ranks=0.0)
    assert not {"gather_copies", "reduce_copies", "tp_copies"} & set(dict(cluster_of(alone, gpu, 1, "gloo").constants))


@pytest.mark.runs
def test_measured_machine_is_read_by_the_planner(tmp_path):
    path = tmp_path / "machine.json"
    cluster, measured = calibrate(path, 2, 0.3, TINY)
    assert inputs.cluster(str(path)) == replace(cluster, name=cluster.name)
    assert cluster.gpus == 2 and cluster.gpu.fp32 > 0 and cluster.intra.bandwidth > 0
    assert measured.sharded[0] != 0.0 and measured.sharded_over_ranks == (0.0, 0.0)
    assert {kind for kind, _, _ in measured.collectives} == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
    model = replace(presets.model("gpt2"), num_layers=2) if "gpt2" in presets.models() else presets.model("llama2-7b")
    plan = Plan(dp=2, dtype="fp32", global_batch=2)
    slow = replace(cluster, gpu=replace(cluster.gpu, fp32=cluster.gpu.fp32 / 10))
    assert estimate(model, slow, plan).step > 2 * estimate(model, cluster, plan).step > 0
    text = json.loads(path.read_text())
    text["constants"]["matmull"] = 0.5
    path.write_text(json.dumps(text))
    with pytest.raises(ValueError, match="constant of Cluster 'matmull'"):
        estimate(model, inputs.cluster(str(path)), plan)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_bind_their_group_to_the_gpu_that_they_measure(rank, tmp_path, monkeypatch):
    bound = bound_devices(monkeypatch, gpus=2)
    monkeypatch.setenv("LOCAL_RANK", "0")  # of the process that starts them
    measured = []
    monkeypatch.setattr(command, "measure", lambda device, *_: measured.append(device))
    monkeypatch.setattr(command.os, "_exit", lambda code: None)
    command._rank(rank, 2, True, 1.0, str(tmp_path), str(tmp_path / "found"), None)
    assert bound == measured == [torch.device("cuda", rank)]


def test_bad_arguments_name_themselves(tmp_path):
    with pytest.raises(ValueError, match=r"FILE must end in \.json, got .*machine\.toml"):
        calibrate(tmp_path / "machine.toml", 2, 1.0)
    (tmp_path / "folder.json").mkdir()
    for path, message in ((tmp_path / "folder.json", "is a folder"), (Path("/proc/machine.json"), "cannot be written")):
        with pytest.raises(OSError, match=f"calibrate: {path.parent}.* {message}"):  # before anything is measured
            calibrate(path, 2, 1.0)
    path = tmp_path / "machine.json"
    path.write_text('{"constants": [1]}')
    with pytest.raises(ValueError, match="constants must be a JSON object"):
        inputs.cluster(str(path))


def test_a_dry_run_takes_clusters_as_the_planner_does(tmp_path):
    """By name with the number first, and from files, as ``calibrate`` writes them."""
    link = {"name": "x", "latency": 1e-6, "bandwidth": 5e10}
    own = {
        "name": "a100-80x4",
        "gpu": "a100-80",
        "gpus": 4,
        "gpus_per_node": 4,
        "intra": link,
        "inter": link,
        "constants": {"matmul": 0.5},
    }
    (tmp_path / "here.json").write_text(json.dumps(own))
    four = Plan(dp=4, global_batch=4)
    assert planner_bridge.cluster_of(str(tmp_path / "here.json"), four) == inputs.cluster(str(tmp_path / "here.json"))
    one = planner_bridge.cluster_of(str(tmp_path / "here.json"), Plan())
    assert (one.gpus, one.constants) == (1, (("matmul", 0.5),))
    assert (
        planner_bridge.cluster_of("4xH100", four)
        == planner_bridge.cluster_of("h100", four)
        == presets.cluster("h100x4")
    )
    assert planner_bridge.cluster_of("h100x8", four).gpus == 8
