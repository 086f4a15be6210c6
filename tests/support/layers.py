"""What each rank does in the tests of the layers: the same on one process, where there is no group."""

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel_ops import layers
from parallel_ops.comm import shard_sizes
from parallel_ops.tensor_parallel import DeferredWeightGradients

HIDDEN, HEADS, VOCAB = 16, 4, 30


def group():
    return dist.group.WORLD if dist.is_initialized() else None


def build(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A layer of the seed's weights, in the default group."""
    torch.manual_seed(seed)
    common = {"group": group(), "dtype": dtype, **options}
    if kind == "embedding":
        common.pop("overlap", None)
    module = _BUILDERS[kind](**common)
    with torch.no_grad():  # norms and biases that do something
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in module.named_parameters():
            if "norm" in name or name.endswith("out.bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return module


_BUILDERS = {
    "column": functools.partial(layers.ColumnParallelLinear, HIDDEN, 24),
    "halves": functools.partial(layers.ColumnParallelLinear, HIDDEN, 24, parts=2),
    "row": functools.partial(layers.RowParallelLinear, HIDDEN, 24),
    "embedding": functools.partial(layers.VocabParallelEmbedding, VOCAB, HIDDEN),
    "gelu": functools.partial(layers.ParallelMLP, HIDDEN, 24),
    "swiglu": functools.partial(layers.ParallelMLP, HIDDEN, 24, activation="swiglu"),
    "attention": functools.partial(layers.ParallelSelfAttention, HIDDEN, HEADS),
    # two queries for a key
    "grouped": functools.partial(layers.ParallelSelfAttention, 2 * HIDDEN, 8, kv_heads=4, bias=False),
    "layer": functools.partial(layers.ParallelTransformerLayer, HIDDEN, HEADS, ffn_hidden=24),
    "llama": functools.partial(
        layers.ParallelTransformerLayer,
        HIDDEN, HEADS, ffn_hidden=24, activation="swiglu", norm="rms_norm", bias=False,
    ),
}  # fmt: skip

KINDS = list(_BUILDERS)
# The column-parallel linear hands out features, the row-parallel one takes them; the rest is whole at both ends.
FEATURES_OUT, FEATURES_IN = ("column", "halves"), ("row",)


def angles(s: int, kind: str) -> tuple[Tensor, Tensor] | None:
    if kind not in ("attention", "grouped", "llama"):
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


def features(t: Tensor, kind: str, rank: int, world: int) -> Tensor:
    """This rank's output features: of each of the parts, for ``halves``."""
    if kind == "halves":
        return t.unflatten(-1, (2, -1)).chunk(world, dim=-1)[rank].flatten(-2)
    return t.chunk(world, dim=-1)[rank]


def step(
    rank: int,
    kind: str,
    s: int,
    sequence_parallel: bool,
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
    **options: Any,
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(output, gradient of the input, gradients of the parameters): this rank's parts, whole ones on one process."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    module = build(kind, dtype=dtype, sequence_parallel=sequence_parallel, **options)
    x, grad = inputs(kind, s, dtype)
    sizes = list(shard_sizes(s, world)) if sequence_parallel else None
    if sequence_parallel:
        x = x if kind in (*FEATURES_IN, "embedding") else x.split(sizes)[rank]
        grad = grad if kind in FEATURES_OUT else grad.split(sizes)[rank]
    x = x.chunk(world, dim=-1)[rank] if kind in FEATURES_IN else x
    grad = features(grad, kind, rank, world) if kind in FEATURES_OUT else grad
    x = x.clone() if kind == "embedding" else x.clone().requires_grad_()
    torch.manual_seed(seed)
    rotation = angles(s, kind)
    args = (x,) if rotation is None else (x, tuple(a.to(dtype) for a in rotation))
    y = module(*args, sizes=sizes)
    y.backward(grad)
    return y.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


def step_with(rank: int, kind: str, s: int, sequence_parallel: bool, dtype: torch.dtype, options: dict[str, Any]):
    return step(rank, kind, s, sequence_parallel, dtype, **options)


def save_one(kind: str, path: str) -> dict[str, Tensor]:
    return save(0, kind, path)


def gathered(
    parts: list[Any], kind: str, s: int, sequence_parallel: bool
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """The whole (output, gradient of the input, gradients) of ``step`` on all ranks."""
    world = len(parts)
    module = _whole_module(kind)
    shardings = {
        f"{prefix}.{name}" if prefix else name: sharding
        for prefix, child in module.named_modules()
        for name, sharding in getattr(child, "shardings", {}).items()
    }
    grads = {}
    for name, parameter in module.named_parameters():
        each = [p[2][name] for p in parts]
        if name not in shardings:
            assert all(torch.equal(each[0], e) for e in each[1:]), f"the gradient of {name} differs between ranks"
            grads[name] = each[0]
            continue
        sharding = shardings[name]
        pieces = [e.view(sharding.part_shape(rank, world)) for rank, e in enumerate(each)]
        grads[name] = torch.cat(pieces, dim=sharding.dim).view(parameter.shape)
    y, dx = [p[0] for p in parts], [p[1] for p in parts]
    return (
        _join(y, features_out=kind in FEATURES_OUT, halves=kind == "halves", tokens=sequence_parallel),
        None if dx[0] is None else _join(dx, features_out=kind in FEATURES_IN, halves=False, tokens=sequence_parallel),
        grads,
    )


def _whole_module(kind: str) -> nn.Module:
    return build(kind)


def _join(parts: list[Tensor], *, features_out: bool, halves: bool, tokens: bool) -> Tensor:
    if features_out:
        if halves:
            return torch.cat([p.unflatten(-1, (2, -1)) for p in parts], dim=-1).flatten(-2)
        return torch.cat(parts, dim=-1)
    if tokens:
        return torch.cat(parts)
    assert all(torch.equal(parts[0], p) for p in parts[1:]), "the ranks have different results"
    return parts[0]


def weights(rank: int, kind: str) -> dict[str, Tensor]:
    """The state dict of a layer, made whole."""
    state = build(kind, seed=3).state_dict()
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def save(rank: int, kind: str, path: str) -> dict[str, Tensor]:
    """Saves a layer with random values; returns it whole."""
    module = build(kind, seed=5)
    state = module.state_dict()
    assert all(isinstance(v, DTensor) for k, v in state.items() if k.endswith("qkv.weight"))
    dcp.save(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def load(rank: int, kind: str, path: str) -> dict[str, Tensor]:
    """Loads into a layer of other values; returns it whole."""
    module = build(kind, seed=6)
    state = module.state_dict()
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    module.load_state_dict(state)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in module.state_dict().items()}


def load_whole(rank: int, kind: str, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loads whole tensors, as of a model on one process."""
    module = build(kind, seed=6)
    module.load_state_dict(whole)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in module.state_dict().items()}


def clipped(rank: int, kind: str, max_norm: float) -> tuple[Tensor, dict[str, Tensor]]:
    """(norm, gradients of the parameters after clipping) of a layer with sequence parallelism."""
    module = build(kind, sequence_parallel=True)
    world = dist.get_world_size() if dist.is_initialized() else 1
    x, grad = (t.chunk(world)[rank] for t in inputs(kind, 8, torch.float32))
    module(x, *([angles(8, kind)] if angles(8, kind) else [])).backward(grad)
    norm = layers.clip_grad_norm(module, max_norm, group())
    return norm, {name: p.grad for name, p in module.named_parameters()}


def bad_token(rank: int) -> Tensor:
    return build("embedding")(torch.tensor([[1], [VOCAB]]))


def too_many_ranks(rank: int, kind: str) -> nn.Module:
    if kind == "attention":
        return layers.ParallelSelfAttention(12, 6, kv_heads=2, group=group())
    if kind == "heads":
        return layers.ParallelSelfAttention(12, 6, group=group())
    if kind == "embedding":
        return layers.VocabParallelEmbedding(5, 4, group=group())
    if kind == "column":
        return layers.ColumnParallelLinear(4, 6, group=group())
    return layers.RowParallelLinear(6, 4, group=group())


def close(got: Tensor, want: Tensor, eps: float) -> bool:
    """Equal but for rounding, in units of the largest value."""
    return bool((got - want).abs().max() <= eps * max(want.abs().max().item(), math.ulp(1.0)))


def with_handles(rank: int, sequence_parallel: bool, main: bool, defer: bool) -> tuple[dict[str, Tensor], int]:
    """(gradients of a transformer layer whose linears' go elsewhere, how many were put off)."""
    module = build("llama", sequence_parallel=sequence_parallel)
    queue = DeferredWeightGradients()
    linears = {name: m for name, m in module.named_modules() if hasattr(m, "main_grad")}
    for linear in linears.values():
        linear.main_grad = torch.zeros_like(linear.weight) if main else None
        linear.deferred = queue if defer else None
    x, grad = inputs("llama", 8, torch.float32)
    if sequence_parallel:
        x, grad = (t.chunk(dist.get_world_size())[rank] for t in (x, grad))
    module(x, angles(8, "llama")).backward(grad)
    pending = len(queue)
    queue.compute()
    grads = {name: p.grad for name, p in module.named_parameters()}
    if main:
        grads |= {f"{name}.weight": linear.main_grad for name, linear in linears.items()}
    return grads, pending


def loads_transposed(rank: int) -> None:
    layer = layers.ColumnParallelLinear(4, 8, group=dist.group.WORLD)
    layer.load_state_dict({"weight": torch.randn(4, 8), "bias": torch.randn(8)})


def embeds_nan(rank: int) -> tuple[Tensor, Tensor]:
    """Which outputs are NaN when the first row of every rank's part is, and which may be."""
    layer = layers.VocabParallelEmbedding(10, 4, group=dist.group.WORLD)
    with torch.no_grad():
        layer.weight[0] = torch.nan
    tokens = torch.arange(10)[:, None]
    return layer(tokens).detach(), (tokens % 5 == 0).unsqueeze(-1).expand(10, 1, 4)
