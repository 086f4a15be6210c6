"""What the kernels must need at most, held by the static model: bytes, instructions, barriers, occupancy, waves.

A few sizes on an H200; ``python -m benchmarks.gpu_model`` has all. About a minute of one core.
"""

import dataclasses
import functools
import math
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_model import cli, devices, table
from benchmarks.gpu_model.cases import Row, benchmark
from benchmarks.gpu_model.facts import SAMPLE, directions, launched
from benchmarks.gpu_model.prediction import Prediction, predict, wave_efficiency
from parallel_ops import bias_gelu, silu_mul

pytestmark = pytest.mark.aot

GPUS = {d.name: d for d in devices.DEVICES}
BF16 = torch.bfloat16
NORMS = ("layer_norm", "rms_norm")
SOFTMAXES = ("scaled_causal_softmax", "scaled_masked_softmax")


@functools.cache
def model(op: str, shape: tuple[int, ...], dtype: torch.dtype = BF16, gpu: str = "H200") -> dict[str, Prediction]:
    bench, device = benchmark(op), GPUS[gpu]
    launches = directions(bench, shape, dtype, device.capability, device.multiprocessors)
    traffic = bench.traffic(shape, dtype)
    return {d: predict(f, device, traffic.of(d), math.prod(shape)) for d, f in launches.items()}


def test_occupancy():
    """As the occupancy calculator gives it, for each of the four limits."""
    h100 = GPUS["H100 SXM"]
    assert h100.resident(registers=64, warps=8, shared_bytes=0) == 4  # registers
    assert h100.resident(registers=33, warps=4, shared_bytes=0) == 12  # registers, given in units of 256 a warp
    assert h100.resident(registers=16, warps=4, shared_bytes=0) == 16  # warps
    assert h100.resident(registers=16, warps=1, shared_bytes=0) == 32  # programs
    assert h100.resident(registers=32, warps=4, shared_bytes=100 * 1024) == 2  # shared memory, with a KiB each


def test_the_page_shows_measurements_beside_predictions():
    fields = {"direction": "forward", "shape": "8x16", "dtype": "bfloat16", "kernel": "_kernel", "limit": "bytes"}
    fields |= {"lost": {"waves": 0.4, "issue": 0.1}}
    numbers = dict.fromkeys([f.name for f in dataclasses.fields(Row) if f.type in (float, "float")], 1.0)
    counts = {"registers": 32, "shared_bytes": 0, "resident": 4}
    rows = [Row(**fields, **{**numbers, "share": 0.5}, **counts, op="gelu", device=name) for name in ("A100", "H200")]
    page = table.page(rows, list(GPUS.values()), {rows[1].key: 0.45})
    line = (
        "| forward 8x16 bfloat16 | 50% bytes, lost to waves |  |  | 50% bytes, lost to waves, measured 45% |  | 1.00 |"
    )
    assert line in page
    assert "| gelu | forward | 50% | bytes |" in page
    assert "| gelu forward 8x16 | 50% | waves 40%, issue 10% |" in page


def test_measurements_of_gpus_are_found_among_other_tables():
    """Those of whole ops; rows of overlap and ring attention are of another kind."""
    assert {device for *_, device in table.measured(Path(table.__file__).parents[1] / "results")} <= set(GPUS)


def test_wave_efficiency():
    assert wave_efficiency(128, 108, 1) == 1.0  # as one ends the next begins: its tail is counted in time
    assert wave_efficiency(128, 108, 2) == pytest.approx(128 / 216)
    assert wave_efficiency(264, 132, 2) == 1.0


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [
        ("bias_gelu", (1, 96, 4104), torch.float32),
        ("silu_mul", (1, 48, 4104), BF16),
        ("scaled_causal_softmax", (1, 1, 96, 1032), BF16),
    ],
)
def test_a_sample_counts_what_all_programs_do(op, shape, dtype):
    """Where some programs have less to do: tiles at the end of rows are nearly empty, causal rows differ in length."""
    sampled, whole = (directions(benchmark(op), shape, dtype, 90, 132, sample=n) for n in (SAMPLE, None))
    for direction in whole:
        for some, every in zip(sampled[direction], whole[direction], strict=True):
            if every.waits:  # the sums of a fiftieth of the bytes, the last block of which may be narrow
                continue
            assert some.programs == every.programs and some.instructions == pytest.approx(every.instructions, rel=0.02)
            for a, b in zip(some.operands, every.operands, strict=True):
                counts = [[o.requested, o.by_program, o.once] for o in (a, b)]
                assert counts[0] == pytest.approx(counts[1], rel=0.02), f"{every.kernel}: {a.name}"


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize(("op", "cols"), [("layer_norm", 12288), ("rms_norm", 12288)])
def test_wide_backward_of_norms_reads_once(op, cols):
    backward = model(op, (2048, 4, cols))["backward"]
    assert backward.bytes <= 3.2 / 3 * backward.least
    assert not any(x.facts.spills for x in backward.launches)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("op", NORMS)
def test_backward_of_norms_fills_every_gpu(op, gpu):
    device = GPUS[gpu]
    launches = launched(benchmark(op), (2048, 4, 4096), BF16, device.capability, device.multiprocessors)["backward"]
    ((kernel, programs, use),) = launches
    resident = device.resident(*use)
    rounds = -(-programs // (device.multiprocessors * resident))
    slots = device.multiprocessors * (resident * rounds if rounds > 1 else -(-programs // device.multiprocessors))
    assert programs / slots >= 0.9, f"{kernel}: {programs} programs, {resident} a multiprocessor"


@pytest.mark.aot(smoke=False)
def test_backward_of_layer_norm():
    backward = model("layer_norm", (2048, 4, 4096))["backward"]
    assert backward.main.facts.barriers <= 3
    assert backward.main.resident >= 2
    assert [x.facts.waits for x in backward.launches] == [False, True]


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize("cols", [1024, 2048, 4096])
@pytest.mark.parametrize("op", NORMS)
def test_backward_of_norms_is_near_a_clone(op, cols):
    """Finishing their sums counts in them."""
    assert model(op, (2048, 4, cols))["backward"].share >= 0.85


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize("op", [*NORMS, *SOFTMAXES])
def test_forward_reads_long_rows_once(op):
    shape = (512, 1, 65536) if op in NORMS else (1, 4, 512, 65536)
    forward = model(op, shape)["forward"]
    assert forward.bytes <= 1.05 * forward.least


@pytest.mark.parametrize(
    ("op", "shape", "direction", "most"),
    [
        ("bias_gelu", (2048, 4, 4096), "forward", 13),
        ("vocab_parallel_cross_entropy", (8192, 131072), "forward", 10),
        ("bias_dropout_add", (2048, 4, 4096), "forward", 20),
    ],
)
def test_instructions_an_element(op, shape, direction, most):
    assert model(op, shape)[direction].instructions <= most


@pytest.mark.aot(smoke=False)
def test_causal_softmax_computes_what_is_visible():
    """In proportion, to a block: rows of 4,096 keys are eight, of which the first query sees one and the last all.

    So half of the seven others are seen on average; and all together take at most half of the 27 instructions an
    element that the kernel took when it computed what is hidden too.
    """
    op, shape = "scaled_causal_softmax", (1, 8, 4096, 4096)
    square, last = (model(op, s)["forward"].instructions for s in (shape, (1, 8, 32, 4096)))
    device = GPUS["H200"]
    only_first = directions(benchmark(op), shape, BF16, device.capability, device.multiprocessors, sample=1)["forward"]
    first = predict(only_first, device, 1, math.prod(shape)).instructions
    assert square <= 1.02 * (first + last) / 2
    assert square <= 13.5


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("bias_gelu", (2048, 4, 4096)),
        ("bias_swiglu", (2048, 4, 8192)),
        ("bias_dropout_add", (2048, 4, 4096)),
        ("layer_norm", (2048, 4, 4096)),
        ("rms_norm", (2048, 4, 4096)),
        ("rotary_embedding", (2048, 4, 32, 128)),
        ("scaled_causal_softmax", (4, 32, 2048, 2048)),
        ("scaled_masked_softmax", (4, 32, 2048, 2048)),
        ("vocab_parallel_cross_entropy", (8192, 131072)),
    ],
)
def test_issue_slots(op, shape, direction):
    """No op needs more than three quarters of the issue slots of an H200 at the speed of a clone."""
    assert model(op, shape)[direction].issue_share <= 0.75


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        *((op, (2048, 4, 4104)) for op in ("bias_gelu", "bias_dropout_add", "layer_norm")),
        ("bias_swiglu", (2048, 4, 8208)),
        ("scaled_masked_softmax", (4, 8, 1032, 1032)),
        ("vocab_parallel_cross_entropy", (8192, 4008)),
    ],
)
def test_columns_that_16_does_not_divide_move_128_bits(op, shape):
    for prediction in model(op, shape).values():
        operands = [o for o in prediction.main.facts.operands if o.name != "mask"]  # a byte each: aligned to 8 bytes
        moved = sum(o.requested for o in operands)
        assert sum(o.narrow * o.requested for o in operands) <= 0.1 * moved
        assert sum(o.ratio * o.requested for o in operands) <= 1.1 * moved


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize(("op", "shape"), [("bias_gelu", (2048, 4, 1024)), ("bias_swiglu", (2048, 4, 2 * 1792))])
def test_backward_at_small_widths_has_three_programs_a_multiprocessor(op, shape):
    main = model(op, shape)["backward"].main
    assert min(main.resident, main.facts.programs / GPUS["H200"].multiprocessors) >= 3


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize("op", ["bias_gelu", "silu_mul"])
def test_backward_without_a_bias_is_one_launch_on_a_flat_grid(op):
    device = GPUS["H200"]
    run = {"bias_gelu": lambda x, bias: bias_gelu(x), "silu_mul": silu_mul}[op]
    (only,) = directions(benchmark(op), (2048, 4, 1024), BF16, device.capability, device.multiprocessors, op=run)[
        "backward"
    ]
    assert only.grid[1:] == (1, 1)
    assert (
        min(device.resident(only.registers, only.warps, only.shared_bytes), only.programs / device.multiprocessors) >= 3
    )


@pytest.mark.parametrize("shape", [(32768, 4096, 6), (8192, 7168, 8)])
def test_permute_moves_each_row_once(shape):
    """A token's row is not read again for each of its experts."""
    for prediction in model("permute", shape).values():
        assert prediction.bytes <= 1.05 * prediction.least
        assert prediction.share >= 0.85


@pytest.mark.parametrize("shape", [(32768, 64, 6), (8192, 256, 8)])
def test_route_moves_little_but_logits(shape):
    """Its programs' sums for each expert are few. Choosing costs more than moving: see docs/gpu/model.md."""
    for prediction in model("route", shape).values():
        assert prediction.bytes <= 1.11 * prediction.least
        assert not any(x.facts.spills for x in prediction.launches)
    forward = model("route", shape)["forward"]
    assert [x.facts.waits for x in forward.launches] == [False, True]
    assert forward.instructions * shape[2] <= 95  # a logit


@pytest.mark.parametrize("shape", ["foo", "64x64", "64x0x64"])
def test_a_wrong_shape_is_one_line(capsys, shape):
    with pytest.raises(SystemExit, match="2"):
        cli.command(op=["rms_norm"], shape=[shape])
    assert capsys.readouterr().err == f"error: --shape must be 3 sizes such as 64x64x64, got {shape!r}\n"
