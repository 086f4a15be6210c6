"""A causal transformer over tensor-parallel and context-parallel ranks, or on one.

    x      = E[token] (+ P[position], learned)              [s, b, h], or this rank's [s / P, b, h]
    x      = layer(x)                                       for each layer, see ``ParallelTransformerLayer``
    logits = W norm(x)                                      W = E when the embeddings are tied
    loss   = mean cross entropy of the logits               in one op with W: no rank has whole logits

Parameters are DTensors on the tensor-parallel mesh. Vocabulary, heads and hidden features of the MLP are sharded; with
``sequence_parallel`` the residual stream is sharded by tokens too. Context-parallel ranks have whole weights and a part
of the tokens of every sequence; only attention reads tokens of other ranks. Sources: Shoeybi et al., arXiv:1909.08053
(the split); Radford et al. 2019 (the initialisation); Su et al., arXiv:2104.09864 (rotary positions); Grattafiori et
al., arXiv:2407.21783 (their scaling).
"""

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops.comm import copy_to_group, gather_from_group
from parallel_ops.context_parallel.algorithm import AlgorithmName, Layout
from parallel_ops.layers import Norm, ParallelTransformerLayer, VocabParallelEmbedding
from parallel_ops.layers.attention import Angles
from parallel_ops.layers.core_attention import CoreAttention
from parallel_ops.models.config import TransformerConfig, plain_name
from parallel_ops.models.context import IGNORE_INDEX, Context
from parallel_ops.models.huggingface import PretrainedModel
from parallel_ops.ops import bias_dropout_add
from parallel_ops.tensor_parallel import all_gather_linear, vocab_parallel_linear_cross_entropy
from parallel_ops.tensor_parallel.linear.overlap_plan import Overlap


class Transformer(PretrainedModel):
    """A causal language model.

    Args:
        config: sizes and options of the model.
        mesh: the tensor-parallel ranks, a ``DeviceMesh`` of one dimension; ``None`` for one rank.
        sequence_parallel: shard the residual stream by tokens; ``s`` must be a multiple of the number of ranks.
        overlap: how the linears overlap communication: ``"auto"``, ``"off"``, ``"bulk"`` or a number of pieces, as
            explained in ``all_gather_linear``.
        context: the context-parallel ranks, which share each sequence: a ``DeviceMesh`` of one dimension
            (``mesh["cp"]``); ``None`` for one.
        layout, algorithm: how the sequence is split over ``context``, and how its ranks exchange keys and values; see
            ``ring_attention``.
        core_attention: see ``parallel_ops.layers.core_attention``; ``None`` for ``flash``, or for ring attention with
            ``context``.
        device, dtype: of the parameters; ``None`` for torch's defaults. On the meta device nothing is initialised:
            call ``to_empty``, then ``reset_parameters`` or ``load_pretrained``.

    Attributes:
        tokens, positions (or ``None``), layers (by number, as a string), norm, head (or ``None`` where tied): a
            pipeline stage sets those that it does not have to ``None``, or deletes them from ``layers``. A stage
            without ``tokens`` takes the residual stream in place of tokens; a stage without ``norm`` returns it.

    Initialisation is independent of the mesh. Gradients of all parameters are complete after ``backward``, except over
    ``context``: there they must be averaged over the ranks, as ``fully_shard`` over ``mesh["fsdp"]`` and ``replicate``
    over ``mesh["loss"]`` do. Apply ``fully_shard`` to each of ``layers`` and then to the model, since ``head`` is used
    with the loss.

    Raises:
        ValueError: sizes that do not fit the mesh, ``core_attention`` together with ``context``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        overlap: Overlap = "auto",
        context: DeviceMesh | None = None,
        layout: Layout = "zigzag",
        algorithm: AlgorithmName = "auto",
        core_attention: CoreAttention | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, mesh)
        self.context = Context("Transformer", context, layout, algorithm)
        if core_attention is not None and self.context.ranks > 1:
            raise ValueError("Transformer: core_attention must be None with context, which uses ring_attention")
        self._core_attention = self.context.core_attention if core_attention is None else core_attention
        self.overlap, self.sequence_parallel = overlap, sequence_parallel and self.ranks > 1
        with torch.random.fork_rng(devices=[]):  # on the meta device each parameter still takes a seed
            self._build(dtype)
        target = torch.device(torch.get_default_device() if device is None else device)
        if target.type != "meta":
            self.to_empty(device=target)
            self.reset_parameters()

    @staticmethod
    def global_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
        """The whole shape of each parameter of a model of this configuration, by name."""
        return {name: tuple(t.shape) for name, t in Transformer(config, device="meta").state_dict().items()}

    def _build(self, dtype: torch.dtype | None) -> None:
        config, overlap = self.config, self.overlap
        # On the meta device, so that weights are initialised once, and not before a checkpoint replaces them.
        common: dict[str, Any] = {"mesh": self.mesh, "device": "meta", "dtype": dtype}
        common["sequence_parallel"] = self.sequence_parallel

        def table(rows: int) -> VocabParallelEmbedding:
            return VocabParallelEmbedding(rows, config.hidden_size, init_method=_normal(config.init_std), **common)

        self.tokens: VocabParallelEmbedding | None = table(config.vocab_size)
        # Sharded like the vocabulary, so that its gradients are complete however the tokens are split.
        self.positions = table(config.seq_length) if config.positions == "learned" else None
        self.layers = nn.ModuleDict(
            {
                str(number): ParallelTransformerLayer(
                    config.hidden_size,
                    config.num_heads,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    ffn_hidden_size=config.resolved_ffn_hidden_size,
                    activation=config.activation,
                    norm=config.norm,
                    norm_eps=config.norm_eps,
                    qk_norm=config.qk_norm,
                    dropout=config.dropout,
                    attention_dropout=config.attention_dropout,
                    bias=config.bias,
                    qkv_bias=config.qkv_bias,
                    window=window,
                    core_attention=self._core_attention,
                    overlap=overlap,
                    init_method=_normal(config.init_std),
                    # Smaller, so that the residual sum keeps its scale (GPT-2).
                    output_init_method=_normal(config.init_std / math.sqrt(2 * config.num_layers)),
                    **common,
                )
                for number, window in enumerate(config.windows)
            }
        )
        self.norm: Norm | None = Norm(config.hidden_size, config.norm, config.norm_eps, **common)
        self.head = None if config.tied_embeddings else table(config.vocab_size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights, zero biases, norms of one. Each module's seed is made of its name and torch's seed."""
        base = int(torch.randint(2**62, ()))
        state = torch.get_rng_state()
        for name, module in self.named_modules():
            if not module._parameters:
                continue
            key = hashlib.blake2b(f"{base} {plain_name(name)}".encode(), digest_size=7).digest()
            torch.default_generator.manual_seed(int.from_bytes(key, "little"))
            module.reset_parameters()
            if module._parameters.get("bias") is not None:
                nn.init.zeros_(module._parameters["bias"])
        torch.set_rng_state(state)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Logits, or the mean loss if targets are given.

        Args:
            tokens: ``[s, b]`` int64, ``1 <= s <= seq_length``; with positions of any length.
            targets: ``[s, b]`` int64, the token that follows each; -100 to ignore a token.
            positions: int64 ``[s]`` or ``[s, b]``, below ``seq_length``; ``None`` for 0 to s - 1. Attention is causal
                in the order of the tokens, whatever their positions.
            cu_seqlens: ``[documents + 1]``, int32 or int64, the starts of documents in the sequences, from 0 to ``s``.
                No token attends to another document. Positions do not restart.

        Returns:
            Logits ``[s, b, vocab_size]``, with ``context`` those of this rank's tokens; or the mean cross entropy in
            nats, 0 without any target, a float32 scalar (float64 for a float64 model).

        Raises:
            ValueError: tokens not ``[s, b]``, longer than ``seq_length`` or not divisible by the ranks of
                ``sequence_parallel``; targets or positions of another shape.
            TypeError: ``cu_seqlens`` for a core attention that does not take it.

        Sharding: tokens, targets, positions and the loss replicated, over ``context`` too: each rank takes its tokens.
        """
        self._check(tokens, targets, positions)
        count = None if targets is None or self.context.ranks == 1 else (targets != IGNORE_INDEX).sum()
        place = self.context.place(tokens.shape[0], whole=self.tokens is not None, device=tokens.device)
        row_positions = place.positions
        positions = place.shard(positions) if positions is not None else row_positions
        if self.tokens is not None:
            tokens, targets = place.shard(tokens), None if targets is None else place.shard(targets)
        x = tokens if self.tokens is None else self._embed(self.tokens, tokens, positions, row_positions)
        angles = None
        if self.config.positions == "rotary":
            angles, positions = self._angles(x, positions)
        options = place.core_options if cu_seqlens is None else {**place.core_options, "cu_seqlens": cu_seqlens}
        for layer in self.layers.values():
            x = layer(x, angles, positions=positions, row_positions=row_positions, core_options=options)
        if self.norm is None:
            return x
        x = self.norm(x)
        head = self.tokens if self.head is None else self.head
        if head is None:
            raise ValueError("Transformer: a stage with norm needs head, or tokens where the embeddings are tied")
        if targets is None:
            return self._logits(x, head)
        loss = vocab_parallel_linear_cross_entropy(
            x, head.local_weight(), targets, group=self.group, sequence_parallel=self.sequence_parallel,
            reduction="mean" if count is None else "sum",
        )  # fmt: skip
        return loss if count is None else self.context.mean(loss, count)

    def _check(self, tokens: Tensor, targets: Tensor | None, positions: Tensor | None) -> None:
        if self.tokens is None:
            return
        shape, longest = list(tokens.shape), self.config.seq_length
        # With positions a row may hold several sequences.
        if tokens.dim() != 2 or not 1 <= shape[0] <= (longest if positions is None else shape[0]):
            raise ValueError(f"Transformer: tokens must have shape [s, b] with s from 1 to {longest}, got {shape}")
        if self.sequence_parallel and any(length % self.ranks for length in self.context.lengths(shape[0])):
            shares = f" in each of {self.context.ranks} shares" if self.context.ranks > 1 else ""
            raise ValueError(
                f"Transformer: tokens must have a length that the {self.ranks} ranks can split evenly{shares}, got "
                f"{shape[0]}"
            )
        if targets is not None and list(targets.shape) != shape:
            raise ValueError(f"Transformer: targets must have shape {shape}, got {list(targets.shape)}")
        if positions is not None and list(positions.shape) not in (shape, shape[:1]):
            raise ValueError(
                f"Transformer: positions must have shape {shape[:1]} or {shape}, got {list(positions.shape)}"
            )

    def _embed(
        self, table: VocabParallelEmbedding, tokens: Tensor, positions: Tensor | None, row_positions: Tensor | None
    ) -> Tensor:
        """Embeddings of tokens and learned positions, with dropout: whole, or this rank's rows."""
        x: Tensor = table(tokens)
        if self.positions is not None:
            rows = torch.arange(tokens.shape[0], device=tokens.device) if positions is None else positions
            x = x + self.positions(rows.view(tokens.shape[0], -1))
        if self.config.dropout:
            # Drawn by global index, so that the mask is independent of the number of ranks.
            first = self.group.rank() * x.shape[0] if self.group is not None and self.sequence_parallel else 0
            offset = first * x.shape[1:].numel() if row_positions is None else 0
            row_positions = None if row_positions is None else row_positions[first : first + x.shape[0]]
            x = bias_dropout_add(
                x, None, None, self.config.dropout, training=self.training, index_offset=offset,
                row_positions=row_positions,
            )  # fmt: skip
        return x

    def _angles(self, x: Tensor, positions: Tensor | None) -> tuple[Angles, Tensor | None]:
        """Cosines and sines, and the row of each token in them; ``None`` if they are in the order of the tokens."""
        if positions is None:
            positions = torch.arange(x.shape[0] * (self.ranks if self.sequence_parallel else 1), device=x.device)
        if positions.dim() == 1:
            return rotary_angles(self.config, positions), None
        return rotary_angles(self.config, torch.arange(self.config.seq_length, device=x.device)), positions

    def _logits(self, x: Tensor, head: VocabParallelEmbedding) -> Tensor:
        weight = head.local_weight()
        if self.sequence_parallel:
            # "auto" may measure, which needs weights of the same shape on every rank.
            uneven = self.overlap == "auto" and len(set(head.sizes)) > 1
            logits = all_gather_linear(x, weight, group=self.group, overlap="bulk" if uneven else self.overlap)
        else:
            logits = F.linear(copy_to_group(x, self.group), weight)
        return gather_from_group(logits, self.group, dim=-1, sizes=head.sizes)


def rotary_angles(config: TransformerConfig, positions: Tensor) -> Angles:
    """Cosines and sines of positions ``[n]``: ``[n, head_dim / 2]`` each, fp32."""
    size, scaling = config.resolved_head_dim, config.rotary_scaling
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    frequencies = 1.0 / config.rotary_base**exponents
    if scaling is not None:
        turns = scaling.original_length * frequencies / (2 * math.pi)
        share = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
        frequencies = torch.lerp(frequencies / scaling.factor, frequencies, share.clamp(0, 1))
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _normal(std: float) -> Callable[[Tensor], Tensor]:
    return functools.partial(nn.init.normal_, std=std)
