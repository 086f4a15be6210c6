import functools

import pytest
import torch

from parallel_ops import cross_entropy
from parallel_ops.ops import cross_entropy_reference
from parallel_ops.ops.cross_entropy.kernels import combine, gradient, saved_per_row, statistics, statistics_per_row
from parallel_ops.ops.cross_entropy.options import LossOptions
from ptx import aot
from ptx.kernels import check_compiled, differentiable, meta
from support.numerics import suite
from support.numerics.suite import DTYPES, randn


def launches(dtype, cols, smoothing, softcap, weighted=False):
    from parallel_ops.triton_kernels.cross_entropy import cross_entropy as kernels

    x, rows = meta(8192, cols, dtype=dtype), meta(8192, dtype=torch.float32)
    target = meta(8192, dtype=torch.int64)
    weight = meta(cols, dtype=torch.float32) if weighted else None
    out = meta(statistics_per_row(smoothing, weighted), 8192, dtype=torch.float32)
    saved = meta(saved_per_row(smoothing, weighted), 8192, dtype=torch.float32)
    options = {"label_smoothing": 0.1 if smoothing else 0.0, "z_loss": 1e-4}
    targets = {"ignore_index": -100, "ignore_out_of_range": weighted}
    with aot.recorded() as recorded:
        kernels.statistics(x, target, weight, out, target, start=0, vocab=cols, softcap=softcap, **targets)
        kernels.combine(out.unsqueeze(0), target, rows, saved, **options)
        kernels.backward(rows, x, weight, target, saved, x, softcap=softcap, **options)
    return recorded


CASES = [
    *((dtype, 131072, 90) for dtype in DTYPES),
    *((torch.bfloat16, 131072, sm) for sm in (80, 100)),
    *((torch.bfloat16, cols, 90) for cols in (1001, 4000, 32000, 262144)),
]


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), CASES, ids=str)
def test_compiled_code(dtype, cols, capability):
    recorded = [*launches(dtype, cols, True, 30.0), *launches(dtype, cols, False, 0.0)]
    if (dtype, capability) == (torch.bfloat16, 90):
        # Class weights are fp32 beside 16-bit logits: a thread's eight lie in two loads, which take their sectors
        # twice. All rows read the same ones, so they come from L2.
        for launch in launches(dtype, cols, True, 30.0, weighted=True):
            code = aot.compile_for(launch, capability)
            assert not code.spills, f"{launch}: {code}"
    check_compiled(recorded, cols, capability)


def sharded(shards, class_weight=None, *, label_smoothing=0.0, z_loss=0.0, softcap=None):
    """The op and its reference; the op's three kernels run on each shard of the vocabulary."""
    options = LossOptions(label_smoothing, z_loss, softcap or 0.0, -100, False, 0)

    def split(logits):
        """(start, logits, class weights) of each shard."""
        sizes = [3, *[(logits.shape[-1] - 3) // (shards - 1)] * (shards - 1)] if shards > 1 else [logits.shape[-1]]
        starts = [sum(sizes[:i]) for i in range(shards)]
        weights = [None] * shards if class_weight is None else class_weight.split(sizes)
        return list(zip(starts, logits.split(sizes, dim=-1), weights, strict=True))

    def run(logits, target):
        found = [statistics(x, target, w, start, logits.shape[-1], *options) for start, x, w in split(logits)]
        parts, columns = zip(*found, strict=True)
        return *combine(torch.stack(parts), columns[0], *options), columns

    def forward(logits, target):
        return run(logits, target)[0].view(target.shape)

    def backward(grad, logits, target):
        _, saved, columns = run(logits, target)
        parts = [
            gradient(grad, x, w, column, saved, None, options, inplace=False)
            for (_, x, w), column in zip(split(logits), columns, strict=True)
        ]
        return torch.cat(parts, dim=-1), None

    reference = functools.partial(
        cross_entropy_reference, class_weight=class_weight, reduction="none", label_smoothing=label_smoothing,
        z_loss=z_loss, softcap=softcap,
    )  # fmt: skip
    return differentiable(forward, backward), reference


SIZES = [((3, 2, 70), 1), ((9, 9), 3), ((2, 17003), 2)]
OPTIONS = [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0}]


@pytest.mark.executed
@pytest.mark.parametrize(
    ("shape", "shards", "options", "dtype"),
    [
        *((*SIZES[0], options, torch.float32) for options in OPTIONS),
        *((*sizes, options, torch.float32) for sizes in SIZES[1:] for options in (OPTIONS[0], OPTIONS[-1])),
        *((*SIZES[0], OPTIONS[-1], dtype) for dtype in (torch.bfloat16, torch.float16)),
        (*SIZES[2], OPTIONS[-1], torch.bfloat16),
    ],
    ids=str,
)
def test_interpreted(shape, shards, options, dtype):
    logits = randn(*shape, dtype=dtype, scale=3)
    target = torch.randint(0, shape[-1], shape[:-1], generator=torch.Generator().manual_seed(0))
    target.flatten()[0] = -100
    grad = randn(*shape[:-1], dtype=torch.float32, seed=2).detach()
    suite.check_numerics(*sharded(shards, **options), [logits, target], grad, slack_ulps=2)


@pytest.mark.executed(smoke=False)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_interpreted_class_weights(dtype):
    """Over three shards of uneven size; in fp64 options and constants are fp64 through and through."""
    logits, weight = randn(7, 43, dtype=dtype, scale=3), torch.rand(43, generator=torch.Generator().manual_seed(1))
    target = torch.arange(7) * 6
    target[2] = -100
    slack = 64 if dtype is torch.float64 else 4  # PyTorch's own fp64 is the oracle
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.3, "softcap": 0.7}, {"z_loss": 0.3, "softcap": 30.1}):
        suite.check_numerics(*sharded(3, weight, **options), [logits, target], slack_ulps=slack)


@pytest.mark.executed(smoke=False)
def test_interpreted_many_rows():
    logits, target = randn(130, 5, dtype=torch.float32), torch.arange(130) % 5
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    suite.check_numerics(*sharded(3, **options), [logits, target], slack_ulps=2)  # an expanded gradient


@pytest.mark.executed
def test_interpreted_absent_columns_and_wrong_targets():
    logits = torch.randn(4, 40000).index_fill_(1, torch.arange(16384, 40000), -torch.inf).requires_grad_()
    target = torch.tensor([5, 40000, -100, -1])
    loss = cross_entropy(logits, target, label_smoothing=0.1, reduction="none")
    expected = cross_entropy_reference(logits.detach()[:1, :16384], target[:1], label_smoothing=0.1)
    torch.testing.assert_close(loss[0], expected)
    assert loss[[1, 3]].isnan().all() and loss[2] == 0
    loss.sum().backward()
    assert (logits.grad[0, 16384:] == 0).all() and (logits.grad[2] == 0).all()
    assert logits.grad[0].isfinite().all() and logits.grad[[1, 3]].isnan().all()
