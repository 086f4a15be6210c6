"""Parts of a layer that users hook, wrap or prune: a block calls them then, and does not only read their weights."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from parallel_ops import layers
from parallel_ops.models import Transformer, TransformerConfig
from support.parallelism.layers import HEADS, HIDDEN, angles, build, inputs, tp_mesh, whole
from support.ranks.distributed import ranks

KINDS = ["gelu", "swiglu", "grouped", "shared", "latent", "all_heads"]


class Doubled(nn.Module):
    """A wrapper that shows the attributes of what it wraps, as wrappers for checkpointing and adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, *args, **options):
        return 2 * self.inner(*args, **options)


def block(kind: str, **options) -> nn.Module:
    if kind == "latent":
        sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
        torch.manual_seed(0)
        return layers.ParallelLatentAttention(HIDDEN, HEADS, tp_mesh=tp_mesh(), **sizes, **options)
    if kind == "all_heads":
        return build("attention", qk_norm=True, qk_norm_over="all_heads", **options)
    return build(kind, **options)


def doubled(rank: int, kind: str, sequence_parallel: bool, way: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(output, gradient of the input, gradients) of a block whose parts but the last give twice what they compute."""
    module = block(kind, sequence_parallel=sequence_parallel)
    parts = [name for name, _ in module.named_children() if name not in ("out", "down")]
    for part in (getattr(module, name) for name in parts):
        if way == "weights":
            for parameter in part.parameters():
                parameter.data.mul_(2)
        elif way == "hooks":
            part.register_forward_hook(lambda part, given, y: 2 * y)
    if way == "wrappers":
        for name in parts:
            setattr(module, name, Doubled(getattr(module, name)))
    x, grad = inputs(kind, 8, torch.float32)
    if sequence_parallel:
        x, grad = (t.chunk(2)[rank] for t in (x, grad))
    x, rotation = x.clone().requires_grad_(), angles(8, kind)
    y = module(x) if rotation is None else module(x, rotation)
    y.backward(grad)
    scale = {
        name: 2 if way == "weights" and name.split(".")[0] in parts else 1 for name, _ in module.named_parameters()
    }
    return y.detach(), x.grad, [scale[name] * whole(p.grad) for name, p in module.named_parameters()]


@pytest.mark.parametrize("way", ["hooks", "wrappers"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_are_hooked_or_wrapped_are_called(kind, way):
    torch.testing.assert_close(doubled(0, kind, False, way), doubled(0, kind, False, "weights"))


@pytest.mark.parametrize("way", ["hooks", "wrappers"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_parts_that_are_hooked_or_wrapped_are_called_on_ranks(kind, sequence_parallel, way):
    got, want = (ranks(2).run(doubled, kind, sequence_parallel, each) for each in (way, "weights"))
    torch.testing.assert_close(got, want)


def test_norms_over_the_heads_of_all_ranks_take_no_hooks():
    for raised in ranks(2).outcomes(doubled, "all_heads", False, "hooks"):
        assert raised.type == "ValueError" and "cannot have hooks" in raised.message


@pytest.mark.parametrize(("tied", "part"), [(False, "head"), (True, "tokens")])
def test_a_head_that_is_wrapped_is_refused(tied, part):
    """The loss reads its weight, so a wrapper would have no effect."""
    config = TransformerConfig(
        vocab_size=11, seq_length=4, num_layers=1, hidden_size=HIDDEN, num_heads=2, tied_embeddings=tied
    )
    model = Transformer(config)
    setattr(model, part, Doubled(getattr(model, part)))
    with pytest.raises(TypeError, match="VocabParallelEmbedding, got Doubled"):
        model(torch.zeros(4, 1, dtype=torch.int64))


def test_pruned_linears_train():
    module = build("swiglu")
    for linear in (module.gate, module.up, module.down):
        prune.random_unstructured(linear, "weight", 0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):  # pruning masks the weight before each call
        module(inputs("swiglu", 8, torch.float32)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
