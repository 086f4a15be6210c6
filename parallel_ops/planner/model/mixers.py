"""Kinds of layers: what mixes the tokens of a sequence, and whether an MLP follows.

    full               attention over all keys (``Model.latent``: latent attention)
    window             attention over ``Model.window`` keys
    recurrent          Mamba-2 or gated DeltaNet (``Model.recurrent``)
    csa, hca           compressed sparse and heavily compressed attention (``Model.compressed``), beside a window
    mlp_only           an MLP without a mixer; full_only, recurrent_only: a mixer without an MLP
    mtp                a layer of multi-token prediction (``Model.prediction_layers``): two norms and a projection of
                       hidden vector and embedding, attention over all keys, an MLP, a norm

A model with ``compressed`` has its projections in layers of the kind ``window`` too.
"""

from dataclasses import dataclass
from typing import NamedTuple

from parallel_ops.planner.checks import check_choice, check_counts

# Mixer, and whether an MLP follows, by kind.
KINDS: dict[str, tuple[str, bool]] = {
    "full": ("full", True),
    "window": ("window", True),
    "recurrent": ("recurrent", True),
    "csa": ("csa", True),
    "hca": ("hca", True),
    "full_only": ("full", False),
    "recurrent_only": ("recurrent", False),
    "mlp_only": ("", True),
    "mtp": ("full", True),
}
ATTENTION = ("full", "window")


class Linear(NamedTuple):
    """A linear of a mixer: widths, number of them, and what tensor parallelism splits: ``"inputs"``, ``"outputs"``,
    ``"number"`` or nothing (``""``)."""

    inputs: int
    outputs: int
    number: int = 1
    split: str = "outputs"


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: queries and keys/values pass through low-rank projections (arXiv:2405.04434).

    Attributes:
        query_rank, key_value_rank: widths of the two compressed vectors; no query rank (0) for queries made of the
            hidden vector.
        head: width of the part of a head without position.
        rope_head: width of the rotary part of a head; all key heads share it.
        value_head: width of a value head.
    """

    query_rank: int
    key_value_rank: int
    head: int
    rope_head: int
    value_head: int

    def __post_init__(self) -> None:
        check_counts(self, ("query_rank",), at_least=0)
        check_counts(self, ("key_value_rank", "head", "rope_head", "value_head"))


@dataclass(frozen=True, kw_only=True)
class RecurrentMixer:
    """Mamba-2 (arXiv:2405.21060) or gated DeltaNet (arXiv:2412.06464), computed in chunks of the sequence.

    A head keeps a state of ``head x state``. In a chunk of c tokens, with p = head, n = state and per token:

        Mamba-2    scores 2 c n a group; with values 2 c p, into and out of the state 4 n p a head   section 6
        DeltaNet   three matmuls of keys 6 c n, two of values 4 c p, three with the state 6 n p, the inverse of a
                   triangular matrix c^2 a head                                             arXiv:2406.06484, section 3

    Attributes:
        kind: ``"mamba2"`` or ``"delta_net"``.
        heads, head: number and width of the heads of values.
        groups, state: number and width of the heads of keys and queries (of B and C in Mamba-2).
        conv: taps of the causal convolution before the recurrence.
        chunk: tokens of a chunk.
    """

    kind: str
    heads: int
    head: int
    groups: int
    state: int
    conv: int = 4
    chunk: int = 64

    def __post_init__(self) -> None:
        check_choice(self, "kind", ("mamba2", "delta_net"))
        check_counts(self, ("heads", "head", "groups", "state", "conv", "chunk"))
        if self.heads % self.groups:
            raise ValueError(f"RecurrentMixer: heads ({self.heads}) must be a multiple of groups ({self.groups})")

    @property
    def inner(self) -> int:
        """Width of the values of all heads."""
        return self.heads * self.head

    @property
    def channels(self) -> int:
        """Width of the convolution: values, and keys and queries of all groups."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Width of the input projection: the channels, a gate as wide as the values, one or two numbers a head."""
        return self.channels + self.inner + self.heads * (1 if self.kind == "mamba2" else 2)

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        """The projections of the mixer in a model of width ``hidden``."""
        return Linear(hidden, self.projected), Linear(self.inner, hidden, split="inputs")

    @property
    def small_parameters(self) -> int:
        """Parameters outside the linears: convolution, decays and steps of the heads, norm of the output."""
        if self.kind == "mamba2":
            return self.channels * (self.conv + 1) + 3 * self.heads + self.inner
        return self.channels * self.conv + 2 * self.heads + self.head

    @property
    def flops(self) -> int:
        """Forward FLOPs of the recurrence, per token."""
        c, n, p = self.chunk, self.state, self.head
        if self.kind == "mamba2":
            return 2 * c * n * self.groups + self.heads * (2 * c * p + 4 * n * p)
        return self.heads * (6 * c * n + 4 * c * p + 6 * n * p + c * c)

    @property
    def kept(self) -> int:
        """Elements per token that the backward pass needs beside the input of the output projection: the projections,
        the channels after the convolution, the output of the recurrence before its gate. States are computed again."""
        return self.projected + self.channels + self.inner

    @property
    def moved(self) -> int:
        """Elements per token that a forward pass reads and writes outside of the linears: convolution, recurrence with
        the states at the ends of the chunks (fp32, written and read), gated norm."""
        return 3 * self.channels + self.inner + 4 * self.inner * self.state // self.chunk + 3 * self.inner


@dataclass(frozen=True, kw_only=True)
class CompressedAttention:
    """Attention of DeepSeek-V4 (arXiv:2606.19348): all queries share one head that is key and value, a window of recent
    tokens, and entries that stand for several tokens each.

    Attributes:
        query_rank: width of the compressed query vector.
        output_groups, output_rank: groups of heads that are projected by themselves, and to which width each.
        ratio, heavy_ratio: tokens of an entry in layers of the kind ``csa`` and ``hca``.
        top_k: entries that a query of a ``csa`` layer sees, chosen by the indexer.
        index_heads, index_head: number and width of the indexer's heads.
    """

    query_rank: int
    output_groups: int
    output_rank: int
    top_k: int
    index_heads: int
    index_head: int
    ratio: int = 4
    heavy_ratio: int = 128

    def __post_init__(self) -> None:
        check_counts(self, self.__dataclass_fields__)

    def linears(self, mixer: str, hidden: int, heads: int, head: int) -> tuple[Linear, ...]:
        """The projections of a layer with ``mixer`` in a model of width ``hidden`` with ``heads`` of width ``head``."""
        # Keys and weights of the compressor, two series of each where entries overlap.
        whole = self.query_rank + head + {"window": 0, "csa": 4 * head, "hca": 2 * head}[mixer]
        indexer: tuple[Linear, ...] = ()
        if mixer == "csa":
            whole += 4 * self.index_head + self.index_heads
            indexer = (Linear(self.query_rank, self.index_heads * self.index_head, split=""),)
        return (
            Linear(hidden, whole, split=""),
            Linear(self.query_rank, heads * head),
            *indexer,
            Linear(heads * head // self.output_groups, self.output_rank, self.output_groups, "number"),
            Linear(self.output_groups * self.output_rank, hidden, split="inputs"),
        )

    def small_parameters(self, mixer: str, heads: int, head: int) -> int:
        """Parameters outside the linears: norms, sinks, positions inside an entry."""
        found = self.query_rank + head + heads
        if mixer == "csa":
            found += head + self.ratio * 2 * head + self.index_head + self.ratio * 2 * self.index_head
        return found + (head + self.heavy_ratio * head if mixer == "hca" else 0)

    def seen(self, mixer: str, keys: float, window: int) -> float:
        """Keys that a query sees, on average over a sequence of ``keys`` tokens: of the window, and entries."""
        found = window - window**2 / (2 * keys) if keys > window else keys / 2
        if mixer == "csa":
            most = min(self.top_k, keys / self.ratio)
            found += most - most**2 * self.ratio / (2 * keys)
        return found + (keys / (2 * self.heavy_ratio) if mixer == "hca" else 0.0)

    def flops(self, mixer: str, keys: float, window: int, width: int) -> float:
        """Forward FLOPs of scores and values over heads of ``width`` together, and of the indexer, per token."""
        found = 4 * self.seen(mixer, keys, window) * width
        scores = 2 * self.index_heads * self.index_head * keys / (2 * self.ratio)
        return found + (scores if mixer == "csa" else 0.0)
