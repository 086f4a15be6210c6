"""CPU kernels raise, and name the argument, where a tensor's memory was freed."""

import re

import pytest
import torch

import parallel_ops.comm.sum_partials
import parallel_ops.ops  # noqa: F401  registers the ops

ROWS, COLS = 3, 8
F32, I64 = torch.float32, torch.int64


def t(*shape, dtype=F32):
    return torch.ones(shape, dtype=dtype)


def x():
    return t(ROWS, COLS)


def row():
    return t(ROWS)


def scalar():
    return torch.tensor(2.0)


def heads():
    return t(ROWS, 1, 2, 4)


SEED = {"seed": lambda: t(1, dtype=I64)}
ATTENTION = {"q": heads, "k": heads, "v": heads, "spans": lambda: t(2, ROWS, dtype=torch.int32), **SEED}
BLOCK = {"left": None, "right": None, "scale": 1.0, "softcap": 0.0, "p": 0.5, "places": [0, 1, 0, 1, 0, 0]}
STATISTICS = {"statistics": lambda: t(2, 1, 2, ROWS)}
LOSS = {
    "label_smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0, "ignore_index": -100, "ignore_out_of_range": False,
    "reduction": 0,
}  # fmt: skip
TARGETS = {"target": lambda: t(ROWS, dtype=I64), "class_weight": lambda: t(COLS)}
ROTARY = {"cos": lambda: t(ROWS, 2), "sin": lambda: t(ROWS, 2), "positions": lambda: t(ROWS, dtype=I64)}
PACKED = {"cos": lambda: t(ROWS, 2), "sin": lambda: t(ROWS, 2), "positions": None}
HEADS_LAST = {"interleaved": False, "heads_first": False}
STARTS = {"cu_seqlens": lambda: torch.tensor([0, 1, ROWS])}
SWISH = {"alpha": 1.0, "limit": None, "up_offset": 0.0}
DROPOUT = {"p": 0.5, **SEED, "index_offset": 0, "row_positions": lambda: t(ROWS, dtype=I64)}
NORM = {"grad": x, "grad_sum": x, "x": x, "weight": lambda: t(COLS), "rstd": row, "zero_centered": False}
ORDER = {"rows": lambda: t(4, dtype=torch.int32), "places": lambda: t(ROWS, 1, dtype=torch.int32)}
CHOICES = {"top_k": 1, "sigmoid": False, "groups": 1, "top_groups": 1}
WEIGHTS = {"top_k_first": False, "normalize": True, "scale": 1.0}
GRADIENT = {
    "grad": row, "logits": x, "class_weight": lambda: t(COLS), "column": lambda: t(ROWS, dtype=I64),
    "saved": lambda: t(6, ROWS), "divisor": None,
}  # fmt: skip
# Every op with a compiled kernel: its arguments, tensors as what makes them.
CALLS = [
    ("bias_gelu", {"x": x, "bias": lambda: t(COLS), "tanh": True}),
    ("bias_gelu", {"x": x, "bias": lambda: t(COLS, dtype=torch.bfloat16), "tanh": True}),
    ("bias_gelu_backward", {"grad": x, "x": x, "bias": lambda: t(COLS), "tanh": True}),
    ("bias_dropout_add", {"x": x, "bias": lambda: t(COLS), "residual": x, "dtype": F32, **DROPOUT}),
    ("sum_partials", {"partials": lambda: t(2, ROWS, COLS), "bias": lambda: t(COLS), "residual": x}),
    ("bias_dropout_add", {"x": lambda: x().half(), "bias": None, "residual": x, "dtype": F32, **DROPOUT}),
    ("bias_dropout_add_", {"x": x, "bias": lambda: t(COLS), "residual": x, **DROPOUT}),
    ("bias_dropout_add_backward", {"grad": x, "dtype": F32, "bias_dtype": F32, **DROPOUT}),
    ("bias_swiglu", {"x": x, "bias": lambda: t(COLS), "weights": row, **SWISH}),
    ("bias_swiglu_backward", {"grad": lambda: t(ROWS, 4), "x": x, "bias": lambda: t(COLS), "weights": row, **SWISH}),
    ("silu_mul", {"gate": x, "up": x, "weights": row, **SWISH}),
    ("silu_mul_backward", {"grad": x, "gate": x, "up": x, "weights": row, **SWISH}),
    ("gelu_mul", {"gate": x, "up": x, "weights": row, "tanh": True}),
    ("gelu_mul_backward", {"grad": x, "gate": x, "up": x, "weights": row, "tanh": True}),
    ("scaled_masked_softmax", {"scores": x, "mask": x, "sink": lambda: t(1), "scale": 1.0}),
    ("scaled_masked_softmax", {"scores": x, "mask": lambda: x().bool(), "sink": None, "scale": 1.0}),
    ("scaled_masked_softmax_backward", {"grad": x, "y": x, "sink_share": row, "scale": 1.0}),
    ("scaled_causal_softmax", {"scores": x, "sink": lambda: t(1), "scale": 1.0, "window": None}),
    ("scaled_causal_softmax_backward", {"grad": x, "y": x, "sink_share": row, "scale": 1.0, "window": None}),
    ("cross_entropy", {"logits": x, **TARGETS, **LOSS, "inplace_backward": False}),
    ("cross_entropy_statistics", {"logits": x, **TARGETS, "start": 0, "vocab": COLS, **LOSS}),
    (
        "cross_entropy_combine",
        {"statistics": lambda: t(1, 3, ROWS), "column": lambda: t(ROWS, dtype=I64), **LOSS},
    ),
    ("cross_entropy_backward", {**GRADIENT, **LOSS, "out": x}),
    ("cross_entropy_backward", {**GRADIENT, "grad": scalar, "divisor": scalar, **LOSS, "out": x}),
    ("layer_norm", {"x": x, "weight": lambda: t(COLS), "bias": lambda: t(COLS), "residual": x, "eps": 1e-5,
                    "zero_centered": False}),
    ("layer_norm_backward", {**NORM, "bias": lambda: t(COLS), "mean": row}),
    ("rms_norm", {"x": x, "weight": lambda: t(COLS), "residual": x, "eps": 1e-5, "zero_centered": False}),
    ("rms_norm_backward", NORM),
    ("rotary_embedding", {"q": heads, "k": heads, **ROTARY, "cu_seqlens": None, **HEADS_LAST}),
    ("rotary_embedding", {"q": lambda: t(ROWS, 2, 4), "k": None, **PACKED, **STARTS, **HEADS_LAST}),
    ("rotary_embedding_backward", {"grad_q": heads, "grad_k": heads, **ROTARY, "cu_seqlens": None, **HEADS_LAST}),
    ("rotary_embedding_", {"q": heads, "k": heads, **ROTARY, "cu_seqlens": None, "interleaved": False}),
    ("advise_huge_pages_", {"t": x}),
    ("route", {"logits": x, "bias": lambda: t(COLS), **CHOICES, **WEIGHTS}),
    (
        "route_backward",
        {"logits": x, "experts": lambda: t(ROWS, 1, dtype=I64), "grad_weights": lambda: t(ROWS, 1),
         "grad_score_sums": lambda: t(COLS), "grad_z_sum": scalar, "sigmoid": False, **WEIGHTS},
    ),
    ("sort_by_expert", {"experts": lambda: t(ROWS, 1, dtype=I64), "num_experts": 2, "capacity": None, "multiple": 1}),
    ("permute", {"x": x, **ORDER}),
    ("unpermute", {"y": lambda: t(4, COLS), **ORDER, "weights": lambda: t(ROWS, 1)}),
    (
        "unpermute_backward",
        {"grad": x, "y": lambda: t(4, COLS), **ORDER, "weights": lambda: t(ROWS, 1), "needs_y": True},
    ),
    ("block_attention_", {**ATTENTION, **BLOCK, "out": heads, **STATISTICS, "merge": True}),
    ("attention_gradient_rows_", {"grad_out": heads, "out": heads, **STATISTICS, "rows": lambda: t(3, 1, 2, ROWS)}),
    (
        "block_attention_backward_",
        {"grad_out": heads, **ATTENTION, **BLOCK, "rows": lambda: t(3, 1, 2, ROWS), "dq": heads, "dk": heads,
         "dv": heads, "accumulate": True},
    ),
]  # fmt: skip
# A bias is handed to the backward for its dtype; its values are not read.
UNREAD = {("layer_norm_backward", "bias")}
CASES = [
    pytest.param(name, arguments, argument, id=f"{name}-{i}-{argument}")
    for i, (name, arguments) in enumerate(CALLS)
    for argument, value in arguments.items()
    if callable(value) and (name, argument) not in UNREAD
]


def call(name, arguments, freed=None, start=0):
    made = {key: value() if callable(value) else value for key, value in arguments.items()}
    if freed is not None:
        tensor = made[freed]
        part = torch.ones(tensor.numel() + start, dtype=tensor.dtype)
        made[freed] = part[start:].view(tensor.shape)
        part.untyped_storage().resize_(0)
    return getattr(torch.ops.parallel_ops, name)(**made)


@pytest.mark.parametrize(("name", "arguments", "argument"), CASES)
def test_a_tensor_whose_memory_was_freed(name, arguments, argument):
    call(name, arguments)
    for start in (0, 5):  # where a view starts later, its pointer is not null
        with pytest.raises(RuntimeError, match=rf"\w+: {argument} needs \d+ bytes, but its storage has 0"):
            call(name, arguments, argument, start)


def test_every_compiled_kernel_is_called():
    ours = [
        op for op in torch._C._dispatch_get_registrations_for_dispatch_key("CPU") if op.startswith("parallel_ops::")
    ]
    registrations = {op.split("::")[1]: torch._C._dispatch_dump(op) for op in ours}
    assert {name for name, text in registrations.items() if re.search(r"^CPU: .*\.cpp", text, re.M)} == {
        name for name, _ in CALLS
    }


def test_less_memory_than_the_shape_needs():
    tensor = x()
    tensor.untyped_storage().resize_(4 * (ROWS * COLS - 1))
    with pytest.raises(RuntimeError, match="bias_gelu: x needs 96 bytes, but its storage has 92"):
        torch.ops.parallel_ops.bias_gelu(tensor, None, True)


def test_an_empty_tensor_needs_no_memory():
    assert torch.ops.parallel_ops.bias_gelu(torch.ones(0, COLS), None, True).shape == (0, COLS)
