"""scaled_masked_softmax: the softmax kernels with a mask read by broadcast strides, whatever its shape."""

from torch import Tensor

from parallel_ops.triton_kernels.softmaxes import launchers as _softmax

# Runs of leading dimensions over which a mask's rows are evenly spaced; [b, 1, sq, sk] over [b, np, sq, sk] has three.
MAX_RUNS = 3


def mask_runs(mask: Tensor, scores: Tensor) -> list[tuple[int, int]]:
    """The leading dimensions of ``scores`` as (size, stride in the mask), stride 0 where broadcast, merged if even."""
    missing = scores.dim() - mask.dim()
    runs: list[tuple[int, int]] = []
    for dim, size in enumerate(scores.shape[:-1]):
        if size == 1:
            continue
        stride = 0 if dim < missing or mask.shape[dim - missing] == 1 else mask.stride(dim - missing)
        if runs and runs[-1][1] == stride * size:
            runs[-1] = runs[-1][0] * size, stride
        else:
            runs.append((size, stride))
    return runs


def forward(
    scores: Tensor, mask: Tensor | None, sink: Tensor | None, y: Tensor, share: Tensor, *, scale: float
) -> None:
    """``y = softmax(scale * scores)`` over the last dimension under ``mask``; ``y`` is contiguous.

    ``share`` gets each row's probability of ``sink``, where there is one.
    """
    if scores.numel() == 0:
        return
    if mask is None:
        _softmax.launch_forward(scores, None, _softmax.NO_MASK, sink, y, share, scale, kind="none", causal=False)
        return
    runs = mask_runs(mask, scores)
    if len(runs) > MAX_RUNS:  # six dimensions or more, broadcast in turns: one launch for each index of the first
        whole = mask.dim() < scores.dim() or mask.shape[0] == 1
        part = mask if mask.dim() < scores.dim() else mask[0]
        shares = share.view(scores.shape[0], -1) if sink is not None else [share] * scores.shape[0]
        for i in range(scores.shape[0]):
            forward(scores[i], part if whole else mask[i], sink, y[i], shares[i], scale=scale)
        return
    (_, stride_0), (size_1, stride_1), (size_2, stride_2) = [(1, 0)] * (MAX_RUNS - len(runs)) + runs
    col_stride = 0 if mask.dim() == 0 or mask.shape[-1] == 1 else mask.stride(-1)
    layout = (size_1, size_2, stride_0, stride_1, stride_2, col_stride)
    kind = "additive" if mask.is_floating_point() else "bool"
    _softmax.launch_forward(scores, mask, layout, sink, y, share, scale, kind=kind, causal=False)


def backward(
    grad: Tensor, y: Tensor, share: Tensor | None, dx: Tensor, sink_grad: Tensor | None, *, scale: float
) -> None:
    """``dx`` of the scores, and each row's gradient of its sink."""
    _softmax.launch_backward(grad, y, share, dx, sink_grad, scale, causal=False)
