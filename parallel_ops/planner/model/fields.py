"""The fields of ``Model`` and their checks."""

from dataclasses import dataclass

from parallel_ops.planner.checks import check_choice, check_counts, check_figures, check_flags, check_texts, unknown
from parallel_ops.planner.model.mixers import KINDS, CompressedAttention, LatentAttention, RecurrentMixer
from parallel_ops.planner.precision import FROZEN_BYTES

# Lists of layers are walked: a search of this many takes 20 s (two cores of an EPYC, 2026-11).
_MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class ModelFields:
    """Shape of a decoder-only transformer, GPT or Llama style, dense or mixture of experts.

    Attributes:
        num_layers, hidden_size, num_heads, vocab_size: positive.
        seq_length: tokens of one training sequence.
        num_kv_heads: groups of grouped-query attention; must divide ``num_heads``. 0 for ``num_heads``.
        head_dim: width of a head. 0 for ``hidden_size / num_heads``, which must then be an integer.
        ffn_hidden_size: width of the MLP after its activation; 0 for ``4 * hidden_size``.
        gated: SwiGLU, with a third matrix.
        bias: which linear layers have one: ``"all"``, ``"qkv"`` or ``"none"``.
        norm: ``"layer"`` (weight and bias) or ``"rms"`` (weight).
        positions: ``"learned"`` (a table of ``seq_length`` rows) or ``"rotary"``.
        tied_embeddings: input and output embedding are one matrix.
        dropout: dropout on attention and hidden activations. Its masks are kept for the backward pass.
        experts: routed experts of a mixture-of-experts layer; 0 for a dense model.
        experts_per_token: routed experts that each token uses.
        shared_experts: experts that every token uses.
        expert_ffn: width of each expert; 0 for ``ffn_hidden_size``.
        dense_layers: the first layers that have no experts.
        expert_nodes: the most nodes that a token is routed to; 0 for no limit.
        expert_imbalance: tokens of the fullest expert over the mean, of a micro-batch over the ranks that share the
            experts (MaxVio of arXiv:2408.15664, plus 1). 1: equally used.
        latent: latent attention in place of separate key and value projections.
        layers: kinds of consecutive layers (``mixers.KINDS``), repeated as often as the model has layers; empty for
            ``("window",)`` with a window, else ``("full",)``.
        window: keys that a query of a layer with a sliding window sees; 0 for all.
        recurrent, compressed: mixers of the layers of these kinds.
        attention_gate: the output of attention is multiplied by a gate, which the projection of the queries makes too.
        residual_streams: copies of the residual stream, which hyper-connections mix around every block
            (arXiv:2512.24880).
        documents: length of the packed document that the average token is in (the mean of squared lengths over the mean
            length), inside of which attention stays; 0 for whole sequences.
        lengths: lengths of documents and their numbers, with which ``documents`` are shared among ranks; none if only
            their mean is known.
        prediction_layers: layers of multi-token prediction behind the last (MTP, arXiv:2412.19437, section 2.2): each
            has attention over all keys, and an MLP or experts as the last layer has. The last stage computes them,
            and the loss once more for each; embedding and output embedding are the model's.
        loss_fraction: share of the tokens of documents that count in the loss; prompts, for one, do not. 1: all.
        padding: share of the tokens of sequences that are padding, without packing; they are computed like others.
        lora_rank: rank of adapters, which alone are trained (``memory/adapters.py``); 0 to train all parameters.
        frozen: format of frozen linears, ``"16bit"`` or ``"nf4"``.

    Raises:
        ValueError, TypeError: naming the field that is wrong.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    seq_length: int
    num_kv_heads: int = 0
    head_dim: int = 0
    ffn_hidden_size: int = 0
    gated: bool = False
    bias: str = "all"
    norm: str = "layer"
    positions: str = "learned"
    tied_embeddings: bool = True
    dropout: bool = True
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0
    expert_nodes: int = 0
    expert_imbalance: float = 1.0
    latent: LatentAttention | None = None
    layers: tuple[str, ...] = ()
    window: int = 0
    recurrent: RecurrentMixer | None = None
    compressed: CompressedAttention | None = None
    attention_gate: bool = False
    residual_streams: int = 1
    documents: float = 0.0
    lengths: tuple[tuple[int, int], ...] = ()
    prediction_layers: int = 0
    loss_fraction: float = 1.0
    padding: float = 0.0
    lora_rank: int = 0
    frozen: str = "16bit"

    def __post_init__(self) -> None:
        check_texts(self, ("name",))
        check_flags(self)
        check_counts(self, ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_length"))
        widths = ("num_kv_heads", "head_dim", "ffn_hidden_size", "expert_ffn")
        experts = ("experts", "experts_per_token", "shared_experts", "dense_layers", "expert_nodes")
        check_counts(self, (*widths, *experts, "window", "prediction_layers", "lora_rank"), at_least=0)
        check_counts(self, ("residual_streams",))
        check_figures(self, ("documents",), zero=True)
        check_figures(self, ("expert_imbalance", "loss_fraction"))
        check_figures(self, ("padding",), zero=True)
        if not isinstance(self.lengths, tuple):
            raise TypeError(f"Model: lengths are what --documents makes, not a key of files; got {self.lengths!r}")
        if self.loss_fraction > 1:
            raise ValueError(f"Model: loss_fraction must be at most 1, got {self.loss_fraction}")
        if self.padding >= 1:
            raise ValueError(f"Model: padding must be below 1, got {self.padding}")
        # At most, every token is one expert's.
        most = self.experts / self.experts_per_token if self.experts and self.experts_per_token else 1
        if not 1 <= self.expert_imbalance <= most:
            allowed = f"between 1 and experts / experts_per_token ({most:g})" if self.experts else "1 without experts"
            raise ValueError(f"Model: expert_imbalance must be {allowed}, got {self.expert_imbalance}")
        check_choice(self, "bias", ("all", "qkv", "none"))
        check_choice(self, "norm", ("layer", "rms"))
        check_choice(self, "positions", ("learned", "rotary"))
        check_choice(self, "frozen", tuple(FROZEN_BYTES))
        if self.frozen == "nf4" and not self.lora_rank:
            raise ValueError("Model: frozen=nf4 needs lora_rank: weights of 4 bits are not trained")
        if not self.head_dim and self.hidden_size % self.num_heads:
            raise ValueError(
                f"Model: hidden_size ({self.hidden_size}) must be a multiple of num_heads ({self.num_heads})"
            )
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_heads)
        object.__setattr__(self, "ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Model: num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.experts:
            object.__setattr__(self, "expert_ffn", self.expert_ffn or self.ffn_hidden_size)
            if not 1 <= self.experts_per_token <= self.experts:
                allowed = f"between 1 and experts ({self.experts})"
                raise ValueError(f"Model: experts_per_token must be {allowed}, got {self.experts_per_token}")
        elif self.experts_per_token or self.shared_experts or self.expert_ffn or self.dense_layers:
            raise ValueError("Model: experts_per_token, shared_experts, expert_ffn and dense_layers need experts")
        if self.prediction_layers and (self.compressed is not None or self.residual_streams > 1 or self.lora_rank):
            other = "compressed attention, residual_streams or lora_rank"
            raise ValueError(f"Model: prediction_layers must be 0 with {other}, got {self.prediction_layers}")
        self._check_layers()
        if self.dense_layers > self.num_layers:
            raise ValueError(
                f"Model: dense_layers must be at most num_layers ({self.num_layers}), got {self.dense_layers}"
            )

    def _check_layers(self) -> None:
        if (layers := self.num_layers + self.prediction_layers) > _MOST_LAYERS:
            raise ValueError(f"Model: num_layers + prediction_layers must be at most {_MOST_LAYERS:,}, got {layers:,}")
        if isinstance(self.layers, str):
            raise TypeError(f"Model: layers must be a list of kinds, got {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers) or (("window",) if self.window else ("full",)))
        for kind in self.layers:
            if kind not in KINDS:
                raise unknown("kind of Model.layers", str(kind), KINDS)
        if "mtp" in self.layers and not (self.prediction_layers and len(self.layers) == 1):
            raise ValueError("Model: layers must not have the kind mtp; prediction_layers is their number")
        mixers = {KINDS[kind][0] for kind in self.layers}
        if "recurrent" in mixers and self.recurrent is None:
            raise ValueError("Model: layers of the kind recurrent need the field recurrent")
        if mixers & {"csa", "hca"} and self.compressed is None:
            raise ValueError("Model: layers of the kinds csa and hca need the field compressed")
        if self.compressed is not None and (mixers - {"window", "csa", "hca"} or not self.window):
            raise ValueError("Model: a model with compressed has a window and layers of the kinds window, csa and hca")
