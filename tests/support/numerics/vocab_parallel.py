"""What each rank does in the tests of the vocab-parallel losses, and the sharded op as a function of whole tensors."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_ops import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from parallel_ops.comm import consistency
from parallel_ops.comm import primitives as _primitives
from parallel_ops.ops import cross_entropy_reference
from parallel_ops.tensor_parallel.loss import cross_entropy as _loss
from ptx.kernels import differentiable
from support.numerics.suite import randn
from support.ranks.distributed import ranks


def sizes_of(vocab: int, shards: int) -> list[int]:
    """Shard sizes that differ wherever ``vocab`` allows."""
    first = max(1, vocab // (shards + 1))
    rest = [(vocab - first) // (shards - 1)] * (shards - 1)
    rest[-1] += vocab - first - sum(rest)
    return [first, *rest]


def _shard(t: Tensor, sizes: list[int], rank: int, dim: int) -> Tensor:
    return t.split(sizes, dim=dim)[rank].clone().requires_grad_()


def cross_entropy(rank: int, logits: Tensor, target: Tensor, sizes: list[int], options: dict[str, Any], grad: Any):
    """(loss, gradient of this rank's logits)."""
    x = _shard(logits, sizes, rank, -1)
    loss = vocab_parallel_cross_entropy(x * 1, target, group=dist.group.WORLD, **options)
    loss.backward(torch.ones_like(loss) if grad is None else grad)
    return loss.detach(), x.grad


def _same_on_all(losses: list[Tensor]) -> Tensor:
    for loss in losses[1:]:
        assert torch.equal(losses[0], loss) or losses[0].isnan().any(), "the loss differs between ranks"
    return losses[0]


def sharded_cross_entropy(shards: int, sizes: list[int] | None = None, **options: Any):
    """``vocab_parallel_cross_entropy`` over a group, as a function of the whole logits."""

    def run(logits: Tensor, target: Tensor, grad: Tensor | None) -> list[Any]:
        split = sizes_of(logits.shape[-1], shards) if sizes is None else sizes
        return ranks(shards).run(cross_entropy, logits.detach(), target, split, options, grad)

    def forward(logits: Tensor, target: Tensor) -> Tensor:
        return _same_on_all([loss for loss, _ in run(logits, target, None)])

    def backward(grad: Tensor, logits: Tensor, target: Tensor) -> tuple[Tensor, None]:
        return torch.cat([g for _, g in run(logits, target, grad.contiguous())], dim=-1), None

    return differentiable(forward, backward)


def linear_cross_entropy(
    rank: int, tensors: list[Tensor | None], target: Tensor, sizes: list[int], options: dict[str, Any], grad: Any
):
    """(loss, gradients of hidden, weight and bias on this rank)."""
    hidden, weight, bias = tensors
    if options.get("sequence_parallel"):
        h = _shard(hidden, [hidden.shape[0] // len(sizes)] * len(sizes), rank, 0)
    else:
        h = hidden.clone().requires_grad_()
    w = _shard(weight, sizes, rank, 0)
    b = None if bias is None else _shard(bias, sizes, rank, 0)
    loss = vocab_parallel_linear_cross_entropy(h, w, target, bias=b, group=dist.group.WORLD, **options)
    loss.backward(torch.ones_like(loss) if grad is None else grad)
    return loss.detach(), h.grad, w.grad, None if b is None else b.grad


def sharded_linear_cross_entropy(shards: int, **options: Any):
    """``vocab_parallel_linear_cross_entropy`` over a group, as a function of whole tensors."""

    def run(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, grad: Tensor | None) -> list[Any]:
        tensors = [None if t is None else t.detach() for t in (hidden, weight, bias)]
        split = sizes_of(weight.shape[0], shards)
        return ranks(shards).run(linear_cross_entropy, tensors, target, split, options, grad)

    def forward(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return _same_on_all([result[0] for result in run(hidden, weight, target, bias, None)])

    def backward(grad: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None):
        _, dh, dw, db = zip(*run(hidden, weight, target, bias, grad.contiguous()), strict=True)
        dhidden = torch.cat(dh) if options.get("sequence_parallel") else _same_on_all(list(dh))
        return dhidden, torch.cat(dw), None, None if bias is None else torch.cat(db)

    return differentiable(forward, backward)


def weighted(rank: int, hidden: Tensor, weight: Tensor, target: Tensor, class_weight: Tensor, options: dict[str, Any]):
    """Both losses with class weights: for each (loss, gradient of hidden, of this rank's weight, statistics)."""
    sizes, results = sizes_of(weight.shape[0], 2), []
    of_rank = class_weight.split(sizes)[rank]
    given = {"group": dist.group.WORLD, "class_weight": of_rank, "return_statistics": True, **options}
    for linear in (False, True):
        h, w = hidden.clone().requires_grad_(), _shard(weight, sizes, rank, 0)
        if linear:
            loss, statistics = vocab_parallel_linear_cross_entropy(h, w, target, chunk_bytes=600, **given)
        else:
            loss, statistics = vocab_parallel_cross_entropy(h @ w.t(), target, **given)
        loss.sum().backward()
        if not linear:
            dist.all_reduce(h.grad)
        results.append((loss.detach(), h.grad, w.grad, *statistics))
    return results


def compiled_linear(rank: int, hidden: Tensor, weight: Tensor, target: Tensor, options: dict[str, Any]):
    """As ``compiled``."""
    torch._dynamo.reset()
    op = functools.partial(vocab_parallel_linear_cross_entropy, group=dist.group.WORLD, **options)
    results = []
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        h, w = hidden.clone().requires_grad_(), _shard(weight, sizes_of(weight.shape[0], 2), rank, 0)
        loss = function(h, w, target)
        loss.sum().backward()
        results.append((loss.detach(), h.grad, w.grad))
    return results


def mismatched_hidden(rank: int, sequence_parallel: bool):
    """Ranks that disagree on the hidden size, which no rank can see by itself."""
    hidden, weight, target = torch.randn(3, 4 + rank), torch.randn(5, 4 + rank), torch.zeros(3, dtype=torch.long)
    if sequence_parallel:
        target = target.repeat(2)
    return vocab_parallel_linear_cross_entropy(
        hidden, weight, target, group=dist.group.WORLD, sequence_parallel=sequence_parallel
    )


def mismatched_rows(rank: int, rows: list[int]):
    logits = torch.randn(rows[rank], 5)
    return vocab_parallel_cross_entropy(logits, torch.zeros(rows[rank], dtype=torch.long), group=dist.group.WORLD)


@contextlib.contextmanager
def _asking_as_on_cuda() -> Iterator[None]:
    """Ranks compare their calls where tensors on CUDA would: at the first call of a kind."""
    ask, check_consistency, cuda = consistency._compare, consistency.check_consistency, torch.device("cuda")
    with (
        mock.patch.object(consistency, "refuse_capture"),
        mock.patch.object(consistency, "_compare", lambda group, call, device: ask(group, call, torch.device("cpu"))),
        mock.patch.object(
            _loss,
            "check_consistency",
            lambda group, call, device, known: check_consistency(group, call, cuda, known=known),
        ),
    ):
        yield


def as_on_cuda(rank: int, rows: list[int], cols: list[int], names: list[str]) -> list[Any]:
    """(losses, messages) of one call after the other; the first rank has one row more in calls named "differ"."""
    results: list[Any] = []
    group = dist.new_group()
    with _asking_as_on_cuda():
        for count, width, name in zip(rows, cols, names, strict=True):
            n = count + (name == "differ" and rank == 0)
            target = torch.arange(n) % width
            x = torch.eye(n, dist.get_world_size() * width)[:, rank * width : (rank + 1) * width]
            with _counted() as count_of:
                try:
                    loss = vocab_parallel_cross_entropy(x, target, group=group, reduction="none")
                    results.append((loss, len(count_of)))
                except ValueError as error:
                    results.append((str(error), len(count_of)))
    return results


@contextlib.contextmanager
def _counted() -> Iterator[list[str]]:
    """The messages of the block, by what sends them."""
    sent: list[str] = []
    with contextlib.ExitStack() as stack:
        for module, name in ((consistency, "Gather"), (_primitives, "all_gather_single")):
            send = getattr(module, name)

            def counted(*args: Any, _module: Any = module, _send: Any = send, **kwargs: Any) -> Any:
                sent.append(_module.__name__)
                return _send(*args, **kwargs)

            stack.enter_context(mock.patch.object(module, name, counted))
        yield sent


def wrong_shape_on_one_rank(rank: int, bad_rank: int):
    target = torch.zeros(4 if rank == bad_rank else 3, dtype=torch.long)
    return vocab_parallel_cross_entropy(torch.randn(3, 5), target, group=dist.group.WORLD)


def differing_options(rank: int):
    target = torch.zeros(3, dtype=torch.long)
    return vocab_parallel_cross_entropy(torch.randn(3, 5), target, group=dist.group.WORLD, z_loss=0.1 * rank)


def wrong_target(rank: int, bad_rank: int | None, value: int):
    target = torch.tensor([0, 1, -100, value if bad_rank in (None, rank) else 2])
    return vocab_parallel_cross_entropy(torch.randn(4, 5), target, group=dist.group.WORLD)


def messages(rank: int, rows: int, **options: Any) -> list[str]:
    """What sends messages in a call and its backward, in order."""
    x = torch.randn(rows, 3 + rank, requires_grad=True)
    with _counted() as sent:
        vocab_parallel_cross_entropy(x, torch.arange(rows) % 7, group=dist.group.WORLD, **options).backward()
    return [module.rpartition(".")[2] for module in sent]


def compiled(rank: int, logits: Tensor, target: Tensor, sizes: list[int], options: dict[str, Any]):
    """The compiled op against the eager one: (losses, gradients), each a pair that must be equal."""
    torch._dynamo.reset()
    op = functools.partial(vocab_parallel_cross_entropy, group=dist.group.WORLD, **options)
    results = []
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        x = _shard(logits, sizes, rank, -1)
        loss = function(x, target)
        loss.backward()
        results.append((loss.detach(), x.grad))
    return results


def targets(shape, vocab, device="cpu", seed=0, ignored=0.2):
    """Targets of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, vocab, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < ignored, -100, target).to(device)


def pair(**options: Any):
    """The cross-entropy without a group, and its reference."""
    return (functools.partial(f, **options) for f in (vocab_parallel_cross_entropy, cross_entropy_reference))


def inputs(shape, hidden, vocab, *, dtype=torch.float32, device="cpu", seed=0, bias=True, ignored=0.2):
    """Hidden states, the weight of logits, targets of which some are ignored, and a bias or ``None``."""
    target = targets(shape, vocab, device, seed, ignored)
    h = randn(*shape, hidden, dtype=dtype, device=device, seed=seed)
    w = randn(vocab, hidden, dtype=dtype, device=device, seed=seed + 1)
    return [h, w, target, randn(vocab, dtype=dtype, device=device, seed=seed + 2) if bias else None]
