"""Rotary positions and core attention, with the signatures of Transformers."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from parallel_ops.integrations.huggingface._fused import is_own, with_globals
from parallel_ops.integrations.huggingface._use import is_compiling, went_to_stock
from parallel_ops.ops import flash_attention, rotary_embedding_qk

# Which dimensions make a pair, and how tables lie.
PAIRS = ("half", "interleaved_by_half_tables", "interleaved", "half_by_single_tables")

# Options of some models and caches that only Transformers' own function supports.
_SPECIAL = ("softcap", "position_bias", "cache", "head_mask")


def attention(stock: type[nn.Module], pairs: str | None, core: str | None) -> dict[str, Any]:
    """The stock forward, calling this package for the rotary positions, by ``pairs``, the core attention, or both.

    Args:
        core: "sdpa", or "eager" for attention with sinks; ``None`` for stock's.
    """
    forward: Any = inspect.unwrap(stock.forward)
    home = sys.modules[forward.__module__]
    expected = {name: home.__dict__[name] for name in forward.__code__.co_names if name in home.__dict__}
    names: dict[str, Any] = {"apply_rotary_pos_emb": _rotation(home.apply_rotary_pos_emb, pairs)} if pairs else {}
    if core == "sdpa":
        names["ALL_ATTENTION_FUNCTIONS"] = _Functions(ALL_ATTENTION_FUNCTIONS)
    elif core == "eager":
        names["eager_attention_forward"] = with_sinks(home.eager_attention_forward)
    given = tuple(expected.items())

    def changed(module: Any) -> str | None:
        now = home.__dict__
        for name, value in given:
            if now[name] is not value:
                return f"{name} of {home.__name__} was replaced"
        return None

    def kept(module: Any) -> dict[str, str]:
        reason = obstacle(module.config._attn_implementation, core) if core else None
        return {} if reason is None else {"flash_attention": reason}

    return {"forward": with_globals(stock.forward, **names), "changed": changed, "kept": kept}


def tables(stock: type[nn.Module]) -> dict[str, Any]:
    """A rotary embedding whose tables are marked: the op reads only half of each, and tables of others may differ."""
    expected = stock.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock.forward(self, *args, **kwargs)
        if not is_compiling() and stock.forward is expected:
            for table in found:
                table._parallel_ops_tables = True
        return found

    return {"forward": forward}


def obstacle(implementation: str, replaced: str = "sdpa") -> str | None:
    """Why the core attention of a model that is set to ``implementation`` is kept."""
    if implementation != replaced:
        return f"the model is set to {implementation!r} attention; only {replaced!r} is replaced"
    functions: Any = ALL_ATTENTION_FUNCTIONS
    return None if replaced == "eager" or is_own(functions["sdpa"]) else "'sdpa' attention has been registered anew"


class _Functions:
    """The registry of attention functions, with Transformers' own "sdpa" replaced where it is looked up."""

    def __init__(self, registry: Any) -> None:
        self._registry, self._stock = registry, registry["sdpa"]
        self._core = with_core(self._stock)

    def __getitem__(self, name: str) -> Any:
        return self._replaced(self._registry[name])

    def get_interface(self, name: str, default: Any) -> Any:
        return self._replaced(self._registry.get_interface(name, default))

    def _replaced(self, function: Any) -> Any:
        return self._core if function is self._stock else function


def with_core(sdpa: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """``query`` ``[b, h, s, d]``, ``key`` and ``value`` with as many heads or fewer -> ``[b, s, h, d]``.

        On GPUs SDPA is kept: of the kernels that ``flash_attention`` would choose among, it takes the same.
        """
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        whole = causal and attention_mask is None and query.shape[2] == key.shape[2] > 1
        if whole and query.device.type == "cpu" and all(options.get(name) is None for name in _SPECIAL):
            out = flash_attention(query, key, value, softmax_scale=scaling, dropout_p=dropout, tensor_format="bhsd")
            return out.transpose(1, 2), None
        if module.training and query.device.type == "cpu":
            why = "got a mask" if attention_mask is not None else "was not causal over the whole sequence"
            went_to_stock(module, "flash_attention", why)
        if is_causal is not None:
            options["is_causal"] = is_causal
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)

    return forward


@functools.cache
def with_sinks(eager: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
        dropout: float = 0.0, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As ``with_core`` has it, with ``module.sinks`` ``[h]`` or ``None``, and within a sliding window."""
        window = options.get("sliding_window")
        attentions = options.get("output_attentions", getattr(module.config, "output_attentions", False))
        served = query.device.type == "cpu" and query.shape[2] == key.shape[2] > 1 and not is_compiling()
        if (
            served
            and not attentions
            and attention_mask is not None
            and _is_band(attention_mask, query.shape[2], window)
        ):
            out = flash_attention(
                query, key, value, softmax_scale=scaling, dropout_p=dropout, sink=module.sinks,
                window_size=None if window is None else (window - 1, 0), tensor_format="bhsd",
            )  # fmt: skip
            return out.transpose(1, 2), None
        if module.training and query.device.type == "cpu":
            went_to_stock(module, "flash_attention", "got a mask" if not attentions else "had to return its weights")
        found: tuple[Tensor, Tensor | None] = eager(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
        return found

    return forward


def _is_band(mask: Tensor, length: int, window: int | None) -> bool:
    """Whether an additive mask is causal, within a window if there is one, and nothing else.

    The layers of a model share their masks, so that the result is kept with the mask; not in ``torch.inference_mode``,
    where tensors do not count writes. Fake tensors, as in ``torch.export``, have no values to look at.
    """
    if type(mask) is not Tensor or not mask.is_floating_point():
        return False
    counts = not mask.is_inference()
    key = (length, window, mask._version if counts else None)
    if not counts or getattr(mask, "_parallel_ops_band", (None,))[0] != key:
        rows = torch.arange(length, device=mask.device)
        distance = rows[:, None] - rows
        seen = (distance >= 0) & (distance < (length if window is None else window))
        band = torch.zeros((), dtype=mask.dtype).masked_fill(~seen, torch.finfo(mask.dtype).min)
        same = mask.shape[-2:] == band.shape and torch.equal(mask, band.expand_as(mask))
        mask._parallel_ops_band = key, same  # type: ignore[attr-defined]
    return bool(mask._parallel_ops_band[1])  # type: ignore[attr-defined]


def _rotation(stock: Callable[..., Any], pairs: str) -> Callable[..., Any]:
    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        known = is_compiling() or (hasattr(cos, "_parallel_ops_tables") and hasattr(sin, "_parallel_ops_tables"))
        if args or options or not known:  # other dimensions, tables that somebody else has made or changed
            return stock(query, key, cos, sin, *args, **options)
        return rotated(query, key, cos, sin, pairs)

    return rotate


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> tuple[Tensor, Tensor]:
    """``query``, ``key`` ``[b, h, s, d]``; tables ``[b, s, r]`` or, for all sequences, ``[1, s, r]``."""
    if cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    half = pairs == "interleaved_by_half_tables"
    if half:
        cos, sin = (t[..., : t.shape[-1] // 2] for t in (cos, sin))
    doubled, interleaved = not half and pairs != "half_by_single_tables", not pairs.startswith("half")
    return rotary_embedding_qk(query, key, cos, sin, doubled=doubled, interleaved=interleaved, tensor_format="bhsd")
