"""How near ring attention comes to the attention of one device over the same total work.

For one rank of ``size``, forward, and forward and backward:

    whole     flash attention of the whole sequence on one device
    ring      this rank's part of it, with the keys of the others on their way
    transfer  what the ring sends and receives, and nothing else

    percent   (whole / size) / ring             100: as if the ranks were one device
    overhead  ring / (whole / size + transfer)  above 1: time that neither arithmetic nor transfer explains

Over a paced link one rank runs the real schedule and keys arrive when a link of that bandwidth would deliver them. On a
GPU the shapes are those of Llama 3 8B. On a CPU there are fewer tokens and heads, and the link is proportionate: bytes
take as long, against the arithmetic of a step, as they would for a GPU of REFERENCE_FLOPS with that link.
"""

import dataclasses
import functools

import torch
from torch import Tensor

from benchmarks.environment import Environment
from benchmarks.overlap import Rounds
from benchmarks.timing import Call, Timer, take_turns
from parallel_ops.comm.transport.base import Transport
from parallel_ops.context_parallel import SequenceLayout
from parallel_ops.context_parallel.cost import Algorithm, keys_sent
from parallel_ops.context_parallel.schedule.blocks import Options, pack_keys
from parallel_ops.context_parallel.schedule.ring import KVGradReducer, KVPrefetcher
from parallel_ops.context_parallel.schedule.transport import Attention
from parallel_ops.ops.attention.flash_attention import flash_attention

# FLOP/s of attention as an H100 does it in practice; it sets only how fast a proportionate link is.
REFERENCE_FLOPS = 600e12
DIRECTIONS = ("forward", "both")
_OP = "bench_ring_attention"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A causal attention. ``tokens``: of one rank. ``documents``: of how many, of different lengths, it is."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: str = "zigzag"
    documents: int = 1

    def cu_seqlens(self, size: int, device: torch.device) -> Tensor | None:
        """Documents whose lengths rise from the first to the last."""
        if self.documents == 1:
            return None
        share = torch.arange(self.documents + 1, dtype=torch.float64)
        share = share * (share + 1) / (self.documents * (self.documents + 1))
        return (share * size * self.tokens).round().to(device, torch.int32)

    def bandwidth(self, gb_per_s: float, size: int, itemsize: int, whole_seconds: float) -> float:
        """Bytes per second that are to this machine's arithmetic what ``gb_per_s`` is to a reference GPU's: of a
        forward pass of a whole causal sequence without documents, which took ``whole_seconds`` here."""
        flops = 2 * self.heads * self.head_dim * (size * self.tokens) ** 2
        sent = keys_sent(self.tokens, self.tokens, 2 * self.kv_heads * self.head_dim, 2).forward
        reference = (sent / (gb_per_s * 1e9)) / (flops / REFERENCE_FLOPS)
        here = keys_sent(self.tokens, self.tokens, 2 * self.kv_heads * self.head_dim, itemsize).forward
        return here / (reference * whole_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """Times in milliseconds, medians. ``link_gb_per_s`` is what was asked for; None for a real transport."""

    layout: str
    direction: str
    size: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    documents: int
    dtype: str
    transport: str
    link_gb_per_s: float | None
    ms_whole: float
    ms_transfer: float
    ms_ring: float
    percent: float
    overhead: float

    @property
    def key(self) -> tuple[str, ...]:
        link = "" if self.link_gb_per_s is None else f"{self.link_gb_per_s:g}"
        shape = (self.size, self.tokens, self.heads, self.kv_heads, self.head_dim, self.documents)
        return self.layout, self.direction, *map(str, shape), self.dtype, self.transport, link


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds of one direction."""

    whole: float
    transfer: float
    ring: float
    size: int

    @property
    def percent(self) -> float:
        return 100 * self.whole / self.size / self.ring

    @property
    def overhead(self) -> float:
        return self.ring / (self.whole / self.size + self.transfer)


def whole_calls(shape: Shape, size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Call]:
    """The whole sequence on one device, by direction."""
    s = size * shape.tokens
    q, k, v = (_random(s, n, shape.head_dim, dtype, device).requires_grad_() for n in _heads(shape))
    attend = functools.partial(flash_attention, q, k, v, cu_seqlens=shape.cu_seqlens(size, device))
    grad = torch.randn_like(q)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    return {"forward": forward, "both": lambda: torch.autograd.grad(attend(), (q, k, v), grad)}


def ring_calls(shape: Shape, transport: Transport, dtype: torch.dtype, device: torch.device) -> dict[str, Call]:
    """One rank's part, by direction, and ``transfer`` with the direction for its messages alone."""
    size, rank = transport.size, transport.rank
    options = Options(True, None, shape.head_dim**-0.5, 0.0, 0.0, None, shape.cu_seqlens(size, device))
    attention = Attention(_OP, transport, size * shape.tokens, shape.layout, Algorithm(1, False), options)
    s = SequenceLayout(size * shape.tokens, size, shape.layout).lengths[rank]
    q, k, v = (_random(s, n, shape.head_dim, dtype, device) for n in _heads(shape))
    grad = torch.randn_like(q)
    ring = attention.ring()
    kv = pack_keys(k, v)
    shares = torch.zeros(kv.shape, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def both() -> object:
        out, statistics, _ = attention.forward(q, k, v, None)
        return attention.backward(grad, q, k, v, None, out, statistics)

    def transfer(direction: str) -> None:
        for phase in DIRECTIONS[: 1 + DIRECTIONS.index(direction)]:
            returns = KVGradReducer(ring, shares.clone()) if phase == "both" else None
            feed = KVPrefetcher(ring, kv)
            for step in range(1, size):
                _, keys = feed.take()
                if returns is not None:
                    returns.post(step, shares[: len(keys)].contiguous())
            if returns is not None:
                returns.total()

    return {
        "forward": lambda: attention.forward(q, k, v, None),
        "both": both,
        **{f"transfer {direction}": functools.partial(transfer, direction) for direction in DIRECTIONS},
    }


def medians(calls: dict[str, Call], timer: Timer, rounds: Rounds) -> dict[str, float]:
    """Seconds of each, taking turns."""
    stats = take_turns(
        {name: [call] for name, call in calls.items()}, timer, min_rounds=rounds.least, max_rounds=rounds.most,
        budget_s=rounds.budget_s,
    )  # fmt: skip
    return {name: found.median for name, found in stats.items()}


def measured(seconds: dict[str, float], size: int, direction: str) -> Measured:
    """From ``medians`` of both kinds of calls, those of the whole under ``whole`` and the direction."""
    return Measured(seconds[f"whole {direction}"], seconds[f"transfer {direction}"], seconds[direction], size)


def torch_ring(shape: Shape, size: int, dtype: torch.dtype, device: torch.device) -> Call:
    """PyTorch's own context parallelism over the default group; RuntimeError where it has no kernel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(device.type, (size,))
    s = size * shape.tokens
    # [b, h, s, d], whole on every rank; keys are repeated, since its ring takes as many heads of each.
    q, k, v = (torch.randn(1, shape.heads, s, shape.head_dim, device=device).to(dtype) for _ in range(3))
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward() -> object:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return forward


def _heads(shape: Shape) -> tuple[int, int, int]:
    return shape.heads, shape.kv_heads, shape.kv_heads


def _random(s: int, heads: int, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(s, 1, heads, d, device=device).to(dtype)
