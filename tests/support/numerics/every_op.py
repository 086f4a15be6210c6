"""Calls of every op over a group, forward and backward, with the options that change what is sent."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_ops import comm, context_parallel, expert_parallel, tensor_parallel


def registered() -> set[str]:
    """The names of the package's ops that take a group."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("parallel_ops::") and not name.endswith("_backward"):
            arguments = torch._C._get_schema(*name.split(".", 1) if "." in name else (name, "")).arguments
            if any(argument.name == "group" for argument in arguments):
                found.add(name.removeprefix("parallel_ops::"))
    return found


def _leaf(*shape: int) -> Tensor:
    return torch.ones(*shape).requires_grad_()


def _all_gather(group: Any) -> None:
    rank, size = group.rank(), group.size()
    sizes = [2 * r for r in range(size)]  # one has nothing
    comm.all_gather(_leaf(sizes[rank], 3), group, sizes=sizes).sum().backward()
    comm.gather_from_group(_leaf(2, 3), group).sum().backward()


def _reduce_scatter(group: Any) -> None:
    for grad_reduce in ("fp32", "backend"):
        x = _leaf(2 * group.size(), 3)
        comm.reduce_scatter(x, group, grad_reduce=grad_reduce).sum().backward()
    comm.reduce_scatter(_leaf(3, 3), group, sizes=[3, *[0] * (group.size() - 1)]).sum().backward()


def _all_reduce(group: Any) -> None:
    for elements in (3, 100_000):  # gathered at once, and scattered first
        comm.reduce_from_group(_leaf(elements), group).sum().backward()
        comm.copy_to_group(_leaf(elements), group, grad_reduce="backend").sum().backward()


def _all_to_all(group: Any) -> None:
    size = group.size()
    comm.all_to_all(_leaf(size, 2 * size), group, split_dim=1).sum().backward()
    # The first rank has rows for the last one alone, the others none.
    leaving, arriving = [0] * size, [0] * size
    if group.rank() == 0:
        leaving[-1] = 5
    if group.rank() == size - 1:
        arriving[0] = 5
    comm.all_to_all(_leaf(sum(leaving), 3), group, split_sizes=leaving, concat_sizes=arriving).sum().backward()


def _scatter(group: Any) -> None:
    comm.scatter_to_group(_leaf(2 * group.size(), 3), group).sum().backward()


def _linear(op: Callable[..., Tensor], gathers: bool) -> Callable[[Any], None]:
    def call(group: Any) -> None:
        rows = 4 if gathers else 4 * group.size()
        for overlap in ("auto", "off", 2):
            for _ in range(2):
                op(_leaf(rows, 8), _leaf(6, 8), group=group, overlap=overlap).sum().backward()

    return call


def _column_parallel_linear(group: Any) -> None:
    for _ in range(2):
        tensor_parallel.column_parallel_linear(_leaf(8, 8), _leaf(6, 8), group=group).sum().backward()


def _ring_attention(group: Any) -> None:
    tokens = 8
    for options in (
        {}, {"cp_layout": "contiguous"}, {"causal": False}, {"window_size": (2, 0), "cp_layout": "contiguous"},
        {"window_size": (2, 0)},
        {"algorithm": "all_gather"}, {"algorithm": "all_to_all"},
        {"algorithm": "hybrid", "ulysses_degree": 2},
        {"cu_seqlens": torch.tensor([0, 5, tokens * group.size()], dtype=torch.int32)},
    ):  # fmt: skip
        for _ in range(2):
            q, k, v = (_leaf(tokens, 1, 4, 8) for _ in range(3))
            context_parallel.ring_attention(q, k, v, group=group, **options).sum().backward()  # type: ignore[arg-type]


def _cross_entropy(group: Any) -> None:
    target = torch.arange(6)
    for _ in range(2):
        tensor_parallel.vocab_parallel_cross_entropy(_leaf(6, 5), target, group=group).backward()


def _linear_cross_entropy(group: Any) -> None:
    for sequence_parallel in (False, True):
        rows = 6 if sequence_parallel else 6 * group.size()
        target = torch.arange(6 * group.size()) % 5
        for _ in range(2):
            tensor_parallel.vocab_parallel_linear_cross_entropy(
                _leaf(rows, 8), _leaf(5, 8), target, group=group, sequence_parallel=sequence_parallel
            ).backward()


def _linear_log_probs(group: Any) -> None:
    tokens = torch.arange(6 * group.size()) % 5
    for sequence_parallel in (False, True):
        rows = 6 if sequence_parallel else 6 * group.size()
        for _ in range(2):
            found = tensor_parallel.vocab_parallel_linear_log_probs(
                _leaf(rows, 8), _leaf(5, 8), tokens, group=group, sequence_parallel=sequence_parallel
            )
            (found.log_probs.sum() + found.entropy.sum()).backward()


def _linear_kl_divergence(group: Any) -> None:
    for _ in range(2):
        teacher = {"teacher": _leaf(6, 4).detach(), "teacher_weight": _leaf(5, 4).detach()}
        tensor_parallel.vocab_parallel_linear_kl_divergence(
            _leaf(6, 8), _leaf(5, 8), **teacher, group=group
        ).sum().backward()


def _dispatch(group: Any) -> None:
    """Tokens to experts, of which all choose the first one, and some ranks have none."""
    experts = 2 * group.size()
    for chunks in (1, 2):
        for tokens in (3, 0 if group.rank() else 3):
            chosen = torch.zeros(tokens, 1, dtype=torch.int64)
            load = torch.bincount(chosen.flatten(), minlength=experts).int()
            x, weights = _leaf(tokens, 4), _leaf(tokens, 1)
            way = expert_parallel.Dispatch(x, chosen, load, experts, group=group, weights=weights, chunks=chunks)
            arrived = [way.receive(way.in_flight[chunk], chunk) for chunk in range(chunks)]
            way.combine([way.send_back(one.rows * 2, chunk) for chunk, one in enumerate(arrived)]).sum().backward()


OPS: dict[str, Callable[[Any], None]] = {
    "comm_all_gather": _all_gather,
    "comm_reduce_scatter": _reduce_scatter,
    "comm_all_reduce": _all_reduce,
    "comm_all_to_all": _all_to_all,
    "comm_scatter": _scatter,
    "all_gather_linear": _linear(tensor_parallel.all_gather_linear, True),
    "linear_reduce_scatter": _linear(tensor_parallel.linear_reduce_scatter, False),
    "column_parallel_linear": _column_parallel_linear,
    "ring_attention": _ring_attention,
    "vocab_parallel_cross_entropy": _cross_entropy,
    "vocab_parallel_linear_cross_entropy": _linear_cross_entropy,
    "vocab_parallel_linear_log_probs": _linear_log_probs,
    "vocab_parallel_linear_kl_divergence": _linear_kl_divergence,
}


def call(rank: int) -> None:
    """Each in a group of its own, whose first call is the op's."""
    for function in (*OPS.values(), _dispatch):
        function(dist.new_group())
