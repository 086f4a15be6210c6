"""Core attention over this rank's heads, its options and its dropout: shared by the attention layers."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops._internal.distributed.groups import group_rank
from parallel_ops.layers.core_attention import CoreAttention, flash
from parallel_ops.layers.parameters import ShardedModule, ensure_divisible


class AttentionHeads(ShardedModule):
    """A module whose ``num_heads`` query heads are sharded over ``mesh``, with a core attention.

    Args:
        causal, window_size, core_attention, attention_dropout: see ``ParallelSelfAttention``.

    Raises:
        ValueError: heads that the mesh does not divide, a window that is not causal, a dropout outside of 0 to 1.
    """

    def __init__(
        self,
        num_heads: int,
        tp_mesh: DeviceMesh | None,
        *,
        causal: bool,
        window_size: tuple[int, int] | None,
        core_attention: CoreAttention | None,
        attention_dropout: float,
    ) -> None:
        super().__init__(tp_mesh)
        self._op = type(self).__name__
        if window_size is not None and (not causal or window_size[0] < -1):
            raise ValueError(
                f"{self._op}: window_size must be (left, 0) with left of at least 0, or -1 for no limit, and needs "
                f"causal=True, got {window_size}"
            )
        if not 0.0 <= attention_dropout < 1.0:
            raise ValueError(f"{self._op}: attention_dropout must be from 0 to below 1, got {attention_dropout}")
        self.local_heads = ensure_divisible(self._op, "num_heads", num_heads, self.ranks)
        self.causal, self.window_size, self.attention_dropout = causal, window_size, attention_dropout
        self.core_attention: CoreAttention = flash if core_attention is None else core_attention
        self._core_takes = frozenset(inspect.signature(self.core_attention).parameters)

    def _options_of(self, options: Mapping[str, Any] | None, mask: Tensor | None) -> dict[str, Any]:
        """Further keywords of the core attention. Raises a ``TypeError`` if it does not take one of them."""
        given = dict(options or {}) if mask is None else {**(options or {}), "mask": mask}
        for name in given:
            if name not in self._core_takes:
                raise TypeError(
                    f"{self._op}: {name} must be None for this core_attention, which does not take one"
                    + ("; give the layer core_attention=parallel_ops.layers.core_attention.unfused and causal=False")
                    * (name == "mask")
                )
        return given

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, given: dict[str, Any]) -> Tensor:
        """The core attention of this rank's heads ``[s, b, heads, d]``, as ``[s, b, heads * d_v]``."""
        dropout_p = self.attention_dropout if self.training else 0.0
        if dropout_p and "first_head" in self._core_takes:
            given["first_head"] = self.local_heads * group_rank(self.group)
        causal, window_size = self.causal, self.window_size
        if given.get("key_ranges") is not None:  # they say what is seen later than a token; a window cuts them before
            causal, window_size = False, None if window_size is None else (window_size[0], -1)
        y = self.core_attention(
            q, k, v, causal=causal, softmax_scale=scale, window_size=window_size, dropout_p=dropout_p, **given
        )  # fmt: skip
        return y.flatten(2)
