"""Rotary positions and core attention, with the signatures of Transformers."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from parallel_ops.integrations.huggingface._fused import with_globals
from parallel_ops.integrations.huggingface._use import went_to_stock
from parallel_ops.ops import flash_attention, rotary_embedding_qk

# Options of some models and caches that only Transformers' own function supports.
_SPECIAL = ("softcap", "position_bias", "cache", "head_mask")


def attention(stock: type[nn.Module], pairs: str | None, core: bool) -> dict[str, Any]:
    """The stock forward, calling this package for the rotary positions, by ``pairs``, the core attention, or both."""
    names: dict[str, Any] = {}
    forward: Any = inspect.unwrap(stock.forward)
    if "apply_rotary_pos_emb" in forward.__globals__:
        home = sys.modules[forward.__module__]
        names["apply_rotary_pos_emb"] = _rotation(home, pairs) if pairs else _kept_rotation(home)
    if core:
        names["ALL_ATTENTION_FUNCTIONS"] = _interface()
    return {"forward": with_globals(stock.forward, **names)}


def obstacle(implementation: str) -> str | None:
    """Why the core attention of a model that is set to ``implementation`` is kept."""
    if implementation != "sdpa":
        return f"the model is set to {implementation!r} attention; only 'sdpa' is replaced"
    everything: Any = ALL_ATTENTION_FUNCTIONS
    if not everything["sdpa"].__module__.startswith("transformers."):
        return "'sdpa' attention has been registered anew"
    return None


def _interface() -> Any:
    """Transformers' attention functions with "sdpa" replaced in a copy, the documented way to override one."""
    everything: Any = ALL_ATTENTION_FUNCTIONS
    local = dict(everything) if isinstance(everything, dict) else type(everything)()
    local["sdpa"] = _with_core(everything["sdpa"])
    return local


def _with_core(sdpa: Callable[..., Any]) -> Callable[..., Any]:
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
            q, k, v = (t.permute(2, 0, 1, 3) for t in (query, key, value))
            return flash_attention(q, k, v, scale=scaling, dropout_p=dropout).transpose(0, 1), None
        if module.training and query.device.type == "cpu":
            why = "got a mask" if attention_mask is not None else "was not causal over the whole sequence"
            went_to_stock(module, "flash_attention", why)
        if is_causal is not None:
            options["is_causal"] = is_causal
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)

    return forward


def _kept_rotation(home: Any) -> Callable[..., Any]:
    """The function of the module ``home``, looked up at each call, since it may be replaced there later."""

    def rotate(*args: Any, **options: Any) -> Any:
        return home.apply_rotary_pos_emb(*args, **options)

    return rotate


def _rotation(home: Any, pairs: str) -> Callable[..., Any]:
    interleaved = pairs != "half"
    by_half_tables = pairs == "interleaved_by_half_tables"

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        """``query``, ``key`` ``[b, h, s, d]``; tables ``[b, s, r]`` or, for all sequences, ``[1, s, r]``."""
        if args or options:  # other dimensions
            return home.apply_rotary_pos_emb(query, key, cos, sin, *args, **options)
        if cos.shape[0] == 1:
            cos, sin = cos[0], sin[0]
        if by_half_tables:
            cos, sin = (t[..., : t.shape[-1] // 2] for t in (cos, sin))
        return rotary_embedding_qk(
            query, key, cos, sin, doubled=not by_half_tables, interleaved=interleaved, layout="bhsd"
        )

    return rotate
