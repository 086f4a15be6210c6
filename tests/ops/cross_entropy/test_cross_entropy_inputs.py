"""cross_entropy at its edges: ignored and wrong targets, special values, sizes, what is refused."""

import functools

import pytest
import torch
import torch.distributed as dist

from parallel_ops import vocab_parallel_cross_entropy
from parallel_ops.ops import cross_entropy_reference
from support.numerics import suite
from support.numerics.suite import DEVICES, randn, refuses
from support.numerics.vocab_parallel import pair, targets

pytestmark = pytest.mark.parametrize("device", DEVICES)
ops = torch.ops.parallel_ops


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_all_ignored_is_zero(device, reduction):
    for value in (1.0, torch.nan):
        logits = torch.full((3, 8), value, device=device, requires_grad=True)
        target = torch.full((3,), 7, device=device)
        op = functools.partial(
            vocab_parallel_cross_entropy, ignore_index=7, reduction=reduction, label_smoothing=0.1, z_loss=0.1
        )
        loss, gradient = suite.forward_backward(op, [logits, target])
        assert (loss == 0).all() and (gradient == 0).all()


def test_special_values_flow_as_in_pytorch(device):
    rows = [[1.0, torch.nan, 0.0], [torch.inf, 0.0, 1.0], [-torch.inf, 0.0, 1.0], [-torch.inf] * 3, [3e38, -3e38, 0.0]]
    logits, target = torch.tensor(rows, device=device, requires_grad=True), torch.full((5,), 2, device=device)
    got, expected = (suite.forward_backward(f, [logits, target]) for f in pair(reduction="none"))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.2}, {"softcap": 3.0, "z_loss": 0.1, "label_smoothing": 0.1}])
def test_absent_columns_do_not_count(device, options):
    x, target = randn(5, 70, dtype=torch.float32, device=device), targets((5,), 70, device)
    padding = torch.full((5, 1500), -torch.inf, device=device)
    expected = suite.forward_backward(functools.partial(cross_entropy_reference, **options), [x, target])

    def padded(x, t):
        return vocab_parallel_cross_entropy(torch.cat([x, padding], dim=-1), t, **options)

    for a, b in zip(suite.forward_backward(padded, [x, target]), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 4), (1, 1), (7,), (1, 70000), (70000, 1), (2, 262145)])
def test_extreme_shapes(device, shape):
    logits, target = randn(*shape, dtype=torch.float32, device=device), targets(shape[:-1], shape[-1], device)
    op, reference = pair(reduction="sum", label_smoothing=0.1)
    suite.check_numerics(op, reference, [logits, target], slack_ulps=4)


def test_wrong_targets(device):
    logits = torch.randn(2, 3, 8, device=device)
    for value in (8, -1, 2**40):
        target = torch.tensor([[0, 1, -100], [2, value, 3]], device=device)
        if device == "cpu":
            with pytest.raises(ValueError, match=rf"target {value} in row 4 is outside the vocabulary \[0, 8\)"):
                vocab_parallel_cross_entropy(logits, target)
        else:
            assert vocab_parallel_cross_entropy(logits, target, reduction="none").isnan().tolist()[1] == [
                False,
                True,
                False,
            ]


def test_bad_arguments_are_named(device):
    x, t = torch.randn(4, 8, device=device), torch.zeros(4, dtype=torch.long, device=device)
    wrong = functools.partial(refuses, vocab_parallel_cross_entropy)
    wrong(TypeError, "logits must be float32.*got torch.int64", t, t)
    wrong(ValueError, "logits must have at least one dimension", x[0, 0], t)
    wrong(TypeError, "target must be int64 or int32 class indices, got torch.float32", x, x[:, 0])
    wrong(ValueError, r"target must have shape \[4\].*got \[3\]", x, t[:3])
    wrong(ValueError, "target is on meta", x, t.to("meta"))
    wrong(ValueError, r"class_weight must have shape \[8\].*got \[7\]", x, t, class_weight=x[0, :7])
    wrong(ValueError, "reduction must be 'none', 'mean' or 'sum', got 'avg'", x, t, reduction="avg")
    wrong(ValueError, "label_smoothing must be between 0 and 1, got 1.5", x, t, label_smoothing=1.5)
    wrong(ValueError, "z_loss must be a finite number", x, t, z_loss=-1.0)
    wrong(ValueError, "softcap must be None or a finite number above 0, got 0.0", x, t, softcap=0.0)
    with pytest.raises(TypeError, match=r"group must be None or a torch.distributed.ProcessGroup"):
        vocab_parallel_cross_entropy(x, t, group=dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_targets_out_of_range_may_be_ignored(device, reduction):
    """T5's datasets pad labels with -1, which a loss mask of zeros is to remove."""
    logits, target = randn(6, 9, dtype=torch.float32, device=device), targets((6,), 9, device, ignored=0)
    wrong = target.clone()
    wrong[1], wrong[4] = -1, 9
    masked = wrong.clone()
    masked[[1, 4]] = -100
    op = functools.partial(vocab_parallel_cross_entropy, reduction=reduction, ignore_out_of_range=True, z_loss=0.1)
    ours, expected = (suite.forward_backward(op, [logits, t]) for t in (wrong, masked))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert all(v.isfinite().all() for v in ours)


def test_direct_calls_of_the_ops_cannot_read_out_of_bounds(device):
    x, t, options = torch.randn(4, 8), torch.zeros(4, dtype=torch.long), [0.0, 0.0, 0.0, -100, False, 0]
    with pytest.raises(RuntimeError, match="cross_entropy_statistics: expected one element for each row"):
        ops.cross_entropy_statistics(x, t[:3], None, 0, 8, *options)
    statistics, column = ops.cross_entropy_statistics(x, t, None, 0, 8, *options)
    refuses(ops.cross_entropy_combine, RuntimeError, "statistics must be", statistics[None], column, 0.1, *options[1:])
    _, saved = ops.cross_entropy_combine(statistics[None], column, *options)
    given = [x, None, column, saved, None, *options]
    with pytest.raises(RuntimeError, match="cross_entropy_backward: expected one element for each row"):
        ops.cross_entropy_backward(torch.ones(3), *given, torch.empty(4, 8))
    for out in (torch.empty(8, 4).t(), torch.empty(4, 7), torch.empty(4, 8).double()):
        refuses(ops.cross_entropy_backward, RuntimeError, "out must be contiguous", torch.ones(4), *given, out)
