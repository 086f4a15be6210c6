"""The configuration of a transformer."""

import math
import re
from dataclasses import dataclass

from parallel_ops.models.checked import Checked
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.models.latent import LatentAttentionConfig
from parallel_ops.models.rotary_scaling import DynamicScaling, RotaryScaling, YarnScaling

# Fields that can change between phases of training, or from a model's folder: weights stay what they are, but for the
# table of learned positions.
REPLACEABLE = (
    "seq_length", "rotary_base", "rotary_scaling", "window", "dropout", "attention_dropout", "init_std",
    "prediction_weight",
)  # fmt: skip

# As the planner takes, which walks over lists of them; so do files of other models, before tensors are counted.
MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Checked):
    """Shape of a causal pre-norm transformer; GPT-2, Llama, Qwen, Mistral, GPT-OSS and
    DeepSeek are configurations of it.

    Attributes:
        vocab_size, seq_length, num_layers, hidden_size, num_heads: positive. ``seq_length`` is the length of the
            longest sequence.
        num_kv_heads: key and value heads, divides ``num_heads``; ``None`` for ``num_heads``.
        head_dim: size of a head; ``None`` for ``hidden_size / num_heads``, which must be whole.
        ffn_hidden_size: width of the MLP after its activation; ``None`` for ``4 * hidden_size``.
        activation: ``"gelu"`` (tanh approximation), ``"gelu_exact"`` or ``"swiglu"`` (with a gate projection).
        norm: ``"layer_norm"`` or ``"rms_norm"`` (which has no bias). norm_eps: added to variance or mean square.
        qk_norm: RMS norms of the heads of queries and keys, before their rotation. qk_norm_over: ``"head"``, or
            ``"all_heads"`` for one norm of all heads together, as OLMoE has it.
        bias: whether the linear layers have biases; those of experts have their own field. attention_bias: the same
            for the linears of attention, ``None`` for ``bias``. qkv_bias: the same for queries, keys and values,
            ``None`` for ``attention_bias``.
        attention_sinks: every head has a learned logit that takes part in the softmax, without a value, as GPT-OSS has
            it (OpenAI, arXiv:2508.10925).
        positions: ``"learned"`` (an embedding) or ``"rotary"`` (half-rotated, over the whole head, whose size is
            even).
        rotary_base: wavelength of the slowest rotary pair, in 2 pi positions. rotary_scaling: of the
            frequencies, for sequences longer than those of pre-training; see ``rotary_scaling``.
        window: number of tokens that a token attends to at most, itself included: one value for all layers, or a tuple
            with one a layer; ``None`` for all earlier tokens.
        dropout: probability, on the embeddings and on each output projection; ``0 <= dropout < 1``.
        attention_dropout: probability, on the attention weights.
        tied_embeddings: the output layer shares the token embedding's weight.
        latent: latent attention in the place of separate keys and values; see ``LatentAttentionConfig``. ``None`` for
            none. ``num_kv_heads``, ``head_dim`` and norms of queries and keys are then left out.
        experts: layers with experts in the place of the MLP; see ``ExpertsConfig``. ``None`` for none.
        prediction_layers: layers behind the last that predict the tokens after the next, in training alone; see
            ``models.prediction``. prediction_weight: factor of the mean of their losses, which is added to the loss
            (DeepSeek-V3: 0.3 for its first 10T tokens, then 0.1).
        init_std: standard deviation of the initial weights; ``init_std / sqrt(2 num_layers)`` for output projections.

    Raises:
        ValueError: naming the field that is wrong.

    Examples:
        >>> from parallel_ops.models import TransformerConfig
        >>> llama = TransformerConfig(
        ...     vocab_size=1000, seq_length=128, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2,
        ...     ffn_hidden_size=176, activation="swiglu", norm="rms_norm", positions="rotary", bias=False,
        ... )
    """

    vocab_size: int
    seq_length: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_hidden_size: int | None = None
    activation: str = "gelu"
    norm: str = "layer_norm"
    norm_eps: float = 1e-5
    qk_norm: bool = False
    qk_norm_over: str = "head"
    bias: bool = True
    attention_bias: bool | None = None
    qkv_bias: bool | None = None
    attention_sinks: bool = False
    positions: str = "learned"
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    window: int | tuple[int | None, ...] | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tied_embeddings: bool = True
    latent: LatentAttentionConfig | None = None
    experts: ExpertsConfig | None = None
    prediction_layers: int = 0
    prediction_weight: float = 0.3
    init_std: float = 0.02

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.latent is not None:
            self._check_latent()
        if self.experts is not None:
            self._check_experts(self.experts)
        self._check_choices()

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "seq_length", "num_layers", "hidden_size", "num_heads"):
            self._check_count(name)
        for name in ("num_kv_heads", "head_dim", "ffn_hidden_size"):
            self._check_count(name, optional=True)
        if self.prediction_layers != 0:
            self._check_count("prediction_layers")
        if (layers := self.num_layers + self.prediction_layers) > MOST_LAYERS:
            self._fail(f"num_layers + prediction_layers must be at most {MOST_LAYERS:,}, got {layers:,}")
        if self.head_dim is None and self.latent is None and self.hidden_size % self.num_heads:
            self._fail(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_heads ({self.num_heads}) unless head_dim "
                "is given"
            )
        if self.num_heads % self.resolved_num_kv_heads:
            self._fail(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if isinstance(self.window, tuple) and len(self.window) != self.num_layers:
            self._fail(f"window must have a value for each of the {self.num_layers} layers, got {len(self.window)}")
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
                self._fail(f"window must be an int of at least 1, got {window!r}")
        if self.prediction_layers != 0 and self.experts is not None and self.experts.loss_over_model:
            self._fail("experts.aux_loss_over must be 'layer' with prediction_layers")
        if not 0 <= self.prediction_weight < math.inf:
            self._fail(f"prediction_weight must be at least 0 and finite, got {self.prediction_weight}")

    def _check_choices(self) -> None:
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                self._fail(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name, allowed in (
            ("activation", ("gelu", "gelu_exact", "swiglu")),
            ("positions", ("learned", "rotary")),
            ("norm", ("layer_norm", "rms_norm")),
            ("qk_norm_over", ("head", "all_heads")),
        ):
            self._check_choice(name, allowed)
        if self.positions == "rotary" and self.rotary_dim % 2:
            self._fail(f"rotary positions need an even head size, got {self.rotary_dim}")
        for name in ("rotary_base", "norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                self._fail(f"{name} must be positive, got {getattr(self, name)}")
        if self.rotary_scaling is not None and self.positions != "rotary":
            self._fail("rotary_scaling needs positions='rotary'")
        if isinstance(self.rotary_scaling, DynamicScaling) and self.rotary_dim < 4:
            self._fail(f"DynamicScaling needs a head size of at least 4, got {self.rotary_dim}")
        if isinstance(self.rotary_scaling, YarnScaling) and self.rotary_base <= 1:
            self._fail(f"rotary_base must be above 1 with YarnScaling, got {self.rotary_base}")

    def _check_latent(self) -> None:
        for name, value in (("num_kv_heads", self.num_kv_heads), ("head_dim", self.head_dim)):
            if value is not None:
                self._fail(f"{name} must be left out with latent attention, got {value}")
        if self.positions != "rotary" or self.resolved_attention_bias or self.resolved_qkv_bias or self.qk_norm:
            self._fail("latent attention needs positions='rotary', and neither biases nor qk_norm")
        if self.attention_sinks:
            self._fail("attention_sinks must be False with latent attention")

    def _check_experts(self, experts: ExpertsConfig) -> None:
        if experts.dense_layers >= self.num_layers:
            self._fail(f"experts.dense_layers must be below num_layers ({self.num_layers}), got {experts.dense_layers}")
        if self.activation != "swiglu" or self.bias:
            self._fail(
                "experts need activation='swiglu' and bias=False; attention_bias and experts.bias add biases to "
                "attention and to experts alone"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def all_layers(self) -> int:
        """Number of layers, those that predict further tokens included."""
        return self.num_layers + self.prediction_layers

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.resolved_head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def resolved_head_dim(self) -> int:
        """``head_dim``, or its default."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def resolved_num_kv_heads(self) -> int:
        """``num_kv_heads``, or its default."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def resolved_ffn_hidden_size(self) -> int:
        """``ffn_hidden_size``, or its default."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def resolved_attention_bias(self) -> bool:
        """``attention_bias``, or its default."""
        return self.bias if self.attention_bias is None else self.attention_bias

    @property
    def resolved_qkv_bias(self) -> bool:
        """``qkv_bias``, or its default."""
        return self.resolved_attention_bias if self.qkv_bias is None else self.qkv_bias

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.num_layers

    def window_size(self, number: int) -> tuple[int, int] | None:
        """The window of a layer as ``flash_attention`` counts it: ``(window - 1, 0)``."""
        window = self.windows[min(number, self.num_layers - 1)]
        return None if window is None else (window - 1, 0)


def plain_name(name: str) -> str:
    """``name`` of a module or parameter without the wrapper names of recomputation and ``torch.compile``."""
    return re.sub(r"(_checkpoint_wrapped_module|_orig_mod)(\.|$)", "", name).rstrip(".")
