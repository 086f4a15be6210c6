"""What a transformer is, by numbers and names alone."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slower rotary frequencies, for sequences longer than those of the first training (Llama 3.1).

    Pairs that turn less than ``low_frequency`` times within ``original_length`` positions turn ``factor`` times slower;
    those that turn more than ``high_frequency`` times stay; between the two, a linear mix by the number of turns.

    Raises:
        ValueError: naming the field that is wrong.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_length: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_frequency", "original_length"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Llama3Scaling: {name} must be positive, got {getattr(self, name)}")
        if not self.high_frequency > self.low_frequency:
            raise ValueError(
                f"Llama3Scaling: high_frequency ({self.high_frequency}) must be above low_frequency "
                f"({self.low_frequency})"
            )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shape of a causal transformer, norm first: GPT-2, Llama, Qwen and Mistral are values of it.

    Attributes:
        vocab_size, seq_length, layers, hidden, heads: positive. ``seq_length`` is that of the longest sequence.
        kv_heads: key and value heads, divides ``heads``; ``None`` for ``heads``.
        head_dim: size of a head; ``None`` for ``hidden / heads``, which must be whole.
        ffn_hidden: width of the MLP after its activation; ``None`` for ``4 * hidden``.
        activation: ``"gelu"`` (tanh approximation), ``"gelu_exact"`` or ``"swiglu"`` (with a gate projection).
        norm: ``"layer_norm"`` or ``"rms_norm"`` (which has no bias). norm_eps: added to variance or mean square.
        qk_norm: RMS norms of the heads of queries and keys, before their rotation.
        bias: biases of the linear layers. qkv_bias: of queries, keys and values; ``None`` for ``bias``.
        positions: ``"learned"`` (an embedding) or ``"rotary"`` (half-rotated, over the whole head, whose size is
            even).
        rotary_base: the wavelength of the slowest rotary pair, in 2 pi positions. rotary_scaling: see its class.
        window: how many tokens a token sees at most, itself included: in all layers, or one value a layer; ``None``
            for all earlier ones.
        dropout: probability, on the embeddings and on each output projection; ``0 <= dropout < 1``.
        attention_dropout: probability, on the attention weights.
        tied_embeddings: the output layer shares the token embedding's weight.
        init_std: standard deviation of the initial weights; output projections take ``init_std / sqrt(2 layers)``.

    Raises:
        ValueError: naming the field that is wrong.
    """

    vocab_size: int
    seq_length: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn_hidden: int | None = None
    activation: str = "gelu"
    norm: str = "layer_norm"
    norm_eps: float = 1e-5
    qk_norm: bool = False
    bias: bool = True
    qkv_bias: bool | None = None
    positions: str = "learned"
    rotary_base: float = 10_000.0
    rotary_scaling: Llama3Scaling | None = None
    window: int | tuple[int | None, ...] | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tied_embeddings: bool = True
    init_std: float = 0.02

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "seq_length", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden"):
            self._check_count(name, getattr(self, name), optional=name in ("kv_heads", "head_dim", "ffn_hidden"))
        if self.head_dim is None and self.hidden % self.heads:
            self._fail(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads}) where head_dim is not given")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            self._fail(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if isinstance(self.window, tuple) and len(self.window) != self.layers:
            self._fail(f"window must have a value for each of the {self.layers} layers, got {len(self.window)}")
        for window in self.windows:
            self._check_count("window", window, optional=True)

    def _check_choices(self) -> None:
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                self._fail(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name, allowed in (
            ("activation", ("gelu", "gelu_exact", "swiglu")),
            ("positions", ("learned", "rotary")),
            ("norm", ("layer_norm", "rms_norm")),
        ):
            if getattr(self, name) not in allowed:
                self._fail(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        if self.positions == "rotary" and self.head_size % 2:
            self._fail(f"rotary positions need an even head size, got {self.head_size}")
        for name in ("rotary_base", "norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                self._fail(f"{name} must be positive, got {getattr(self, name)}")
        if self.rotary_scaling is not None and self.positions != "rotary":
            self._fail("rotary_scaling needs positions='rotary'")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "TransformerConfig":
        """What the ``config.json`` of a Hugging Face folder says.

        Raises:
            FileNotFoundError: there is none. ValueError: an unknown family, or an option that we do not have.
        """
        from parallel_ops.models.huggingface.loading import read_config

        return read_config(Path(folder))[0]

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_width(self) -> int:
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.layers

    def _check_count(self, name: str, value: object, optional: bool) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._fail(f"{name} must be an int of at least 1, got {value!r}")

    def _fail(self, message: str) -> None:
        raise ValueError(f"TransformerConfig: {message}")


def plain_name(name: str) -> str:
    """The name of a module or parameter without those that recomputation and ``torch.compile`` put around it."""
    return re.sub(r"(_checkpoint_wrapped_module|_orig_mod)(\.|$)", "", name).rstrip(".")
