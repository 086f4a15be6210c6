"""The attention kernels, block by block, against the oracle of the whole; tiles are small where loops matter most."""

import dataclasses
import itertools
import random

import pytest
import torch

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.ops.attention.block import Dropout, begin_carry, dropout_keep_mask
from parallel_ops.ops.attention.ranges import MaskBounds, attention_bounds, dense_mask, document_ranges
from ptx.kernels import poisoned
from support.numerics import suite
from support.numerics.attention import CONVEX_SPANS, attention, random_spans, spans_from_keys

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = TokenRange(0, 150)
SEED = torch.tensor([0x0123_4567_89AB_CDEF])


@dataclasses.dataclass(frozen=True)
class Case:
    """Queries, and blocks of keys that they attend to one after the other."""

    queries: TokenRange = TOKENS
    keys: tuple[TokenRange, ...] = (TOKENS,)
    heads: int = 2
    kv_heads: int = 1
    batch: int = 1
    dims: int = 32
    dims_v: int | None = None  # of values, if other than those of keys
    dtype: torch.dtype = BF16
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None
    mask: MaskBounds | None = None  # of the one block, instead of what the options say
    scale: float = 0.3
    softcap: float = 0.0
    p: float = 0.0

    def attention_bounds(self) -> list[MaskBounds | None]:
        if self.mask is not None:
            return [self.mask]
        ranges = None if self.documents is None else document_ranges(torch.tensor(self.documents), causal=False)
        left, right = None if self.window is None else self.window - 1, 0 if self.causal else None
        return [attention_bounds(self.queries, keys, left=left, right=right, ranges=ranges) for keys in self.keys]

    def dropout(self, keys: TokenRange) -> Dropout | None:
        return Dropout(self.p, SEED, self.queries, keys, first_head=3, first_batch=2**31) if self.p else None

    def inputs(self) -> list[torch.Tensor]:
        sk = sum(keys.length for keys in self.keys)
        own, other = (self.queries.length, self.heads), (sk, self.kv_heads)
        dims, dims_v = self.dims, self.dims_v or self.dims
        sizes = [(*own, dims), (*other, dims), (*other, dims_v), (*own, dims_v)]
        return [
            suite.randn(s, self.batch, h, d, dtype=self.dtype, seed=i).detach() for i, (s, h, d) in enumerate(sizes)
        ]


def ours(case: Case, q, k, v, grad) -> list[torch.Tensor]:
    """out, logsumexp and the gradients, by the kernels; several blocks are merged and summed."""
    from parallel_ops.triton_kernels.attention import flash_attention as kernels
    from parallel_ops.triton_kernels.attention.rows import gradient_rows

    blocks = [(m, keys) for m, keys in zip(case.attention_bounds(), case.keys, strict=True)]
    at = [0, *torch.tensor([keys.length for keys in case.keys]).cumsum(0).tolist()]
    ks, vs = ([t[i:j] for i, j in itertools.pairwise(at)] for t in (k, v))
    merge = len(blocks) > 1
    shape, each = grad.shape, (q.shape[1], q.shape[2], q.shape[0])
    if merge:
        out, statistics, dq = torch.empty(shape), torch.empty(2, *each), torch.zeros(q.shape)
        begin_carry(out, statistics, None)
    else:
        out, statistics, dq = (
            poisoned(shape, q), poisoned((2, *each), torch.empty(0)), poisoned(q.shape, torch.empty(0))
        )  # fmt: skip
    for (mask, keys), k_block, v_block in zip(blocks, ks, vs, strict=True):
        if mask is not None:
            kernels.forward(
                q, k_block, v_block, out, statistics, merge=merge, left=mask.left, right=mask.right, spans=mask.spans,
                scale=case.scale, softcap=case.softcap, dropout=case.dropout(keys),
            )  # fmt: skip
    rows = poisoned((3, *each), torch.empty(0))
    gradient_rows(grad, out, statistics, rows)
    dk, dv = poisoned(k.shape, torch.empty(0) if merge else k), poisoned(v.shape, torch.empty(0) if merge else v)
    for (mask, keys), i, j in zip(blocks, at, at[1:], strict=False):
        if mask is None:
            dk[i:j].zero_(), dv[i:j].zero_()
            continue
        kernels.backward(
            grad, q, k[i:j], v[i:j], rows, dq, dk[i:j], dv[i:j], accumulate_dq=merge, left=mask.left,
            right=mask.right, spans=mask.spans, query_spans=mask.query_spans, scale=case.scale, softcap=case.softcap,
            dropout=case.dropout(keys),
        )  # fmt: skip
    return [out, statistics[0] + statistics[1].log(), dq, dk, dv]


def here_of(case: Case) -> torch.Tensor:
    sq = case.queries.length
    nothing = MaskBounds(left=10**6)
    return torch.cat(
        [
            dense_mask(nothing if mask is None else mask, sq, keys.length, torch.device("cpu"))
            for mask, keys in zip(case.attention_bounds(), case.keys, strict=True)
        ],
        1,
    )


def theirs(case: Case, dtype, q, k, v, grad) -> list[torch.Tensor]:
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (q, k, v))
    drawn = None
    if case.p:
        sizes = case.batch, case.heads, case.queries.length
        drawn = torch.cat([dropout_keep_mask(case.dropout(keys), *sizes, keys.length) for keys in case.keys], -1)
    out, lse = attention(q, k, v, here_of(case), scale=case.scale, softcap=case.softcap, kept=drawn, p=case.p)
    out.backward(grad.to(dtype))
    return [out.detach(), lse, q.grad, k.grad, v.grad]


def check(case: Case, inputs=None) -> None:
    """The error rule, for outputs and gradients; what nobody sees is exactly zero."""
    inputs = case.inputs() if inputs is None else inputs
    results = ours(case, *inputs)
    peers, oracle = theirs(case, case.dtype, *inputs), theirs(case, torch.float64, *inputs)
    # dP - D cancels where a query sees few keys: there the gradients of scores are exact to fp32 of what is subtracted.
    q, k, v, grad = (t.abs().max().item() if t.numel() else 0.0 for t in inputs)
    cancelled = torch.finfo(FP32).eps * case.dims**0.5 * grad * v * abs(case.scale) * max(q, k)
    for name, got, peer, true in zip(("out", "lse", "dq", "dk", "dv"), results, peers, oracle, strict=True):
        finite = true[true.isfinite()]
        scale = finite.abs().max().item() if finite.numel() else 0.0
        # PyTorch's logsumexp may happen to be exact; that of 16-bit data need not be, by the last places of fp32.
        slack = (4 if name == "lse" else 0.5) * torch.finfo(FP32 if name == "lse" else case.dtype).eps * scale
        bound = 2 * suite.error(peer, true) + slack + (cancelled if name in ("dq", "dk") else 0.0)
        assert suite.error(got, true) <= bound, f"{name}: error {suite.error(got, true):.3e}, bound {bound:.3e}"
    here = here_of(case)
    for tensor, some in zip(results[::1], (here.any(1), None, here.any(1), here.any(0), here.any(0)), strict=True):
        if some is not None:
            assert not tensor[~some].count_nonzero()


@pytest.fixture(autouse=True)
def _known_to_the_executor(request):
    if request.node.get_closest_marker("executed") and request.node.callspec.params.get("_kernels_are_executed") == 100:
        pytest.skip("the executor does not know tcgen05")


@pytest.fixture
def small_tiles(monkeypatch):
    """The least that wgmma takes, so that a few tokens walk through every loop."""
    from parallel_ops.triton_kernels.attention import flash_attention
    from parallel_ops.triton_kernels.attention.tiles import Tile, Tiles

    small = Tiles(Tile(64, 32, warps=4), Tile(32, 64, warps=4), Tile(64, 32, warps=4))
    monkeypatch.setattr(flash_attention, "tiles", lambda *_, **__: small)


OPTIONS = {
    "an offset, more keys": Case(TokenRange(70, 80), (TokenRange(0, 150),)),
    "an offset, fewer keys": Case(TokenRange(40, 150), (TokenRange(0, 101),), heads=3),
    "later keys": Case(TokenRange(0, 150), (TokenRange(20, 97),)),
    "no mask": Case(causal=False, heads=4, kv_heads=2),
    "one query": Case(TokenRange(99, 1), (TokenRange(0, 100),), heads=1),
    "a window": Case(window=40, batch=2),
    "a window of one": Case(window=1),
    "a window, then nothing": Case(TokenRange(100, 150), (TokenRange(0, 130),), window=30),
    "documents": Case(documents=(0, 3, 3, 70, 71, 150)),
    "documents and a window": Case(TokenRange(1, 90, 2), (TokenRange(0, 91, 2),), documents=(0, 5, 90, 182), window=50),
    "documents in both directions": Case(causal=False, documents=(0, 40, 129, 150)),
    "dropout": Case(p=0.3, batch=2, causal=False, keys=(TokenRange(8, 150),)),
    "dropout of keys apart": Case(TokenRange(1, 75, 2), (TokenRange(3, 75, 2),), p=0.3),
    "everything dropped": Case(p=1.0, heads=1),
    "all at once": Case(
        TokenRange(8, 90), (TokenRange(0, 98),), documents=(0, 20, 21, 182), window=50, softcap=3.0, p=0.2, dtype=FP16
    ),
    "a negative scale": Case(scale=-0.3, heads=1),
    "no scale": Case(scale=0.0, heads=1),
    "dims by padding": Case(dims=40),
    "values of fewer dims": Case(TokenRange(0, 70), (TokenRange(0, 70),), dims=40, dims_v=16, heads=1),
    "values of more dims": Case(
        TokenRange(0, 70), (TokenRange(0, 40), TokenRange(40, 30)), dims=16, dims_v=33, heads=1, p=0.3
    ),
    "odd dims": Case(TokenRange(0, 70), (TokenRange(0, 70),), dims=33, heads=1),
    "zigzag, dropout": Case(TokenRange(104, 52), tuple(TokenRange(start, 52) for start in (156, 0, 104, 52)), p=0.3),
    "striped, documents": Case(
        TokenRange(1, 70, 2), (TokenRange(0, 70, 2), TokenRange(1, 70, 2)), documents=(0, 30, 31, 139, 140), softcap=5.0
    ),
    "fp32 in blocks, large logits": Case(
        TokenRange(64, 64), (TokenRange(64, 64), TokenRange(0, 64)), scale=10.0, dtype=FP32, heads=1
    ),
    "fp32 in blocks, a window, a soft cap": Case(
        TokenRange(64, 64), (TokenRange(64, 64), TokenRange(0, 64)), window=50, softcap=2.0, dtype=FP32, heads=1
    ),
}  # fmt: skip


@pytest.mark.executed
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, small_tiles):
    check(OPTIONS[name])


@pytest.mark.executed(smoke=False)
def test_random_spans(small_tiles, trials):
    """Empty spans between others, documents of queries in another order than those of keys."""
    for trial in range(2 if trials is None else trials):
        draw = random.Random(trial)
        sq, sk = draw.randint(1, 200), draw.randint(1, 200)
        mask = spans_from_keys(random_spans(draw, sq, sk, CONVEX_SPANS), sk)
        check(
            Case(TokenRange(0, sq), (TokenRange(0, sk),), heads=1, dims=16, mask=mask, dtype=draw.choice((BF16, FP32)))
        )


@pytest.mark.executed
@pytest.mark.parametrize(("processors", "splits"), [(0, 1), (4, 2), (6, 3), (132, 6)])
def test_groups_in_parts(processors, splits, small_tiles, monkeypatch):
    """Two key blocks, two kv heads and two sequences, in sections of three pairs; the same bits on each run."""
    from parallel_ops.triton_kernels.attention import flash_attention as kernels
    from parallel_ops.triton_kernels.attention import grids

    tokens = TokenRange(0, 70)
    case = Case(tokens, (tokens,), heads=12, kv_heads=2, batch=2, dims=16, dims_v=33)
    monkeypatch.setattr(grids, "multiprocessors", lambda _: processors)
    chosen = []
    monkeypatch.setattr(kernels, "group_splits", lambda *a: (chosen.append(grids.group_splits(*a)), chosen[-1])[1])
    monkeypatch.setattr(kernels, "section_of", lambda pairs, *_: 3)
    inputs = case.inputs()
    check(case, inputs)
    for first, again in zip(ours(case, *inputs), ours(case, *inputs), strict=True):
        assert torch.equal(first, again)
    assert set(chosen) == {splits}


@pytest.mark.executed(smoke=False)
@pytest.mark.parametrize("dims", [64, 128])
def test_at_the_sizes_that_a_gpu_runs(dims):
    """The published tiles: their loops over whole tiles, and both edges."""
    check(Case(TokenRange(180, 140), (TokenRange(0, 320),), dims=dims, heads=1, window=300, scale=0.1))


@pytest.mark.executed(smoke=False)
def test_multi_head_latent_attention():
    """Keys of 192 and values of 128 dims, at the published tiles."""
    check(Case(TokenRange(100, 80), (TokenRange(0, 180),), dims=192, dims_v=128, heads=2, kv_heads=2, scale=0.07))


@pytest.mark.executed(smoke=False)
def test_layouts(small_tiles):
    """Slices of a projection, heads before tokens, tokens far apart: the bits of contiguous tensors."""
    case = Case(TokenRange(0, 40), (TokenRange(0, 40),), dims=16)
    q, k, v, grad = case.inputs()
    expected = ours(case, q, k, v, grad)
    fused = torch.cat([q, k, v, grad], 2).transpose(0, 2).contiguous().transpose(0, 2)
    projected = torch.cat([q, k, v, grad], 2)
    for whole in (projected, fused):
        for a, b in zip(ours(case, *whole.split([2, 1, 1, 2], 2)), expected, strict=True):
            assert torch.equal(a, b)
    case = Case(TokenRange(0, 3), (TokenRange(0, 3),), dims=16, heads=1)
    inputs = case.inputs()
    apart = [torch.zeros(3, 2**22, dtype=BF16)[:, :16].view(3, 1, 1, 16).copy_(t) for t in inputs]
    for a, b in zip(ours(case, *apart), ours(case, *inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.executed(smoke=False)
@pytest.mark.parametrize("mask", [MaskBounds(), MaskBounds(right=-3), MaskBounds(left=5)], ids=str)
def test_nothing_to_see(mask, small_tiles):
    """No queries, no keys, or none that any query sees: zeros and -inf; merged and added, what was there."""
    from parallel_ops.triton_kernels.attention import flash_attention as kernels

    for queries, keys in [(0, 5), (5, 0)] if mask == MaskBounds() else [(3, 5)]:
        q, k = torch.ones(queries, 1, 2, 16, dtype=BF16), torch.ones(keys, 1, 1, 16, dtype=BF16)
        out, dq = torch.full(q.shape, 7.0), torch.full(q.shape, 7.0)
        statistics, rows = torch.full((2, 1, 2, queries), 7.0), torch.zeros(3, 1, 2, queries)
        dk, dv = poisoned(k.shape, k), poisoned(k.shape, k)
        for add in (True, False):
            options = {**mask._asdict(), "scale": 1.0, "softcap": 0.0, "dropout": None}
            kernels.backward(q, q, k, k, rows, dq, dk, dv, accumulate_dq=add, **options)
            options.pop("query_spans")
            kernels.forward(q, k, k, out, statistics, merge=add, **options)
            for t, fresh in ((out, 0.0), (dq, 0.0), (statistics[0], float("-inf")), (statistics[1], 0.0)):
                assert (t == (7.0 if add else fresh)).all()
            assert not dk.count_nonzero() and not dv.count_nonzero()
