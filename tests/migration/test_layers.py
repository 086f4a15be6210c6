"""The calls of docs/migration.md about layers, norms, activations and softmaxes, against plain PyTorch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel_ops import (
    ParallelMesh,
    all_gather_linear,
    bias_dropout_add,
    bias_gelu,
    bias_swiglu,
    column_parallel_linear,
    comm,
    gelu_mul,
    layer_norm,
    layers,
    linear_reduce_scatter,
    rms_norm,
    scaled_causal_softmax,
    scaled_masked_softmax,
    silu_mul,
)
from support.ranks.distributed import ranks

S, B, H, F4 = 6, 2, 8, 12


def of_layers(rank):
    torch.manual_seed(0)
    x, tp = torch.randn(S, B, H), ParallelMesh(tp=2)["tp"]
    group, rows = tp.get_group(), S // 2
    up = layers.ColumnParallelLinear(H, F4, tp_mesh=tp, bias=True)
    down = layers.RowParallelLinear(F4, H, tp_mesh=tp, bias=True)
    table = layers.VocabParallelEmbedding(10, H, tp_mesh=tp)
    w1, b1, w2, b2, e = (p.full_tensor() for p in (up.weight, up.bias, down.weight, down.bias, table.weight))
    tokens = torch.arange(S * B).view(S, B) % 10
    y = up(x)
    mine = [t.chunk(2, dim=d)[rank] for t, d in ((w1, 0), (w2, 1), (x, 0))]
    part = x[rank * rows : (rank + 1) * rows]
    sent = [w1.chunk(2)[r].split([2, 4])[rank] for r in range(2)]
    halves = torch.cat(sent)
    return [
        (comm.gather_from_group(y, group, dim=-1), F.linear(x, w1, b1)),  # gather_output
        (down(y), F.linear(F.linear(x, w1, b1), w2, b2)),
        (down(y, residual=x, dropout=0.0), F.linear(F.linear(x, w1, b1), w2, b2) + x),
        (down(comm.scatter_to_group(F.linear(x, w1), group, dim=-1)), F.linear(F.linear(x, w1), w2, b2)),
        (table(tokens), F.embedding(tokens, e)),
        (all_gather_linear(part, mine[0], group=group), F.linear(x, mine[0])),
        (column_parallel_linear(x, mine[0], group=group, grad_reduce="backend"), F.linear(x, mine[0])),
        (
            linear_reduce_scatter(F.linear(x, mine[0]), mine[1], group=group),
            F.linear(F.linear(x, w1), w2).chunk(2)[rank],
        ),
        (comm.copy_to_group(x, group), x),
        (comm.reduce_from_group(x, group), 2 * x),
        (comm.all_gather(part, group), x),
        (comm.reduce_scatter(x, group), 2 * part),
        (comm.all_to_all(mine[0], group, split_sizes=[2, 4], concat_sizes=[2, 2] if rank == 0 else [4, 4]), halves),
        *of_regions(rank, group),
    ]


def of_regions(rank, group):
    """Megatron's regions of sequence parallelism: results and gradients where the ranks weigh results by 1 and by 2."""
    whole, weights = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6).cos()
    rows, columns = whole.chunk(2)[rank], whole.chunk(2, dim=1)[rank]
    weighed = weights * (rank + 1)
    split = torch.cat([weights.chunk(2)[r] * (r + 1) for r in range(2)])
    regions = [
        (comm.all_gather, {}, rows, whole, weighed, 3 * weights.chunk(2)[rank]),
        (comm.gather_from_group, {}, rows, whole, weighed, weighed.chunk(2)[rank]),
        (comm.scatter_to_group, {}, whole, rows, weighed.chunk(2)[rank], split),
        (comm.reduce_scatter, {}, whole, 2 * rows, weighed.chunk(2)[rank], split),
        (comm.all_gather, {"dim": -1}, columns, whole, weighed, 3 * weights.chunk(2, dim=1)[rank]),
    ]
    for region, options, rank_part, result, dy, dx in regions:
        x = rank_part.clone().requires_grad_()
        y = region(x, group, **options)
        yield y, result
        yield torch.autograd.grad(y, x, dy)[0], dx


def test_linears_embeddings_and_regions():
    for pairs in ranks(2).run(on_rank):
        for got, expected in pairs:
            torch.testing.assert_close(got, expected)


def on_rank(rank):
    assert dist.get_world_size() == 2
    return [(got.detach(), expected.detach()) for got, expected in of_layers(rank)]


def test_norms():
    x, r, w, b = torch.randn(S, B, H), torch.randn(S, B, H), torch.randn(H), torch.randn(H)
    torch.testing.assert_close(layer_norm(x, w, b, 1e-5), F.layer_norm(x, (H,), w, b, 1e-5))
    torch.testing.assert_close(layer_norm(x, w, b, 1e-5, zero_centered=True), F.layer_norm(x, (H,), 1 + w, b, 1e-5))
    torch.testing.assert_close(rms_norm(x, w, 1e-5), F.rms_norm(x, (H,), w, 1e-5))
    torch.testing.assert_close(rms_norm(x, w, 1e-6, zero_centered=True), F.rms_norm(x, (H,), 1 + w, 1e-6))
    norm, total = rms_norm(x, w, 1e-6, residual=r)
    torch.testing.assert_close(norm, F.rms_norm(x + r, (H,), w, 1e-6))
    torch.testing.assert_close(total, x + r)
    norm, total = layer_norm(x, w, b, 1e-6, residual=r)
    torch.testing.assert_close(norm, F.layer_norm(x + r, (H,), w, b, 1e-6))
    torch.testing.assert_close(total, x + r)


def test_activations():
    x, up, bias, weights = torch.randn(S, B, H), torch.randn(S, B, H), torch.randn(H), torch.rand(S, B)
    torch.testing.assert_close(silu_mul(x, up), F.silu(x) * up)
    torch.testing.assert_close(gelu_mul(x, up), F.gelu(x, approximate="tanh") * up)
    torch.testing.assert_close(bias_gelu(x, bias), F.gelu(x + bias, approximate="tanh"))
    gate, second = (x + bias).chunk(2, dim=-1)
    torch.testing.assert_close(bias_swiglu(x, bias), F.silu(gate) * second)
    first, last = (x + bias).chunk(2, dim=-1)
    gate, second = x.chunk(2, dim=-1)
    torch.testing.assert_close(bias_swiglu(x, None, weights=weights), F.silu(gate) * second * weights.unsqueeze(-1))
    torch.testing.assert_close(bias_dropout_add(x, bias, up, 0.1, training=False), x + bias + up)
    torch.testing.assert_close(gelu_mul(*(x + bias).chunk(2, dim=-1)), F.gelu(first, approximate="tanh") * last)
    first, last = x[..., : H // 2].clamp(max=0.5), x[..., H // 2 :].clamp(-0.5, 0.5)
    quick = first * torch.sigmoid(1.702 * first) * (last + 1.0) * weights.unsqueeze(-1)
    torch.testing.assert_close(bias_swiglu(x, None, weights=weights, alpha=1.702, limit=0.5, up_offset=1.0), quick)
    dropped = bias_dropout_add(x, bias, up, 0.5, training=True) - up
    kept = dropped.abs() > 1e-6
    torch.testing.assert_close(dropped[kept], (2 * (x + bias))[kept], rtol=1e-4, atol=1e-5)


def test_softmaxes():
    scores, mask = torch.randn(B, 3, S, S), torch.rand(B, 1, S, S) < 0.3
    mask[..., 0] = False
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)
    for got, hidden in ((scaled_causal_softmax(scores, 0.5), causal), (scaled_masked_softmax(scores, mask, 0.5), mask)):
        torch.testing.assert_close(got, (0.5 * scores).masked_fill(hidden, -torch.inf).softmax(-1))
    torch.testing.assert_close(scaled_masked_softmax(scores, None), scores.softmax(-1))
