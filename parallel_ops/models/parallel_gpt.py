"""The GPT of ``gpt.py`` over a group of tensor-parallel ranks, built from ``parallel_ops.layers``.

    tokens   [s, b], the same on every rank -> embedding, vocabulary split -> [s, b, h] or this rank's [s / P, b, h]
    layers   heads and hidden features of the MLP split; the residual stream whole, or split by tokens
    loss     vocabulary split again: the last linear and the cross entropy in one op, no rank has whole logits

Same parameters under the same names as ``GPT``. State dicts of the two, and of any number of ranks, load into each
other; in all of them the two halves of a SwiGLU projection stand as ``[2, ffn, h]``.
"""

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_ops.comm import copy_to_group, gather_from_group
from parallel_ops.comm._group import group_size
from parallel_ops.layers import (
    Norm,
    ParallelTransformerLayer,
    VocabParallelEmbedding,
    whole_gradients,
)
from parallel_ops.models.gpt import GPT, GPTConfig, check_tokens, rotary_angles
from parallel_ops.ops import bias_dropout_add
from parallel_ops.tensor_parallel import all_gather_linear, vocab_parallel_linear_cross_entropy
from parallel_ops.tensor_parallel._overlap_plan import Overlap


class ParallelGPT(nn.Module):
    """A GPT whose weights are shared by a group of ranks.

    Args:
        config: its shape; heads, ``ffn_width`` and the group must fit (see the layers).
        group: the tensor-parallel ranks; ``None`` for one.
        sequence_parallel: the residual stream is split by tokens, so ``s`` must divide evenly by the group's size.
        overlap: see ``all_gather_linear``.

    The same ``torch.manual_seed`` on every rank gives the weights of ``GPT(config)`` under that seed, and with dropout
    the same masks at any group size. Gradients of all parameters are complete after ``backward``.

    Raises:
        ValueError: sizes that do not fit the group.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        overlap: Overlap = "auto",
    ) -> None:
        super().__init__()
        # A reference model is small enough to be drawn whole; each rank keeps its parts.
        weights = GPT(config).state_dict()
        self.config, self.group = config, group
        self.sequence_parallel = sequence_parallel and group_size(group) > 1
        self.tokens = self._table()
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.seq_length, config.hidden) if learned else None
        self.layers = nn.ModuleList(
            ParallelTransformerLayer(
                config.hidden,
                config.heads,
                group=group,
                ffn_hidden=config.ffn_width,
                activation=config.activation,
                norm=config.norm,
                norm_eps=config.norm_eps,
                dropout=config.dropout,
                sequence_parallel=self.sequence_parallel,
                overlap=overlap,
            )
            for _ in range(config.layers)
        )
        self.norm = Norm(config.hidden, config.norm, config.norm_eps)
        self.head = self.tokens if config.tied_embeddings else self._table()
        self.overlap = overlap
        self.load_state_dict(weights)

    def _table(self) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(
            self.config.vocab_size,
            self.config.hidden,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
        )

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the mean loss where targets are given: arguments, result and errors as of ``GPT.forward``.

        Raises:
            ValueError: also where ``sequence_parallel`` cannot split the tokens evenly.

        Sharding: tokens, targets and the result replicated.
        """
        check_tokens(self.config, tokens, targets)
        s, size = tokens.shape[0], group_size(self.group)
        if self.sequence_parallel and s % size:
            raise ValueError(f"ParallelGPT: tokens must have a length that the {size} ranks can split evenly, got {s}")
        x, offset = self._embed(tokens)
        angles = None
        if self.positions is None:
            head = self.config.hidden // self.config.heads
            angles = rotary_angles(s, head, self.config.rotary_base, tokens.device)
        if self.config.dropout:
            nothing = x.new_zeros(()).expand(x.shape)
            p = self.config.dropout
            x = bias_dropout_add(x, None, nothing, p, training=self.training, index_offset=offset)
        for layer in self.layers:
            x = layer(x, angles)
        x = self.norm(x, *self._shared(self.norm.weight, self.norm.bias))
        if targets is None:
            return self._logits(x)
        return vocab_parallel_linear_cross_entropy(
            x, self.head.weight, targets, group=self.group, sequence_parallel=self.sequence_parallel
        )

    def _shared(self, *parameters: Tensor | None) -> list[Tensor | None]:
        """Parameters of the part that is split by tokens."""
        return whole_gradients(parameters, self.group) if self.sequence_parallel else list(parameters)

    def _embed(self, tokens: Tensor) -> tuple[Tensor, int]:
        """This rank's part of the embedded tokens, and the index of its first element in the whole."""
        x: Tensor = self.tokens(tokens)
        rows = x.shape[0]
        start = self.group.rank() * rows if self.group is not None and self.sequence_parallel else 0
        if self.positions is not None:
            (table,) = self._shared(self.positions.weight)
            assert table is not None
            x = x + table[start : start + rows, None]
        return x, start * x.shape[1:].numel()

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.head.weight
        if self.sequence_parallel:
            # A measured choice needs weights of one shape on all ranks.
            uneven = self.overlap == "auto" and len(set(self.head.sizes)) > 1
            logits = all_gather_linear(x, weight, group=self.group, overlap="bulk" if uneven else self.overlap)
        else:
            logits = nn.functional.linear(copy_to_group(x, self.group), weight)
        return gather_from_group(logits, self.group, dim=-1, sizes=self.head.sizes)
