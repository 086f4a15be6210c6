"""The ops and sizes of the model, and one row for each of them, direction and GPU."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks import ops
from benchmarks.gpu_model.devices import Device
from benchmarks.gpu_model.facts import Facts, directions
from benchmarks.gpu_model.prediction import Prediction, predict
from benchmarks.harness.spec import Benchmark, Shape

# Hidden sizes: of models, and 4,104, a multiple of 8 that 16 does not divide.
_HIDDEN: list[Shape] = [(2048, 4, h) for h in (1024, 4096, 4104, 8192, 12288, 16384)]
_NORMS: list[Shape] = [*_HIDDEN, (512, 1, 65536)]
# 1,792 and 14,336 a rank, and a multiple of 8; in one tensor, gate and up are twice as wide.
_FFN = (1792, 4104, 14336)
_SCORES: list[Shape] = [(4, 32, 2048, 2048), (4, 32, 1032, 1032), (1, 4, 2048, 65536)]
# 4,008 is a rank's part of a vocabulary of 32,064 over 8.
_LOGITS: list[Shape] = [(8192, v) for v in (4008, 32000, 131072)]
# DeepSeek-V3: 7,168 wide, 256 experts, top 8; 64 experts, top 6, as in its smaller sisters.
_ROUTED: list[Shape] = [(8192, 256, 8), (32768, 64, 6)]
_PERMUTED: list[Shape] = [(8192, 7168, 8), (32768, 4096, 6)]

SHAPES: dict[str, list[Shape]] = {
    "bias_gelu": _HIDDEN,
    "bias_swiglu": [(2048, 4, 2 * f) for f in _FFN],
    "silu_mul": [(2048, 4, f) for f in _FFN],
    "bias_dropout_add": _HIDDEN,
    "layer_norm": _NORMS,
    "rms_norm": _NORMS,
    "rotary_embedding": [(2048, 4, 32, 128), (2048, 4, 8, 64)],
    "scaled_causal_softmax": _SCORES,
    "scaled_masked_softmax": _SCORES,
    "route": _ROUTED,
    "permute": _PERMUTED,
    "vocab_parallel_cross_entropy": _LOGITS,
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def dtypes(op: str, shape: Shape) -> list[str]:
    """float32 at one size, since bytes limit it: it differs in little but their number."""
    return ["bfloat16", "float32"] if shape == SHAPES[op][1] else ["bfloat16"]


@dataclass(frozen=True)
class Row:
    """``share``: of the speed of a clone that moves the least bytes. From ``kernel`` on, of the longest launch."""

    op: str
    direction: str
    shape: str
    dtype: str
    device: str
    share: float
    limit: str
    lost: dict[str, float]  # share of the time by cause, beside that of a clone
    bytes_to_least: float
    instructions: float  # machine instructions an element
    issue_share: float  # of the issue slots, at the speed of a clone
    kernel: str
    registers: int
    shared_bytes: int
    resident: int
    waves: float
    wave_efficiency: float
    barriers: float  # an iteration
    sectors_to_least: float
    narrow: float  # share of the bytes that moves in less than 128 bits a thread

    @property
    def key(self) -> tuple[str, ...]:
        return self.op, self.direction, self.shape, self.dtype, self.device


def benchmark(op: str) -> Benchmark:
    return ops.every()[op]


def rows(op: str, shape: Shape, dtype: str, devices: Sequence[Device]) -> Iterator[Row]:
    """Every direction on every device."""
    bench, torch_dtype = benchmark(op), DTYPES[dtype]
    counted: dict[tuple[int, int], dict[str, list[Facts]]] = {}
    for device in devices:
        kind = device.capability, device.multiprocessors
        if kind not in counted:
            counted[kind] = directions(bench, shape, torch_dtype, *kind)
        for direction, facts in counted[kind].items():
            least = bench.traffic(shape, torch_dtype).of(direction)
            yield _row(op, direction, shape, dtype, predict(facts, device, least, math.prod(shape)))


def _row(op: str, direction: str, shape: Shape, dtype: str, p: Prediction) -> Row:
    main = p.main
    bulk = sum(o.requested for o in main.facts.operands)
    return Row(
        op=op,
        direction=direction,
        shape="x".join(map(str, shape)),
        dtype=dtype,
        device=p.device.name,
        share=round(p.share, 3),
        limit=p.limit,
        lost={cause: round(seconds / p.total, 3) for cause, seconds in p.lost.items()},
        bytes_to_least=round(p.bytes / p.least, 3),
        instructions=round(p.instructions, 1),
        issue_share=round(p.issue_share, 3),
        kernel=main.facts.kernel,
        registers=main.facts.registers,
        shared_bytes=main.facts.shared_bytes,
        resident=main.resident,
        waves=round(main.waves, 2),
        wave_efficiency=round(main.wave_efficiency, 3),
        barriers=round(main.facts.barriers, 1),
        sectors_to_least=round(sum(o.ratio * o.requested for o in main.facts.operands) / bulk, 2),
        narrow=round(sum(o.narrow * o.requested for o in main.facts.operands) / bulk, 3),
    )
