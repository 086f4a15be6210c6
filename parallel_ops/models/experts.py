"""The configuration of layers with experts."""

import math
from dataclasses import dataclass, replace

from parallel_ops.models.checked import Checked


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Checked):
    """A mixture of experts in the place of the MLP: Mixtral, Qwen3-MoE, OLMoE, GPT-OSS and
    DeepSeek are configurations of it.

    Attributes:
        num_experts: experts of a layer. top_k: experts that each token uses.
        ffn_hidden_size: width of an expert after its activation.
        shared_experts: experts that every token uses besides: one MLP of as many times the width.
        dense_layers: number of first layers that have an MLP instead.
        score: ``"softmax"`` or ``"sigmoid"`` of the router's logits.
        top_k_first: choose by the logits; the weights are then the softmax (sigmoid) of the chosen alone.
        normalize: divide the weights of a token by their sum. scale: of the weights, at the end.
        router_bias: the logits have a learned bias. bias: the linears of the experts have biases; not with
            ``shared_experts``.
        swiglu_alpha, swiglu_limit, swiglu_up_offset: the experts' SwiGLU is ``gate * sigmoid(swiglu_alpha * gate) *
            (up + swiglu_up_offset)``, of gates clamped to at most ``swiglu_limit`` and ``up`` clamped from both sides;
            GPT-OSS has 1.702, 7 and 1. The defaults are plain SwiGLU, which ``shared_experts`` and dense layers have.
        groups, top_groups: choose from the experts of the best ``top_groups`` of ``groups`` alone (DeepSeek-V3).
        selection_bias: a bias of the scores that only the choice sees. balance_rate: what it changes by in a step
            towards equal loads; 0 for never.
        aux_loss, z_loss: coefficients of the auxiliary losses. aux_loss_over: ``"layer"`` for their sum over the
            layers, or ``"model"`` for one of the mean load of all layers, as Hugging Face's models have it.
        capacity_factor: rows of an expert at most in training, relative to equal loads; further tokens are dropped.
            ``None`` for no limit.

    Raises:
        ValueError: naming the field that is wrong.

    Examples:
        >>> from parallel_ops.models import ExpertsConfig
        >>> mixtral = ExpertsConfig(num_experts=8, top_k=2, ffn_hidden_size=14336)
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_experts: int = 0
    dense_layers: int = 0
    score: str = "softmax"
    top_k_first: bool = False
    normalize: bool = True
    scale: float = 1.0
    router_bias: bool = False
    bias: bool = False
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None
    swiglu_up_offset: float = 0.0
    groups: int = 1
    top_groups: int = 1
    selection_bias: bool = False
    balance_rate: float = 0.0
    aux_loss: float = 0.0
    z_loss: float = 0.0
    aux_loss_over: str = "layer"
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("num_experts", 1), ("top_k", 1), ("ffn_hidden_size", 1), ("shared_experts", 0), ("dense_layers", 0),
            ("groups", 1), ("top_groups", 1),
        ):  # fmt: skip
            self._check_count(name, least)
        self._check_choice("score", ("softmax", "sigmoid"))
        self._check_choice("aux_loss_over", ("layer", "model"))
        if self.num_experts % self.groups:
            self._fail(f"num_experts ({self.num_experts}) must be a multiple of groups ({self.groups})")
        if self.top_groups > self.groups:
            self._fail(f"top_groups must be at most groups ({self.groups}), got {self.top_groups}")
        chosen_from = self.num_experts // self.groups * self.top_groups
        if self.top_k > chosen_from:
            self._fail(f"top_k must be at most {chosen_from}, the experts to choose from, got {self.top_k}")
        for name in ("aux_loss", "z_loss", "balance_rate"):
            if not getattr(self, name) >= 0:
                self._fail(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.balance_rate and not self.selection_bias:
            self._fail("balance_rate needs selection_bias=True")
        if not self.scale > 0:
            self._fail(f"scale must be positive, got {self.scale}")
        self._check_experts()
        if self.capacity_factor is not None and not self.capacity_factor >= 0:
            self._fail(f"capacity_factor must be at least 0, got {self.capacity_factor}")

    @property
    def loss_over_model(self) -> bool:
        """Whether there is one auxiliary loss, over all layers."""
        return self.aux_loss > 0 and self.aux_loss_over == "model"

    def _check_experts(self) -> None:
        """Checks the fields about the experts' own layers."""
        for name in ("swiglu_alpha", "swiglu_up_offset"):
            if not math.isfinite(getattr(self, name)):
                self._fail(f"{name} must be finite, got {getattr(self, name)}")
        if self.swiglu_limit is not None and not 0 < self.swiglu_limit < math.inf:
            self._fail(f"swiglu_limit must be positive and finite, or None for no limit, got {self.swiglu_limit}")
        changed = (self.swiglu_alpha, self.swiglu_limit, self.swiglu_up_offset) != (1.0, None, 0.0)
        if self.shared_experts and (self.bias or changed):
            self._fail("shared_experts must be 0 with bias or with options of SwiGLU, which shared experts do not have")

    def untrained(self) -> "ExpertsConfig":
        """Without the fields that concern training alone."""
        return replace(self, aux_loss=0.0, z_loss=0.0, balance_rate=0.0, aux_loss_over="layer", capacity_factor=None)
