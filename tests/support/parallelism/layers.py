"""What each rank does in the tests of the layers: the same on one process, where there is no mesh."""

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel_ops import layers
from parallel_ops.comm import ParallelMesh, shard_sizes
from parallel_ops.planner.plan import Plan
from parallel_ops.tensor_parallel import DeferredWeightGradients
from parallel_ops.train.parallelize_model import MESH_SIZES

HIDDEN, HEADS, VOCAB = 16, 4, 30


@functools.cache
def mesh_of(**sizes: int) -> ParallelMesh:
    """One mesh for all tests that use the ranks alike: each forms some ten process groups."""
    return ParallelMesh(**sizes)


def mesh_of_plan(plan: Plan) -> ParallelMesh:
    return mesh_of(**{name: getattr(plan, name) for name in MESH_SIZES})


def tp_mesh() -> DeviceMesh | None:
    """All ranks of the default group as tensor-parallel ranks."""
    return mesh_of(tp=dist.get_world_size())["tp"] if dist.is_initialized() else None


def build(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A layer of the seed's weights, over all ranks."""
    torch.manual_seed(seed)
    common = {"tp_mesh": tp_mesh(), "dtype": dtype, **options}
    if kind == "embedding":
        common.pop("overlap", None)
    module = _BUILDERS[kind](**common)
    with torch.no_grad():  # norms and biases that do something
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in module.named_parameters():
            if "norm" in name or name.endswith(("out.bias", "down.bias")):
                noise = 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
                local(parameter).add_(noise)
    return module


def local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


_BUILDERS = {
    "column": functools.partial(layers.ColumnParallelLinear, HIDDEN, 24),
    "row": functools.partial(layers.RowParallelLinear, HIDDEN, 24),
    "embedding": functools.partial(layers.VocabParallelEmbedding, VOCAB, HIDDEN),
    "gelu": functools.partial(layers.ParallelMLP, HIDDEN, 24),
    "swiglu": functools.partial(layers.ParallelMLP, HIDDEN, 24, activation="swiglu"),
    "attention": functools.partial(layers.ParallelSelfAttention, HIDDEN, HEADS),
    # two queries for a key
    "grouped": functools.partial(layers.ParallelSelfAttention, 2 * HIDDEN, 8, num_kv_heads=4, bias=False),
    # fewer keys than ranks, heads of another size, normed, biases of their own
    "shared": functools.partial(
        layers.ParallelSelfAttention, HIDDEN, HEADS, num_kv_heads=1, head_dim=6, qk_norm=True, bias=False,
        qkv_bias=True, window_size=(2, 0),
    ),
    "layer": functools.partial(layers.ParallelTransformerLayer, HIDDEN, HEADS, ffn_hidden_size=24),
    "llama": functools.partial(
        layers.ParallelTransformerLayer,
        HIDDEN, HEADS, ffn_hidden_size=24, activation="swiglu", norm="rms_norm", bias=False,
    ),
}  # fmt: skip

KINDS = list(_BUILDERS)
# The column-parallel linear hands out features, the row-parallel one takes them; the rest is whole at both ends.
FEATURES_OUT, FEATURES_IN = ("column",), ("row",)


def angles(s: int, kind: str) -> tuple[Tensor, Tensor] | None:
    if kind not in ("attention", "grouped", "shared", "llama"):
        return None
    phase = torch.arange(s)[:, None] / 10 ** torch.arange(2)
    return phase.cos(), phase.sin()


def inputs(kind: str, s: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The whole input, and the whole gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    width = 2 * HIDDEN if kind == "grouped" else HIDDEN
    if kind == "embedding":
        x = torch.randint(VOCAB, (s, 2), generator=generator)
    else:
        x = torch.randn(s, 2, width, generator=generator, dtype=torch.float64).to(dtype)
    out = 24 if kind in (*FEATURES_OUT, *FEATURES_IN) else width
    return x, torch.randn(s, 2, out, generator=generator, dtype=torch.float64).to(dtype)


def step(
    rank: int,
    kind: str,
    s: int,
    sequence_parallel: bool,
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
    **options: Any,
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(output, gradient of the input, whole gradients of the parameters): the first two are this rank's part."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    module = build(kind, dtype=dtype, sequence_parallel=sequence_parallel, **options)
    x, grad = inputs(kind, s, dtype)
    sizes = list(shard_sizes(s, world)) if sequence_parallel else None
    if sequence_parallel:
        x = x if kind in (*FEATURES_IN, "embedding") else x.split(sizes)[rank]
        grad = grad if kind in FEATURES_OUT else grad.split(sizes)[rank]
    x = x.chunk(world, dim=-1)[rank] if kind in FEATURES_IN else x
    grad = grad.chunk(world, dim=-1)[rank] if kind in FEATURES_OUT else grad
    x = x.clone() if kind == "embedding" else x.clone().requires_grad_()
    torch.manual_seed(seed)
    rotation = angles(s, kind)
    args = (x,) if rotation is None else (x, tuple(a.to(dtype) for a in rotation))
    y = module(*args, sizes=sizes)
    y.backward(grad)
    return y.detach(), x.grad, {name: whole(p.grad) for name, p in module.named_parameters()}


def step_with(rank: int, kind: str, s: int, sequence_parallel: bool, dtype: torch.dtype, options: dict[str, Any]):
    return step(rank, kind, s, sequence_parallel, dtype, **options)


def gathered(parts: list[Any], kind: str, sequence_parallel: bool) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """The whole (output, gradient of the input, gradients) of ``step`` on all ranks."""
    y, dx, grads = zip(*parts, strict=True)
    for name, grad in grads[0].items():
        assert all(torch.equal(grad, other[name]) for other in grads[1:]), f"the gradient of {name} differs"
    return (
        _join(y, features=kind in FEATURES_OUT, tokens=sequence_parallel),
        None if dx[0] is None else _join(dx, features=kind in FEATURES_IN, tokens=sequence_parallel),
        grads[0],
    )


def _join(parts: list[Tensor], *, features: bool, tokens: bool) -> Tensor:
    if features:
        return torch.cat(parts, dim=-1)
    if tokens:
        return torch.cat(parts)
    assert all(torch.equal(parts[0], p) for p in parts[1:]), "the ranks have different results"
    return parts[0]


def close(got: Tensor, want: Tensor, eps: float) -> bool:
    """Equal but for rounding, in units of the largest value."""
    return bool((got - want).abs().max() <= eps * max(want.abs().max().item(), math.ulp(1.0)))


def set_handles(module: nn.Module, queue: DeferredWeightGradients | None, main: bool) -> dict[str, nn.Module]:
    """The linears of a module, by name, with gradients that go to a ``main_grad`` or a queue or both."""
    linears = {name: m for name, m in module.named_modules() if hasattr(m, "main_grad")}
    for linear in linears.values():
        linear.main_grad = torch.zeros_like(local(linear.weight)) if main else None
        linear.deferred = queue
    return linears
