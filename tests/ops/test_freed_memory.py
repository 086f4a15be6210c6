"""CPU kernels raise, and name the argument, where a tensor's memory was freed."""

import re

import pytest
import torch

from parallel_ops import cross_entropy, rotary_embedding_qk, route
from parallel_ops._internal.memory import empty_output
from parallel_ops._internal.token_range import TokenRange
from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.ops import bias_dropout_add, rotary_embedding
from parallel_ops.ops.attention.block import (
    Dropout,
    attention_gradient_rows,
    block_attention,
    block_attention_backward,
)
from parallel_ops.ops.attention.options import AttentionOptions
from parallel_ops.ops.attention.ranges import MaskBounds
from support.numerics.calls import BIAS, HEADS, TARGET, X
from support.numerics.forms import EVERY
from support.numerics.suite import RecordedOps, angles, outputs_of

ops = torch.ops.parallel_ops
LOSS = (0.1, 0.0, 0.0, -100, False, 0)


def of_form(name):
    op, _, inputs, *_ = EVERY[name]
    outputs = outputs_of(op(*inputs((3, 2, 8), dtype=torch.float32, device="cpu")))
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])


def in_place():
    with torch.no_grad():
        bias_dropout_add(X.clone(), BIAS, X, 0.5, row_positions=torch.arange(6), inplace=True)
        rotary_embedding_qk(HEADS * 1, HEADS * 1, *angles(6, 4), positions=torch.arange(6), inplace=True)
        rotary_embedding(HEADS * 1, *angles(6, 4), cu_seqlens=torch.tensor([0, 2, 6]), inplace=True)


def rotated():
    q, k = rotary_embedding_qk(HEADS, HEADS, *angles(6, 4), positions=torch.arange(6))
    (q * k).sum().backward()
    rotary_embedding(HEADS, *angles(6, 4), cu_seqlens=torch.tensor([0, 2, 6])).sum().backward()


def losses():
    for reduction in ("none", "mean"):
        cross_entropy(X, TARGET, class_weight=BIAS.detach(), reduction=reduction).sum().backward()
    statistics, column = ops.cross_entropy_statistics(X.detach(), TARGET, BIAS.detach(), 0, 8, *LOSS)
    ops.cross_entropy_combine(statistics[None], column, *LOSS)


def routed():
    routing = route(X, 2, bias=BIAS.detach())
    (routing.weights.sum() + routing.score_sums.sum() + routing.z_sum).backward()


def attention():
    q, spans = torch.ones(6, 1, 2, 8), torch.tensor([[0] * 6, [6] * 6], dtype=torch.int32)
    out, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    statistics, mask, options = torch.ones(2, 1, 2, 6), MaskBounds(spans=spans), AttentionOptions()
    dropout = Dropout(0.5, torch.tensor([1]), TokenRange(0, 6), TokenRange(0, 6))
    block_attention(q, q, q, mask, options, dropout=dropout, out=out, statistics=statistics, merge=True)
    rows = attention_gradient_rows(q, out, statistics)
    gradients = {"dq": dq, "dk": dk, "dv": dv, "accumulate_dq": True}
    block_attention_backward(q, q, q, q, rows, mask, options, dropout=dropout, **gradients)


CALLS = {name: lambda name=name: of_form(name) for name in EVERY} | {
    "in place": in_place,
    "rotary_embedding_qk": rotated,
    "cross_entropy": losses,
    "route": routed,
    "attention": attention,
    "sum_partials": lambda: sum_partials(torch.ones(2, 6, 8), BIAS.detach(), X.detach()),
    "empty_output": lambda: empty_output(torch.ones(1), (2048, 1024)),
}
# A bias is handed to the backward for its dtype; its values are not read.
UNREAD = {("layer_norm_backward", "bias")}


def recorded(name):
    with RecordedOps() as mode:
        CALLS[name]()
    return mode.calls


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_whose_memory_was_freed(name):
    calls = recorded(name)
    assert calls
    for op, given in calls:
        for argument, tensor in given.items():
            if not isinstance(tensor, torch.Tensor) or (op._opname, argument) in UNREAD:
                continue
            for start in (0, 5):  # where a view starts later, its pointer is not null
                part = torch.ones(tensor.numel() + start, dtype=tensor.dtype)
                freed = part[start:].view(tensor.shape)
                part.untyped_storage().resize_(0)
                with pytest.raises(RuntimeError, match=rf"\w+: {argument} needs \d+ bytes, but its storage has 0"):
                    op(**(given | {argument: freed}))


def test_every_tensor_of_every_compiled_kernel_is_freed():
    every = [
        op for op in torch._C._dispatch_get_registrations_for_dispatch_key("CPU") if op.startswith("parallel_ops::")
    ]
    compiled = [op for op in every if re.search(r"^CPU: .*\.cpp", torch._C._dispatch_dump(op), re.M)]
    schemas = [torch._C._get_schema(op, "") for op in compiled]
    tensors = {(s.name, a.name) for s in schemas for a in s.arguments if "Tensor" in str(a.type)}
    calls = [call for name in CALLS for call in recorded(name)]
    freed = {
        (op._schema.name, a) for op, given in calls for a, value in given.items() if isinstance(value, torch.Tensor)
    }
    assert tensors == freed, "an op or an argument without a form (tests/support/numerics/forms.py) or a call here"


def test_less_memory_than_the_shape_needs():
    tensor = torch.ones(3, 8)
    tensor.untyped_storage().resize_(4 * (3 * 8 - 1))
    with pytest.raises(RuntimeError, match="bias_gelu: x needs 96 bytes, but its storage has 92"):
        ops.bias_gelu(tensor, None, True)


def test_an_empty_tensor_needs_no_memory():
    assert ops.bias_gelu(torch.ones(0, 8), None, True).shape == (0, 8)
