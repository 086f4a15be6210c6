"""The experts of a transformer layer: ours, Transformers' two ways, and the matmuls alone.

    python -m benchmarks moe [--dtype bfloat16] [--case "64 top 2"] [--rounds 15] [--cpu-time]
        [--keep-memory]

A layer of Qwen3-MoE, forward and backward, of 2,048 tokens with hidden size 512 by default: router, choice of the
experts, gate and up projection, SwiGLU, down projection, weighted sum; gradients of tokens, router and experts. The
matmuls alone are those of both projections, of their inputs' and of their weights' gradients: ``torch.mm`` an expert
into memory that is there already, for the same rows of each expert, and nothing else. All arms get the same weights and
take turns in each round, so a slow spell of the machine falls on all alike. glibc returns freed memory to the system,
and each step faults in pages anew; with ``--keep-memory`` all arms keep it, as the trainer does.
"""

import itertools
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.timing import Call, HostTimer, Rounds, take_turns
from parallel_ops import bias_swiglu, grouped_linear, permute, route, sort_by_expert, unpermute
from parallel_ops.train.launch.malloc import keep_freed_memory

_DTYPES = ("bfloat16", "float32")


class Case(NamedTuple):
    experts: int
    top_k: int
    ffn: int

    @property
    def name(self) -> str:
        return f"{self.experts} top {self.top_k}"


_CASES = [Case(16, 2, 512), Case(64, 2, 512), Case(16, 8, 256), Case(64, 8, 256)]


class Layer(NamedTuple):
    """Tokens ``[t, h]``, the gradient of the result, and the parameters: ``[n, h]``, ``[n, 2f, h]``, ``[n, h, f]``."""

    x: Tensor
    grad: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def random(cls, case: Case, tokens: int, hidden: int, dtype: torch.dtype) -> "Layer":
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()

        n, f = case.experts, case.ffn
        return cls(
            normal(tokens, hidden),
            normal(tokens, hidden).detach(),
            normal(n, hidden, scale=hidden**-0.5),
            normal(n, 2 * f, hidden, scale=hidden**-0.5),
            normal(n, hidden, f, scale=f**-0.5),
        )


def ours(layer: Layer, top_k: int) -> Tensor:
    routing = route(F.linear(layer.x, layer.router), top_k)
    order = sort_by_expert(routing.experts, len(layer.router))
    h = bias_swiglu(grouped_linear(permute(layer.x, order), layer.gate_up, order.offs))
    return unpermute(grouped_linear(h, layer.down, order.offs), order, routing.weights)


def transformers_layer(case: Case, layer: Layer, implementation: str) -> Callable[[], Tensor]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    chosen: dict[str, Any] = {"experts_implementation": implementation}
    config = Qwen3MoeConfig(
        hidden_size=layer.x.shape[1], moe_intermediate_size=case.ffn, num_experts=case.experts,
        num_experts_per_tok=case.top_k, norm_topk_prob=True, **chosen,
    )  # fmt: skip
    block = Qwen3MoeSparseMoeBlock(config)
    block.gate.weight = torch.nn.Parameter(layer.router.detach())
    block.experts.gate_up_proj = torch.nn.Parameter(layer.gate_up.detach())
    block.experts.down_proj = torch.nn.Parameter(layer.down.detach())

    def call() -> Tensor:
        block.zero_grad()
        y: Tensor = block(layer.x[None])[0]
        return y

    return call


def products(case: Case, layer: Layer) -> Call:
    """The matmuls of forward and backward, an expert at a time, into buffers."""
    with torch.no_grad():
        routing = route(F.linear(layer.x, layer.router), case.top_k)
        order = sort_by_expert(routing.experts, case.experts)
        bounds = [0, *order.offs.tolist()]
        x = permute(layer.x, order)
        of_gate_up = torch.randn(len(x), 2 * case.ffn).to(x.dtype)
        h, y = torch.randn(len(x), case.ffn).to(x.dtype), torch.randn_like(x)
        linears = [
            (x, layer.gate_up.detach(), of_gate_up, torch.empty_like(of_gate_up)),
            (h, layer.down.detach(), y, torch.empty_like(y)),
        ]
        buffers = [(torch.empty_like(rows), torch.empty_like(weight)) for rows, weight, *_ in linears]

    def call() -> None:
        rows = [slice(start, end) for start, end in itertools.pairwise(bounds)]
        for (inputs, weight, dy, out), (dx, dweight) in zip(linears, buffers, strict=True):
            for e, some in enumerate(rows):
                torch.mm(inputs[some], weight[e].t(), out=out[some])
            for e, some in enumerate(rows):
                torch.mm(dy[some], weight[e], out=dx[some])
            for e, some in enumerate(rows):
                torch.mm(dy[some].t(), inputs[some], out=dweight[e])

    return call


def arms(case: Case, layer: Layer, missing: list[str]) -> dict[str, Call]:
    def step(forward: Callable[[], Tensor]) -> Call:
        def call() -> None:
            for t in layer:
                t.grad = None
            forward().backward(layer.grad)

        return call

    calls: dict[str, Call] = {"products": products(case, layer), "ours": step(lambda: ours(layer, case.top_k))}
    for name in ("grouped_mm", "eager"):
        try:
            forward = transformers_layer(case, layer, name)
        except ImportError as error:
            missing.append(f"Transformers' {name}: {error}")
            continue
        expected = ours(layer, case.top_k)
        if (forward() - expected).norm() > 0.1 * expected.norm():  # experts of equal bfloat16 logits are others
            raise RuntimeError(f"{name} of Transformers computes something else in {case.name}")
        calls[name] = step(forward)
    return calls


def main(
    dtype: Annotated[list[str] | None, typer.Option(help="bfloat16 or float32; both by default.")] = None,
    case: Annotated[list[str] | None, typer.Option(help='As "64 top 2"; all by default.')] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 2_048,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 512,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of which the median is shown, after one that is not timed.")
    ] = 15,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="CPU time of one thread: on a machine in use.")] = False,
    keep_memory: Annotated[
        bool, typer.Option("--keep-memory", help="Freed memory is kept, as by the trainer.")
    ] = False,
) -> None:
    """Times of forward and backward, over those of the matmuls alone, and of Transformers' over ours."""
    names = [c.name for c in _CASES]
    options.check("dtype", dtype, _DTYPES)
    options.check("case", case, names)
    if keep_memory:
        keep_freed_memory()
    if cpu_time:
        torch.set_num_threads(1)
    # In training a step follows one of its own kind, whose memory it finds. After another arm it would find that arm's.
    timer = HostTimer(torch.device("cpu"), clock=time.thread_time if cpu_time else time.perf_counter, warm=1)
    missing: list[str] = []
    table = options.table("dtype", "experts", "arm", "ms", "quartiles", "/ products", "/ ours", left=("experts", "arm"))
    for name in dtype or _DTYPES:
        for chosen in (c for c in _CASES if c.name in (case or names)):
            layer = Layer.random(chosen, tokens, hidden, options.DTYPES[name])
            stats = take_turns(arms(chosen, layer, missing), timer, Rounds(rounds))
            for arm, s in stats.items():
                over = (f"{s.median / stats[other].median:.2f}" for other in ("products", "ours"))
                table.add_row(name, f"{chosen.name}, ffn {chosen.ffn}", arm, *options.milliseconds(s), *over)
    options.console().print(table)
    for line in dict.fromkeys(missing):
        typer.echo(f"not measured: {line}")


app = options.single(main)
