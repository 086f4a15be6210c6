"""The router of a mixture of experts: which experts each token goes to, with which weights, and its auxiliary losses.

    p        = softmax(x)                                    x = one token's logits, n of them
    s        = p, or sigmoid(x)
    chosen   = the k largest of s + bias                     in descending order, ties by lower index
    w_j      = scale * s_j / (sum over chosen of s + 1e-20)  without normalize: scale * s_j
    score_sums_e = sum over tokens of p_e                    with sigmoid: of s_e / sum of s
    z_sum    = sum over tokens of logsumexp(x)^2

With ``top_k_first`` the choice is by x + bias, and w the softmax of the chosen logits alone. With groups, a group's
score is the sum of its two best s + bias, and only experts of the best groups are chosen from.

    dx_i     = p_i (g_i - sum_f p_f g_f) + 2 logsumexp p_i dz_sum
    g_i      = dscore_sums_i + [i chosen] scale (dw_i - sum over chosen of dw w / scale) / (sum over chosen of s)

for softmax; with sigmoid, dx_i of the weights is s_i (1 - s_i) g_i. bias and the choice have no gradient. Saved for
backward: the logits and the chosen experts. Sources: softmax and auxiliary losses, Fedus et al., arXiv:2101.03961, and
Zoph et al., arXiv:2202.08906; bias and groups, DeepSeek-AI, arXiv:2412.19437; softmax of the chosen, OpenAI,
arXiv:2508.10925.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device
from parallel_ops._internal.dispatch.registration import register

# Added to sums that are divided by, so that rows whose scores are all zero are defined, as DeepSeek-V3 has it.
TINY = 1e-20


class Routing(NamedTuple):
    """What ``route`` returns, for ``t`` tokens, ``n`` experts and ``k`` choices.

    Attributes:
        weights: ``[t, k]`` fp32 (fp64 for fp64 logits): the weight of each chosen expert. Differentiable.
        experts: ``[t, k]`` int64: the chosen experts of each token, by descending choice score.
        load: ``[n]`` int32: how many tokens chose each expert.
        score_sums: ``[n]``, dtype of weights: each expert's probability, summed over tokens. Differentiable.
        z_sum: ``[]``, dtype of weights: logsumexp(logits)^2, summed over tokens. Differentiable.

    Examples:
        >>> import torch
        >>> from parallel_ops import route
        >>> route(torch.tensor([[0.0, 2.0, 1.0]]), top_k=2).experts
        tensor([[1, 2]])
    """

    weights: Tensor
    experts: Tensor
    load: Tensor
    score_sums: Tensor
    z_sum: Tensor


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    top_k_first: bool = False,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Chooses ``top_k`` experts for each token and weighs them; scores, choice, weights and sums fused.

    Args:
        logits: ``[t, n]``, float32, float16, bfloat16 or float64, any strides; computed in fp32 (fp64 for fp64), under
            autocast too.
        top_k: experts of a token.
        score: ``"softmax"`` over the experts, or ``"sigmoid"`` of each.
        bias: ``[n]``, fp32: added to the scores for the choice alone, as balancing without an auxiliary loss does. It
            gets no gradient.
        groups, top_groups: the experts are ``groups`` equal parts, of which the ``top_groups`` with the largest sums of
            two best choice scores stay, ties by lower index.
        top_k_first: choose by the logits (and bias), then take the softmax of the chosen ones alone, or the sigmoid of
            each.
        normalize: divide weights by their sum. The softmax of the chosen ones has sum 1 already.
        scale: factor of all weights, applied last.

    Returns:
        ``Routing``. A NaN counts as the largest score: its expert is chosen and has a NaN weight; with softmax or
        ``normalize`` all weights of the token are NaN. The experts chosen are always ``top_k`` different ones.

    Raises:
        TypeError: unsupported dtypes, options of wrong type. ValueError: wrong shapes or devices, an unknown score,
            ``groups`` that do not divide n, ``top_k`` below 1 or above the number of experts to choose from.

    Sharding: tokens are independent, so any shard of rows of logits gives those rows of weights and experts; load,
    score_sums and z_sum are then partial sums over the ranks. bias is replicated.

    Settings of public models: Mixtral, and Qwen3-MoE with norm_topk_prob: the defaults; OLMoE: ``normalize=False``;
    GPT-OSS: ``top_k_first=True``; DeepSeek-V3: ``score="sigmoid", bias=..., groups=8, top_groups=4, scale=2.5``.

    Examples:
        >>> import torch
        >>> from parallel_ops import route
        >>> routing = route(torch.tensor([[0.0, 2.0, 1.0]]), top_k=2)  # one token, three experts
        >>> routing.experts, routing.weights
        (tensor([[1, 2]]), tensor([[0.7311, 0.2689]]))
    """
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"route: score must be 'softmax' or 'sigmoid', got {score!r}")
    weights, score_sums, z_sum, experts, load = _forward.checked(
        lambda: _check(logits, top_k, bias, groups, top_groups, scale),
        logits, bias, top_k, score == "sigmoid", groups, top_groups, bool(top_k_first), bool(normalize), scale,
    )  # fmt: skip
    return Routing(weights, experts, load, score_sums, z_sum)


def route_reference(
    logits: Tensor,
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    top_k_first: bool = False,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """The same in plain PyTorch."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    n = x.shape[-1]
    probabilities = x.softmax(-1)
    scores = probabilities if score == "softmax" else x.sigmoid()
    choice = (x if top_k_first else scores).detach()
    if bias is not None:
        choice = choice + bias
    if top_groups < groups:
        grouped = choice.view(-1, groups, n // groups)
        of_groups = grouped.topk(min(2, n // groups), dim=-1).values.sum(-1)
        kept = _largest(of_groups, top_groups)
        mask = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, kept, False)
        choice = grouped.masked_fill(mask.unsqueeze(-1), -torch.inf).view(-1, n)
    experts = _largest(choice, top_k)
    if top_k_first and score == "softmax":
        weights = x.gather(1, experts).softmax(-1)
    else:
        weights = scores.gather(1, experts)
        if normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    if score == "sigmoid":
        probabilities = scores / (scores.sum(-1, keepdim=True) + TINY)
    chosen = experts.flatten()  # counted without bincount, for which the host would wait on a GPU
    load = torch.zeros(n, dtype=torch.int32, device=x.device).scatter_add_(0, chosen, torch.ones_like(chosen).int())
    return Routing(weights * scale, experts, load, probabilities.sum(0), x.logsumexp(-1).square().sum())


def load_balancing_loss(load: Tensor, score_sums: Tensor, tokens: int | Tensor, top_k: int) -> Tensor:
    """``n * sum over experts e of (load_e / tokens) * (score_sums_e / tokens)``: the auxiliary loss that balances load.

    As Transformers has it for Mixtral: load sums to ``top_k * tokens``, so perfect balance gives ``top_k``. Multiply by
    ``1 / top_k`` for the convention of the Switch Transformer (Fedus et al., arXiv:2101.03961).

    Args:
        load, score_sums: ``[n]``, of ``route``, or sums of several.
        tokens: what they were summed over: an int, or a tensor without a dimension.
        top_k: the choices of a token; only checked, since load has it in it.

    Returns:
        fp32 (fp64 for fp64 sums), without a dimension; differentiable in score_sums.

    Raises:
        TypeError, ValueError: dtypes and shapes that ``route`` does not return, tokens or top_k below 1.

    Sharding: the loss is a product of the two, so sum load, score_sums and tokens over the ranks first.

    Examples:
        >>> import torch
        >>> from parallel_ops import load_balancing_loss, route
        >>> routing = route(torch.zeros(8, 4), top_k=2)  # all experts are equally likely
        >>> load_balancing_loss(routing.load, routing.score_sums, tokens=8, top_k=2)
        tensor(2.)
    """
    check_floating("load_balancing_loss", "score_sums", score_sums)
    if not isinstance(load, Tensor):
        raise TypeError(f"load_balancing_loss: load must be a tensor, got {type(load).__name__}")
    if score_sums.dim() != 1 or load.shape != score_sums.shape:
        raise ValueError(
            f"load_balancing_loss: load and score_sums must have one shape [n], got {list(load.shape)} and "
            f"{list(score_sums.shape)}"
        )
    if (isinstance(tokens, int) and tokens < 1) or top_k < 1:
        raise ValueError(f"load_balancing_loss: tokens and top_k must be at least 1, got {tokens} and {top_k}")
    sums = score_sums.to(torch.promote_types(score_sums.dtype, torch.float32))
    return load.numel() * ((load.to(sums.dtype) / tokens) * (sums / tokens)).sum()


def _largest(scores: Tensor, k: int) -> Tensor:
    """The ``k`` largest of each row, by descending score, ties by lower index; NaN counts as infinity."""
    ordered = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return ordered.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def _check(logits: Tensor, top_k: int, bias: Tensor | None, groups: int, top_groups: int, scale: float) -> None:
    check_floating("route", "logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"route: logits must be [t, n] with at least one expert, got {list(logits.shape)}")
    for name, value in (("top_k", top_k), ("groups", groups), ("top_groups", top_groups)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"route: {name} must be an int, got {type(value).__name__}")
    if not isinstance(scale, (int, float)):
        raise TypeError(f"route: scale must be a number, got {type(scale).__name__}")
    n = logits.shape[1]
    if groups < 1 or n % groups:
        raise ValueError(f"route: groups must divide the {n} experts, got {groups}")
    if not 1 <= top_groups <= groups:
        raise ValueError(f"route: top_groups must be from 1 to groups, {groups}, got {top_groups}")
    allowed = n // groups * top_groups
    if not 1 <= top_k <= allowed:
        of = f"{n} experts" if top_groups == groups else f"{allowed} experts of the best {top_groups} groups"
        raise ValueError(f"route: top_k must be from 1 to {allowed}, the {of}, got {top_k}")
    if bias is not None:
        check_floating("route", "bias", bias)
        check_same_device("route", "bias", bias, "logits", logits)
        if bias.dim() != 1 or bias.shape[0] != n:
            raise ValueError(f"route: bias must be [{n}], one for each expert, got {list(bias.shape)}")


def outputs(
    logits: Tensor, bias: Tensor | None, top_k: int, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    t, n = logits.shape
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    return (
        logits.new_empty((t, top_k), dtype=dtype),
        logits.new_empty(n, dtype=dtype),
        logits.new_empty((), dtype=dtype),
        logits.new_empty((t, top_k), dtype=torch.int64),
        logits.new_empty(n, dtype=torch.int32),
    )


def backward_outputs(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


def launch(
    out: tuple[Tensor, ...], logits: Tensor, bias: Tensor | None, top_k: int, sigmoid: bool, groups: int,
    top_groups: int, top_k_first: bool, normalize: bool, scale: float,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels.experts import route as kernels

    kernels.forward(
        logits, bias, *out, sigmoid=sigmoid, groups=groups, top_groups=top_groups, top_k_first=top_k_first,
        normalize=normalize, scale=scale,
    )  # fmt: skip


def launch_backward(
    dlogits: Tensor, logits: Tensor, experts: Tensor, grad_weights: Tensor | None, grad_score_sums: Tensor | None,
    grad_z_sum: Tensor | None, sigmoid: bool, top_k_first: bool, normalize: bool, scale: float,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels.experts import route as kernels

    kernels.backward(
        logits, experts, grad_weights, grad_score_sums, grad_z_sum, dlogits,
        sigmoid=sigmoid, top_k_first=top_k_first, normalize=normalize, scale=scale,
    )  # fmt: skip


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, _, sigmoid, _, _, *options = inputs
    *_, experts, load = output
    ctx.options = (sigmoid, *options)
    ctx.mark_non_differentiable(experts, load)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, experts)


def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    dlogits = None
    if any(g is not None for g in grads[:3]):
        dlogits = _backward(*ctx.saved_tensors, *grads[:3], *ctx.options)
    return dlogits, *(None,) * 8


_backward = register("route_backward", outputs=backward_outputs, launch=launch_backward)
_forward = register("route", outputs=outputs, launch=launch, setup_context=setup_context, backward=backward)
