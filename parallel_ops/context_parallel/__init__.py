"""Attention over a sequence that the ranks of a group share.

The names are imported at first use, so that the planner can use ``cost`` without torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel_ops.context_parallel.algorithm import ring_attention_algorithm
    from parallel_ops.context_parallel.attention import ring_attention, ring_attention_reference
    from parallel_ops.context_parallel.cost import Algorithm, Link
    from parallel_ops.context_parallel.counts import AttentionShape
    from parallel_ops.context_parallel.layouts import SequenceLayout, join_sequence, split_sequence

__all__ = [
    "Algorithm",
    "AttentionShape",
    "Link",
    "SequenceLayout",
    "join_sequence",
    "ring_attention",
    "ring_attention_algorithm",
    "ring_attention_reference",
    "split_sequence",
]

_HOMES = {
    **dict.fromkeys(("Link", "Algorithm"), "cost"),
    "AttentionShape": "counts",
    **dict.fromkeys(("SequenceLayout", "join_sequence", "split_sequence"), "layouts"),
    **dict.fromkeys(("ring_attention", "ring_attention_reference"), "attention"),
    "ring_attention_algorithm": "algorithm",
}


if not TYPE_CHECKING:  # a type checker would take any name that it could not resolve yet from here

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
