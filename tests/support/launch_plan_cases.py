"""What launch_plans.py calls: every op in its variants, and checks of what makes a call another one."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Case = tuple[str, tuple[Any, ...]]


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def cases() -> dict[str, Case]:
    x, bias, seed = t(6, 256), t(256), torch.tensor([5])
    statistics, column, target = t(2, 3, 40, dtype=torch.float32), torch.zeros(40, dtype=torch.int64), t(40).long()
    logits, saved, losses = t(40, 40000), t(2, 40, dtype=torch.float32), t(40, dtype=torch.float32)
    scores = t(2, 3, 16, 64)
    mean = t(6, dtype=torch.float32)
    heads, angles = t(8, 2, 4, 64), t(8, 32, dtype=torch.float32)
    wide, wide_mean = t(3, 20000), t(3, dtype=torch.float32)
    return {
        "bias_gelu": ("bias_gelu", (x, bias, True)),
        "bias_gelu, no bias": ("bias_gelu", (x, None, False)),
        "bias_gelu, fp32 of odd size": ("bias_gelu", (t(3, 7, dtype=torch.float32), None, True)),
        "bias_gelu, one row": ("bias_gelu", (t(1, 1), t(1), True)),
        "bias_gelu, rows apart": ("bias_gelu", (t(6, 512)[:, :256], bias, True)),
        "bias_gelu, fp64": ("bias_gelu", (t(6, 8, dtype=torch.float64), None, True)),
        "bias_gelu_backward": ("bias_gelu_backward", (t(6, 256), x, bias, True)),
        "bias_gelu_backward, no bias": ("bias_gelu_backward", (t(6, 256), x, None, True)),
        "bias_swiglu": ("bias_swiglu", (x, bias)),
        "bias_swiglu_backward": ("bias_swiglu_backward", (t(6, 128), x, bias)),
        "bias_dropout_add": ("bias_dropout_add", (x, bias, t(6, 256), 0.25, seed, 2**33 + 6)),
        "bias_dropout_add, no dropout": ("bias_dropout_add", (x, None, t(6, 256), 0.0, None, 0)),
        "bias_dropout_add, x is residual": ("bias_dropout_add", (x, bias, x, 0.25, seed, 0)),
        "bias_dropout_add_backward": ("bias_dropout_add_backward", (x, True, 0.25, seed, 0)),
        "scaled_masked_softmax": ("scaled_masked_softmax", (scores, t(2, 1, 16, 64).bool(), 0.125)),
        "scaled_masked_softmax, additive": ("scaled_masked_softmax", (scores, t(2, 1, 1, 64), 1.0)),
        "scaled_masked_softmax, long": ("scaled_masked_softmax", (t(2, 17000), None, 0.5)),
        "scaled_masked_softmax_backward": ("scaled_masked_softmax_backward", (scores, t(2, 3, 16, 64), 0.125)),
        "scaled_causal_softmax": ("scaled_causal_softmax", (scores, 0.125, None)),
        "scaled_causal_softmax, window": ("scaled_causal_softmax", (scores, 0.125, 5)),
        "scaled_causal_softmax_backward": ("scaled_causal_softmax_backward", (scores, t(2, 3, 16, 64), 0.125, 5)),
        "layer_norm": ("layer_norm", (x, bias, t(256), t(6, 256), 1e-5, False)),
        "layer_norm, alone": ("layer_norm", (x, bias, None, None, 1e-5, True)),
        "layer_norm_backward": ("layer_norm_backward", (t(6, 256), t(6, 256), x, bias, mean, mean + 1, True, False)),
        "layer_norm_backward, wide": (
            "layer_norm_backward",
            (t(3, 20000), None, wide, t(20000), wide_mean, wide_mean + 1, True, False),
        ),
        "rms_norm": ("rms_norm", (x, bias, None, 1e-5, False)),
        "rms_norm, wide": ("rms_norm", (wide, t(20000), t(3, 20000), 1e-5, False)),
        "rms_norm_backward": ("rms_norm_backward", (t(6, 256), None, x, bias, mean, True)),
        "rotary_embedding": ("rotary_embedding", (heads, angles, angles + 1, None, False)),
        "rotary_embedding, positions": ("rotary_embedding", (heads, angles, angles + 1, t(8, 2).long(), True)),
        "rotary_embedding, a view of q, k, v": (
            "rotary_embedding",
            (t(8, 2, 4, 192)[..., 64:128], angles, angles + 1, None, False),
        ),
        "rotary_embedding_backward": ("rotary_embedding_backward", (heads, angles, angles + 1, None, False)),
        "cross_entropy_statistics": ("cross_entropy_statistics", (logits, target, 0, 40000, -100, 0.0, False)),
        "cross_entropy_statistics, all": ("cross_entropy_statistics", (t(4, 99), target[:4], 9, 200, -100, 30.0, True)),
        "cross_entropy_combine": ("cross_entropy_combine", (statistics, column, 0.0, 1e-4)),
        "cross_entropy_backward": ("cross_entropy_backward", (losses, logits, column, saved, 0.0, 1e-4, 0.0)),
        "cross_entropy_backward_": ("cross_entropy_backward_", (losses, logits, column, saved, 0.0, 0.0, 30.0)),
    }


def checks() -> dict[str, Callable[[Any], Any]]:
    return {
        "another call is another plan": another_call,
        "one tensor twice is not two tensors": one_tensor_twice,
        "a call that copies runs in Python": a_call_that_copies,
        "an empty tensor": an_empty_tensor,
        "errors of Python keep their type": errors_keep_their_type,
        "errors hold no tensors": errors_hold_no_tensors,
        "memory that is not there": too_large,
        "threads": threads,
    }


def another_call(calls: Any) -> Any:
    """Shape, strides, dtype, alignment, presence and every other argument: each runs in Python twice, then never."""
    gelu, dropout = torch.ops.parallel_ops.bias_gelu, torch.ops.parallel_ops.bias_dropout_add
    memory, seed = t(4096, dtype=torch.float32), torch.tensor([1])
    x, r = t(4, 64), t(4, 64)
    variants = [
        (gelu, (memory[:512].view(8, 64), None, True)),
        (gelu, (memory[:512].view(4, 128), None, True)),
        (gelu, (memory[:1024].view(8, 128)[:, :64], None, True)),
        (gelu, (memory[1:513].view(8, 64), None, True)),
        (gelu, (memory[:512].view(8, 64), t(64, dtype=torch.float32), True)),
        (gelu, (memory[:512].view(8, 64), None, False)),
        (gelu, (memory[:512].view(8, 64).half(), None, True)),
        (dropout, (x, None, r, 0.1, seed, 0)),
        (dropout, (x, None, r, 0.2, seed, 0)),
        (dropout, (x, None, r, 0.1, seed, 64)),
    ]
    before = [[calls.launches(op, args)[2] for op, args in variants] for _ in range(2)]
    again = [calls.launches(op, args) for op, args in variants]
    # The alignment and the arguments that a kernel sees belong to the variant, not to whichever was first.
    distinct = {str(launches) for _, launches, _ in again}
    in_python = [*before, [n for *_, n in again]]
    return in_python == [[n] * len(variants) for n in (1, 1, 0)] and len(distinct) >= len(variants) - 1


def one_tensor_twice(calls: Any) -> Any:
    op = torch.ops.parallel_ops.bias_dropout_add
    x, r = t(3, 32), t(3, 32)
    pointers = []
    for args in ((x, None, x, 0.0, None, 0), (x, None, r, 0.0, None, 0)):
        for _ in range(2):
            calls.launches(op, args)
        _, launches, in_python = calls.launches(op, args)
        pointers.append([word for word in launches[0][-1] if isinstance(word, str)])
        if in_python:
            return f"{pointers} in Python"
    return pointers == [
        ["argument 0"] * 2 + ["output 0", "null", "null"],
        ["argument 0", "argument 2", "output 0", "null", "null"],
    ]


def a_call_that_copies(calls: Any) -> Any:
    args = (t(64, 6).t(), None, True)
    return [calls.launches(torch.ops.parallel_ops.bias_gelu, args)[2] for _ in range(4)] == [1, 1, 1, 1]


def an_empty_tensor(calls: Any) -> Any:
    args = (t(0, 64), None, True)
    results = [calls.launches(torch.ops.parallel_ops.bias_gelu, args) for _ in range(3)]
    return [(y.shape, launches, n) for (y,), launches, n in results] == [((0, 64), [], n) for n in (1, 1, 0)]


def errors_keep_their_type(calls: Any) -> Any:
    """Called through Python's wrapper; their text at least where the op itself is called, as compiled graphs do."""
    from parallel_ops.ops.bias_dropout_add import _forward

    messages = []
    for p in (1e-12, 2e-12, 1e-12):
        try:
            _forward(t(3, 32), None, t(3, 32), p, torch.tensor([1]), 0)
        except ValueError as error:
            messages.append(str(error))
    if messages != [f"bias_dropout_add: p = {p} drops nothing, so seed must be None" for p in (1e-12, 2e-12, 1e-12)]:
        return messages
    try:
        torch.ops.parallel_ops.bias_dropout_add(t(3, 32), None, t(3, 32), 3e-12, torch.tensor([1]), 0)
    except RuntimeError as error:
        return "ValueError: bias_dropout_add: p = 3e-12 drops nothing" in str(error) or str(error)
    return "no error"


def errors_hold_no_tensors(calls: Any) -> Any:
    """Once an error is handled, the tensors of the call are gone, without the garbage collector."""
    from parallel_ops.ops.bias_dropout_add import _forward

    gone = []
    gc.disable()
    for call in (_forward, torch.ops.parallel_ops.bias_dropout_add):
        x = t(3, 32)
        alive = weakref.ref(x)
        with contextlib.suppress(ValueError, RuntimeError):
            call(x, None, x, 1e-12, torch.tensor([1]), 0)
        del x
        gone.append(alive() is None)
    gc.enable()
    return gone == [True, True]


def too_large(calls: Any) -> Any:
    from parallel_ops.ops.bias_gelu import _forward

    x = torch.zeros(1, 64, dtype=torch.bfloat16).expand(2**38, 64)
    errors = []
    for _ in range(3):
        try:
            _forward(x, None, True)
        except RuntimeError as error:
            errors.append("allocate" in str(error))
    return errors == [True] * 3


def threads(calls: Any) -> Any:
    op = torch.ops.parallel_ops.bias_gelu
    wrong = []

    def work(offset: int) -> None:
        for i in range(60):
            x = t(2 + (i + offset) % 7, 96)
            if op(x, None, True).shape != x.shape:
                wrong.append(x.shape)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return not wrong
