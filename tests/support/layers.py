"""What each rank does in the tests of the layers: the same on one process, where there is no mesh."""

import functools
import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_ops import layers
from parallel_ops.comm import ParallelMesh, shard_sizes
from parallel_ops.tensor_parallel import DeferredWeightGradients

HIDDEN, HEADS, VOCAB = 16, 4, 30


@functools.cache
def mesh_of(**sizes: int) -> ParallelMesh:
    """One mesh for all tests that use the ranks alike: each forms some ten process groups."""
    return ParallelMesh(**sizes)


def tp_mesh() -> DeviceMesh | None:
    """All ranks of the default group as tensor-parallel ranks."""
    return mesh_of(tp=dist.get_world_size())["tp"] if dist.is_initialized() else None


def build(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A layer of the seed's weights, over all ranks."""
    torch.manual_seed(seed)
    common = {"mesh": tp_mesh(), "dtype": dtype, **options}
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
        qkv_bias=True, window=3,
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


def weights(rank: int, kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state dict of a layer, made whole."""
    return {k: whole(v) for k, v in build(kind, seed=3, dtype=dtype).state_dict().items()}


def bad_token(rank: int) -> Tensor:
    return build("embedding")(torch.tensor([[1], [VOCAB]]))


def too_many_ranks(rank: int, kind: str) -> nn.Module:
    """A module that the four ranks cannot share, or not by this mesh."""
    build = {
        "kv_heads": lambda: layers.ParallelSelfAttention(24, 12, num_kv_heads=3, mesh=tp_mesh()),
        "heads": lambda: layers.ParallelSelfAttention(12, 6, mesh=tp_mesh()),
        "embedding": lambda: layers.VocabParallelEmbedding(5, 4, mesh=tp_mesh()),
        "column": lambda: layers.ColumnParallelLinear(4, 6, mesh=tp_mesh()),
        "row": lambda: layers.RowParallelLinear(6, 4, mesh=tp_mesh()),
        "mesh": lambda: layers.RowParallelLinear(6, 4, mesh=mesh_of(dp_shard=2, tp=2).root),
        "group": lambda: layers.RowParallelLinear(6, 4, mesh=dist.group.WORLD),
    }
    return build[kind]()


def close(got: Tensor, want: Tensor, eps: float) -> bool:
    """Equal but for rounding, in units of the largest value."""
    return bool((got - want).abs().max() <= eps * max(want.abs().max().item(), math.ulp(1.0)))


def with_handles(rank: int, sequence_parallel: bool, main: bool, defer: bool) -> tuple[dict[str, Tensor], int]:
    """(gradients of a transformer layer whose linears' go elsewhere, how many were put off)."""
    module = build("llama", sequence_parallel=sequence_parallel)
    queue = DeferredWeightGradients()
    linears = set_handles(module, queue if defer else None, main)
    x, grad = inputs("llama", 8, torch.float32)
    if sequence_parallel:
        x, grad = (t.chunk(dist.get_world_size())[rank] for t in (x, grad))
    module(x, angles(8, "llama")).backward(grad)
    pending = len(queue)
    queue.compute()
    grads = {name: None if p.grad is None else local(p.grad) for name, p in module.named_parameters()}
    if main:
        grads |= {f"{name}.weight": linear.main_grad for name, linear in linears.items()}
    return grads, pending


def set_handles(module: nn.Module, queue: DeferredWeightGradients | None, main: bool) -> dict[str, nn.Module]:
    """The linears of a module, by name, with gradients that go to a ``main_grad`` or a queue or both."""
    linears = {name: m for name, m in module.named_modules() if hasattr(m, "main_grad")}
    for linear in linears.values():
        linear.main_grad = torch.zeros_like(local(linear.weight)) if main else None
        linear.deferred = queue
    return linears


def embeds_nan(rank: int) -> tuple[Tensor, Tensor]:
    """Which outputs are NaN when the first row of every rank's part is, and which may be."""
    layer = layers.VocabParallelEmbedding(10, 4, mesh=tp_mesh())
    with torch.no_grad():
        local(layer.weight)[0] = torch.nan
    tokens = torch.arange(10)[:, None]
    return layer(tokens).detach(), (tokens % 5 == 0).unsqueeze(-1).expand(10, 1, 4)


def drawing_peak(rank: int) -> tuple[int, int]:
    """Bytes of this rank's part of a weight, and the most that tensors made while it was drawn held at once."""
    live = LiveBytes()
    with live:
        layer = layers.RowParallelLinear(2048, 512, mesh=tp_mesh(), bias=False)
    return local(layer.weight).nbytes, live.peak


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made under it that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func is torch.ops.aten.empty.memory_format and not out.is_meta:
            self.now += out.nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(out.untyped_storage(), self._freed, out.nbytes)
        return out

    def _freed(self, size: int) -> None:
        self.now -= size


def from_meta(rank: int) -> list[dict[str, Tensor]]:
    """The state of a layer that was made here, and of one that was made on the meta device and drawn later."""
    states = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        module = layers.ParallelTransformerLayer(HIDDEN, HEADS, mesh=tp_mesh(), sequence_parallel=True, device=device)
        if device == "meta":
            assert all(local(p).is_meta for p in module.parameters())
            module.to_empty(device="cpu")
            torch.manual_seed(3)
            for part in module.modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
        states.append({k: whole(v) for k, v in module.state_dict().items()})
    return states
