"""Every layer over 1, 2 and 4 tensor-parallel ranks is the same layer."""

import copy
import functools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_ops import layers
from parallel_ops.layers import core_attention
from support.parallelism import layers as on_rank
from support.parallelism.layers import HEADS, HIDDEN, KINDS, VOCAB, build, local, mesh_of, tp_mesh, whole
from support.ranks.distributed import Raised, ranks

kinds = pytest.mark.parametrize("kind", KINDS)
groups = pytest.mark.parametrize("size", [2, 4])


def compare(got, want, eps):
    """(output, gradient of the input, gradients of the parameters)"""
    assert on_rank.close(got[0], want[0], eps), "output"
    if want[1] is not None:
        assert on_rank.close(got[1], want[1], eps), "gradient of the input"
    assert got[2].keys() == want[2].keys()
    for name, grad in want[2].items():
        # A bias of all keys changes no softmax: its gradient is rounding.
        scale = want[2][name.replace("k.bias", "q.bias")].abs().max()
        assert (got[2][name] - grad).abs().max() <= eps * scale, f"gradient of {name}"


def weights(rank: int, kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state dict of a layer, made whole."""
    return {k: whole(v) for k, v in build(kind, seed=3, dtype=dtype).state_dict().items()}


def bad_token(rank: int) -> Tensor:
    return build("embedding")(torch.tensor([[1], [VOCAB]]))


def too_many_ranks(rank: int, kind: str) -> nn.Module:
    """A module that the four ranks cannot share, or not by this mesh."""
    made = {
        "kv_heads": lambda: layers.ParallelSelfAttention(24, 12, num_kv_heads=3, tp_mesh=tp_mesh()),
        "heads": lambda: layers.ParallelSelfAttention(12, 6, tp_mesh=tp_mesh()),
        "embedding": lambda: layers.VocabParallelEmbedding(5, 4, tp_mesh=tp_mesh()),
        "column": lambda: layers.ColumnParallelLinear(4, 6, tp_mesh=tp_mesh()),
        "row": lambda: layers.RowParallelLinear(6, 4, tp_mesh=tp_mesh()),
        "mesh": lambda: layers.RowParallelLinear(6, 4, tp_mesh=mesh_of(dp_shard=2, tp=2).root),
        "group": lambda: layers.RowParallelLinear(6, 4, tp_mesh=dist.group.WORLD),
    }
    return made[kind]()


def embeds_nan(rank: int) -> tuple[Tensor, Tensor]:
    """Which outputs are NaN when the first row of every rank's part is, and which may be."""
    layer = layers.VocabParallelEmbedding(10, 4, tp_mesh=tp_mesh())
    with torch.no_grad():
        local(layer.weight)[0] = torch.nan
    tokens = torch.arange(10)[:, None]
    return layer(tokens).detach(), (tokens % 5 == 0).unsqueeze(-1).expand(10, 1, 4)


def drawing_peak(rank: int) -> tuple[int, int]:
    """Bytes of this rank's part of a weight, and the most that tensors made while it was drawn held at once."""
    live = LiveBytes()
    with live:
        layer = layers.RowParallelLinear(2048, 512, tp_mesh=tp_mesh(), bias=False)
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
        module = layers.ParallelTransformerLayer(
            HIDDEN, HEADS, tp_mesh=tp_mesh(), sequence_parallel=True, device=device
        )
        if device == "meta":
            assert all(local(p).is_meta for p in module.parameters())
            module.to_empty(device="cpu")
            torch.manual_seed(3)
            for part in module.modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
        states.append({k: whole(v) for k, v in module.state_dict().items()})
    return states


@kinds
@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, True), (4, False), (4, True)])
def test_output_and_gradients_are_those_of_one_process(size, kind, sequence_parallel):
    for s, options in ((8, {}), (7, {"overlap": 2})):
        want = on_rank.step(0, kind, s, False, torch.float64)
        run = ranks(size).run(on_rank.step_with, kind, s, sequence_parallel, torch.float64, options)
        compare(on_rank.gathered(run, kind, sequence_parallel), want, 1e-13)


@pytest.mark.parametrize("kind", ["llama", "layer", "embedding", "column", "row"])
def test_ranks_without_a_token_take_part(kind):
    want = on_rank.step(0, kind, 2, False, torch.float64)
    for options in ({}, {"overlap": 2}):
        run = ranks(4).run(on_rank.step_with, kind, 2, True, torch.float64, options)
        compare(on_rank.gathered(run, kind, True), want, 1e-13)


@groups
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_that_of_one_process(size, sequence_parallel):
    options = {"dropout": 0.4}
    want = on_rank.step(0, "layer", 7, False, torch.float64, **options)
    kept = on_rank.step(0, "layer", 7, False, torch.float64)
    assert not on_rank.close(want[0], kept[0], 1e-2)
    run = ranks(size).run(on_rank.step_with, "layer", 7, sequence_parallel, torch.float64, options)
    compare(on_rank.gathered(run, "layer", sequence_parallel), want, 1e-13)


@kinds
def test_one_seed_gives_one_model(kind):
    want = weights(0, kind)
    for size in (2, 4):
        for got in ranks(size).run(weights, kind):
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want)


def test_weights_have_the_spread_that_torch_gives_them():
    torch.manual_seed(2)
    for ours, theirs in (
        (layers.ColumnParallelLinear(300, 200, tp_mesh=None), nn.Linear(300, 200)),
        (layers.RowParallelLinear(300, 200, tp_mesh=None), nn.Linear(300, 200)),
        (layers.VocabParallelEmbedding(200, 300, tp_mesh=None), nn.Embedding(200, 300)),
    ):
        for name, value in theirs.state_dict().items():
            drawn = ours.state_dict()[name]
            assert drawn.shape == value.shape
            torch.testing.assert_close(drawn.std(), value.std(), rtol=0.1, atol=0)
            assert drawn.unique().numel() > 0.9 * drawn.numel()


def test_no_tensor_of_a_whole_weight_is_made():
    """Peak of what is drawn on one of four ranks: its part and a tile."""
    for part, peak in ranks(4).run(drawing_peak):
        assert peak <= part + 2 * 64 * 1024 * 4


def test_a_model_made_on_the_meta_device_is_the_same():
    for made, meta in ranks(2).run(from_meta):
        assert all(torch.equal(meta[name], value) for name, value in made.items())


def test_attention_without_causality_sees_the_mask():
    torch.manual_seed(0)
    masked = {"causal": False, "core_attention": core_attention.unfused}
    attention = layers.ParallelSelfAttention(8, 2, tp_mesh=None, **masked).double()
    causal = layers.ParallelSelfAttention(8, 2, tp_mesh=None).double()
    causal.load_state_dict(attention.state_dict())
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(attention(x, mask=future), causal(x))
    assert not torch.allclose(attention(x), causal(x))
    narrow = layers.ParallelSelfAttention(8, 2, tp_mesh=None, window_size=(1, 0)).double()
    narrow.load_state_dict(attention.state_dict())
    torch.testing.assert_close(attention(x, mask=future | torch.ones(5, 5, dtype=torch.bool).tril(-2)), narrow(x))
    with pytest.raises(TypeError, match="mask must be None for this core"):
        causal(x, mask=future)


@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_cores_agree(window):
    window_size = None if window is None else (window - 1, 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(700, 2, heads, 8, dtype=torch.float64, generator=generator).requires_grad_() for heads in (4, 2, 2)
    )
    results = []
    for core in (core_attention.flash, core_attention.unfused):
        y = core(q, k, v, window_size=window_size)
        results.append((y, *torch.autograd.grad(y.square().sum(), (q, k, v))))
    torch.testing.assert_close(*results)
    with pytest.raises(ValueError, match="window_size needs causal"):
        core_attention.unfused(q, k, v, window_size=(1, 0), causal=False)


def test_explicit_positions_turn_queries_and_keys():
    attention = build("grouped")
    x, _ = on_rank.inputs("grouped", 6, torch.float32)
    cos, sin = on_rank.angles(9, "grouped")
    positions = torch.tensor([4, 0, 8, 2, 2, 1])
    expected = attention(x, (cos[positions], sin[positions]))
    torch.testing.assert_close(attention(x, (cos, sin), positions=positions), expected)


def test_layers_can_be_copied_and_moved():
    module = build("layer")
    copied = copy.deepcopy(module).double()
    x, _ = on_rank.inputs("layer", 4, torch.float64)
    assert next(module.parameters()).dtype is torch.float32
    torch.testing.assert_close(copied(x).float(), module(x.float()), rtol=1e-5, atol=1e-5)


attention = functools.partial(layers.ParallelSelfAttention, tp_mesh=None)
block = functools.partial(layers.ParallelTransformerLayer, tp_mesh=None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.ColumnParallelLinear(4, 6, tp_mesh=None, overlap="never"), "overlap must be"),
        (lambda: layers.RowParallelLinear(0, 6, tp_mesh=None), "in_features must be positive, got 0"),
        (lambda: layers.ParallelMLP(4, tp_mesh=None, activation="relu"), "must be one of gelu, gelu_exact, swiglu"),
        (lambda: attention(10, 4), r"hidden_size \(10\) must be a multiple of num_heads"),
        (lambda: attention(8, 4, num_kv_heads=3), r"num_heads \(4\) must be a multiple of num_kv"),
        (
            lambda: attention(8, 4, causal=False, window_size=(1, 0)),
            "window_size must be .left, 0. .* and needs causal",
        ),
        (lambda: block(8, 2, dropout=1.5), "dropout must be from 0 to 1"),
        (lambda: block(8, 2, norm="batch"), "kind must be 'layer_norm' or"),
        (lambda: attention(8, 2)(torch.zeros(3, 8)), r"x must be \[s, b, 8\], got \[3, 8\]"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("column", "out_features must be a multiple of the size of the mesh, got 6 for 4 ranks"),
        ("row", "got 6 for 4 ranks; meshes that fit have 1, 2, 3, 6 ranks"),
        ("kv_heads", "num_kv_heads must be a multiple or a divisor of the size of the mesh, got 3 for 4 ranks"),
        (
            "heads",
            ": num_heads must be a multiple of the size of the mesh, got 6 for 4 ranks; meshes that fit",
        ),
        ("mesh", "mesh must have one dimension, the tensor-parallel one, got 2"),
        ("group", "mesh must be None or a torch DeviceMesh of one dimension"),
        ("embedding", "num_embeddings (5) leaves some of the 4 ranks without a row; pad the vocabulary"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(kind, message):
    for outcome in ranks(4).outcomes(too_many_ranks, kind):
        assert isinstance(outcome, Raised) and outcome.type == ("TypeError" if kind == "group" else "ValueError")
        assert message in outcome.message


def test_tokens_outside_the_vocabulary_raise_on_every_rank():
    with pytest.raises(IndexError):
        bad_token(0)
    assert all(isinstance(o, Raised) and o.type == "IndexError" for o in ranks(2).outcomes(bad_token))
    with pytest.raises(TypeError, match=r"tokens must be an int64 or int32 tensor, got torch\.float32"):
        build("embedding")(torch.zeros(2, 2))


def test_a_row_of_nan_stays_with_its_token():
    for result, expected in ranks(2).run(embeds_nan):
        assert torch.equal(result.isnan(), expected)
