import itertools

import pytest
import torch

from parallel_ops.ops import cross_entropy_reference
from parallel_ops.ops.cross_entropy import statistics_per_row
from support import aot, suite
from support.kernels import check_compiled, differentiable, meta, poisoned
from support.suite import DTYPES, randn

PER_ROW = ("target", "out", "column", "grad", "saved")


def launches(dtype, cols, smoothing, softcap):
    from parallel_ops.triton_kernels import cross_entropy as kernels

    x, rows = meta(8192, cols, dtype=dtype), meta(8192, dtype=torch.float32)
    target = meta(8192, dtype=torch.int64)
    out = meta(statistics_per_row(smoothing), 8192, dtype=torch.float32)
    saved = meta(3 if smoothing else 2, 8192, dtype=torch.float32)
    eps = 0.1 if smoothing else 0.0
    with aot.recorded() as recorded:
        kernels.statistics(x, target, out, target, start=0, vocab=cols, ignore_index=-100, softcap=softcap)
        kernels.combine(out.unsqueeze(0), target, rows, saved, label_smoothing=eps, z_loss=1e-4)
        kernels.backward(rows, x, target, saved, x, label_smoothing=eps, z_loss=1e-4, softcap=softcap)
    return recorded


CASES = [
    *itertools.product(DTYPES, [131072], sorted(aot.SHARED_MEMORY_LIMIT)),
    *((torch.bfloat16, cols, 90) for cols in (1001, 4000, 32000, 262144)),
]


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), CASES, ids=str)
def test_compiled_code(dtype, cols, capability):
    check_compiled(launches(dtype, cols, True, 30.0), cols, capability, per_row=PER_ROW)
    check_compiled(launches(dtype, cols, False, 0.0), cols, capability, per_row=PER_ROW)


def interpreted(label_smoothing, z_loss, softcap, shards):
    from parallel_ops.triton_kernels import cross_entropy as kernels

    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap or 0.0}

    def split(logits):
        return logits.split([3, *[(logits.shape[-1] - 3) // (shards - 1)] * (shards - 1)][:shards], dim=-1)

    def run(logits, target):
        parts, columns, start = [], [], 0
        shards_of = [logits] if shards == 1 else split(logits)
        for x in shards_of:
            out = torch.full((statistics_per_row(label_smoothing != 0), target.numel()), torch.nan)
            column = torch.full((target.numel(),), -77)
            kernels.statistics(
                x, target.contiguous(), out, column,
                start=start, vocab=logits.shape[-1], ignore_index=-100, softcap=softcap or 0.0,
            )  # fmt: skip
            start += x.shape[-1]
            parts.append(out)
            columns.append(column)
        loss, saved = (
            torch.full((target.numel(),), torch.nan),
            torch.full((len(parts[0]) // 2 + 1, target.numel()), 7.0),
        )
        kernels.combine(torch.stack(parts), columns[0], loss, saved, label_smoothing=label_smoothing, z_loss=z_loss)
        return loss, saved, columns, shards_of

    def forward(logits, target):
        return run(logits, target)[0].view(target.shape)

    def backward(grad, logits, target):
        _, saved, columns, shards_of = run(logits, target)
        gradients = []
        for x, column in zip(shards_of, columns, strict=True):
            dx = poisoned(x.shape, x)
            kernels.backward(grad, x, column, saved, dx, **options)
            gradients.append(dx)
        return torch.cat(gradients, dim=-1), None

    return differentiable(forward, backward)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [(0.0, 0.0, None), (0.1, 0.0, None), (0.0, 0.01, None), (0.2, 0.01, 3.0)], ids=str)
@pytest.mark.parametrize(("shape", "shards"), [((3, 2, 70), 1), ((9, 9), 3), ((2, 17003), 2)])
def test_interpreted(shape, shards, options, dtype):
    logits = randn(*shape, dtype=dtype, scale=3)
    target = torch.randint(0, shape[-1], shape[:-1], generator=torch.Generator().manual_seed(0))
    target.flatten()[0] = -100
    label_smoothing, z_loss, softcap = options

    def reference(logits, target):
        return cross_entropy_reference(
            logits, target, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, reduction="none"
        )

    kernels = interpreted(label_smoothing, z_loss, softcap, shards)
    grad = randn(*shape[:-1], dtype=torch.float32, seed=2).detach()
    suite.check_numerics(kernels, reference, [logits, target], grad, slack_ulps=2)


@pytest.mark.interpret
def test_interpreted_many_rows():
    logits, target = randn(130, 5, dtype=torch.float32), torch.arange(130) % 5
    kernels = interpreted(0.1, 0.01, None, 3)

    def reference(logits, target):
        return cross_entropy_reference(logits, target, label_smoothing=0.1, z_loss=0.01, reduction="none")

    suite.check_numerics(kernels, reference, [logits, target], slack_ulps=2)  # an expanded gradient


@pytest.mark.interpret
def test_interpreted_absent_columns_and_wrong_targets():
    logits = torch.randn(4, 40000).index_fill_(1, torch.arange(16384, 40000), -torch.inf).requires_grad_()
    target = torch.tensor([5, 40000, -100, -1])
    kernels = interpreted(0.1, 0.0, None, 1)
    loss = kernels(logits, target)
    expected = cross_entropy_reference(logits.detach()[:1, :16384], target[:1], label_smoothing=0.1)
    torch.testing.assert_close(loss[0], expected)
    assert loss[[1, 3]].isnan().all() and loss[2] == 0
    loss.sum().backward()
    assert (logits.grad[0, 16384:] == 0).all() and (logits.grad[2] == 0).all()
    assert logits.grad[0].isfinite().all() and logits.grad[[1, 3]].isnan().all()
