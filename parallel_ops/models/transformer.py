"""A causal transformer over tensor-parallel and context-parallel ranks, or on one.

    x      = E[token] (+ P[position], learned)              [s, b, h], or this rank's [s / P, b, h]
    x      = layer(x)                                       for each layer, see ``ParallelTransformerLayer``
    logits = W norm(x)                                      W = E when the embeddings are tied
    loss   = mean cross entropy of the logits               in one op with W: no rank has whole logits
    With ``prediction_layers`` the losses of further tokens are added in training; see ``prediction``.

Parameters are DTensors on the tensor-parallel mesh. Vocabulary, heads and hidden features of the MLP are sharded; with
``sequence_parallel`` the residual stream is sharded by tokens too. Context-parallel ranks have whole weights and a part
of the tokens of every sequence; only attention reads tokens of other ranks. Sources: Shoeybi et al., arXiv:1909.08053
(the split); Radford et al. 2019 (the initialisation); Su et al., arXiv:2104.09864 (rotary positions); Grattafiori et
al., arXiv:2407.21783 (their scaling).
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops._internal.distributed.groups import GradReduce
from parallel_ops._internal.dropout import seed_generators
from parallel_ops.comm import copy_to_group, gather_from_group
from parallel_ops.context_parallel import SequenceLayout
from parallel_ops.context_parallel.batch_layout import Heads
from parallel_ops.context_parallel.calls import AlgorithmName
from parallel_ops.context_parallel.layouts import LayoutChoice
from parallel_ops.expert_parallel import StageExpertLoad
from parallel_ops.layers import VocabParallelEmbedding
from parallel_ops.layers.attention import Angles
from parallel_ops.layers.core_attention import CoreAttention
from parallel_ops.models.auxiliary import auxiliary_losses, with_auxiliary
from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.context import IGNORE_INDEX, Context, SequenceShard
from parallel_ops.models.inputs import check_inputs
from parallel_ops.models.lora_config import Lora
from parallel_ops.models.prediction import further
from parallel_ops.models.rotary_scaling import rotary_angles, rotary_length
from parallel_ops.models.structure import TransformerStructure
from parallel_ops.ops import bias_dropout_add
from parallel_ops.pipeline_parallel.cut import Stages
from parallel_ops.tensor_parallel import all_gather_linear, vocab_parallel_linear_cross_entropy
from parallel_ops.tensor_parallel.linear.call import Overlap


class Transformer(TransformerStructure):
    """A causal language model.

    Args:
        config: sizes and options of the model.
        tp_mesh: the tensor-parallel ranks, a ``DeviceMesh`` of one dimension; ``None`` for one rank.
        sequence_parallel: shard the residual stream by tokens; ``s`` must be a multiple of the number of ranks.
        overlap: how the linears overlap communication: ``"auto"``, ``"off"``, ``"symmetric"`` or a number of chunks, as
            explained in ``all_gather_linear``.
        grad_reduce: how the linears add partial sums of the ranks: ``"fp32"`` (in rank order in fp32) or ``"backend"``
            (by the collectives of the group's backend, as Megatron-LM does), as explained there. Embeddings, norms,
            experts and the loss always have the exact sum.
        cp_mesh: the context-parallel ranks, which share each sequence: a ``DeviceMesh`` of one dimension
            (``mesh["cp"]``); ``None`` for one.
        cp_parts: groups of other sizes that calls may name by ``cp_ranks``; see ``ParallelMesh.parts``.
        cp_layout, algorithm: how ``context`` splits the sequence, and how its ranks exchange keys and values; see
            ``ring_attention``.
        core_attention: see ``parallel_ops.layers.core_attention``; ``None`` for ``flash``, or for ring attention with
            ``context``.
        ep_mesh: the ranks that share the experts (``mesh["ep"]``); ``None`` for one, or where each has them all.
            ``fully_shard`` of a layer shards them too; see ``parallel_ops.train.shard_experts``.
        stages, pp_rank: the pipeline stages of the model, and the pipeline rank whose stages this module has;
            ``None`` for the whole model. Layers and tables keep the names that they have in the whole model.
        device, dtype: of the parameters; ``None`` for torch's defaults. On the meta device nothing is initialised:
            call ``to_empty``, then ``reset_parameters`` or ``load_pretrained``.

    Attributes:
        tokens, positions (or ``None``), layers (by number, as a string), norm, head (or ``None`` where tied): those
            that the stages of a rank do not have are ``None``, or not in ``layers``. With tied embeddings, or layers
            that predict further tokens, the first and the last stage both have ``tokens``; on two ranks its gradients
            must be summed over the two.
        lora: the adapters that ``models.lora.add_adapters`` has added; ``None`` for none.

    Under torch.distributed.pipelining a stage is a module of its own: delete what it does not have. Without ``tokens``
    it takes the residual stream in place of tokens; without ``norm`` it returns it.

    Initialisation is independent of the mesh. Gradients of all parameters are complete after ``backward``, except over
    ``context``: there they must be averaged over the ranks, as ``fully_shard`` over ``mesh["fsdp"]`` and ``replicate``
    over ``mesh["loss"]`` do. Apply ``fully_shard`` to each of ``layers`` and then to the model, since ``head`` is used
    with the loss.

    Raises:
        ValueError: sizes that do not fit the mesh, ``core_attention`` together with ``cp_mesh``.

    Examples:
        >>> import torch
        >>> from parallel_ops.models import Transformer, TransformerConfig
        >>> config = TransformerConfig(vocab_size=97, seq_length=32, num_layers=2, hidden_size=64, num_heads=4)
        >>> model = Transformer(config)  # tp_mesh=ParallelMesh(tp=2)["tp"] under torchrun
        >>> text = torch.randint(97, (33, 2))  # [s, b]
        >>> model(text[:-1], text[1:]).shape  # the loss
        torch.Size([])
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        tp_mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        overlap: Overlap = "auto",
        grad_reduce: GradReduce = "fp32",
        cp_mesh: DeviceMesh | None = None,
        cp_layout: LayoutChoice = "zigzag",
        cp_parts: Mapping[int, ProcessGroup | None] | None = None,
        algorithm: AlgorithmName = "auto",
        core_attention: CoreAttention | None = None,
        ep_mesh: DeviceMesh | None = None,
        stages: Stages | None = None,
        pp_rank: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, tp_mesh)
        if stages is not None and sum(stages.sizes) != config.num_layers:
            raise ValueError(
                f"Transformer: stages must have num_layers ({config.num_layers}) layers in all, got {sum(stages.sizes)}"
            )
        self.stages, self.pp_rank = stages, pp_rank
        heads, kv_heads = (max(1, n // self.ranks) for n in (config.num_heads, config.resolved_num_kv_heads))
        per_rank = Heads(heads, kv_heads, config.resolved_head_dim)
        self.context = Context("Transformer", cp_mesh, cp_layout, algorithm, config.windows, cp_parts, per_rank)
        if core_attention is not None and self.context.core_attention is not None:
            raise ValueError("Transformer: core_attention must be None with cp_mesh, which uses ring_attention")
        self._core_attention = self.context.core_attention if core_attention is None else core_attention
        self.overlap, self.grad_reduce = overlap, grad_reduce
        self.sequence_parallel = sequence_parallel and self.ranks > 1
        self.ep_mesh = ep_mesh
        self.lora: Lora | None = None
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

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        layout: SequenceLayout | None = None,
        cp_ranks: int | None = None,
        stage: int | None = None,
        hidden_states: Tensor | None = None,
        dropout_seed: int | None = None,
        aux_scale: Tensor | float | None = None,
        aux_loads: StageExpertLoad | None = None,
    ) -> Tensor:
        """Logits, or the mean loss if targets are given.

        Args:
            tokens: ``[s, b]`` int64, ``1 <= s <= seq_length``; with positions of any length.
            targets: ``[s, b]`` int64, the token that follows each; -100 to ignore a token.
            positions: int64 ``[s]`` or ``[s, b]``, below ``seq_length``; ``None`` for 0 to s - 1. Attention is causal
                in the order of the tokens, whatever their positions.
            cu_seqlens: ``[documents + 1]``, int32 or int64, the starts of documents in the sequences, from 0 to ``s``.
                No token attends to another document. Positions do not restart.
            layout: what ``sequence_layout`` returned, if it was made ahead; ``None`` makes it here.
            cp_ranks: number of neighbours that share these sequences, of ``cp_parts``; ``None`` for ``cp_mesh``.
            stage: of a model with ``stages``, the one to compute; every stage is called with the same ``tokens``,
                ``targets``, ``positions``, ``cu_seqlens`` and ``layout``.
            hidden_states: what the stage before returned, of ``stream_shape``; ``None`` for the first.
            dropout_seed: seeds torch's default generators for the embeddings and for each layer, so that masks depend
                on this number and the layer alone; ``None`` leaves the generators as they are.
            aux_scale: factor of the gradients of the experts' auxiliary losses, which are then not in the result;
                needed for a model with ``stages``. ``None``: in training they are added to the loss.
            aux_loads: of a model with ``stages`` and an auxiliary loss over all layers, where the loads of the other
                stages come from; ``Pipeline`` gives it.

        Returns:
            The residual stream from a stage that is not the last. Otherwise logits ``[s, b, vocab_size]``, with
            ``context`` those of this rank's tokens; or the mean cross entropy in nats, 0 without any target, a float32
            scalar (float64 for a float64 model).

        Raises:
            ValueError: tokens not ``[s, b]``, longer than ``seq_length`` or not divisible by the ranks of
                ``sequence_parallel``; targets or positions of another shape.
            TypeError: ``cu_seqlens`` for a core attention that does not take it.

        Sharding: tokens, targets, positions and the loss replicated, over ``context`` too: each rank takes its tokens.
        """
        check_inputs(self, tokens, targets, positions, stage, hidden_states)
        context = self.context.over(cp_ranks)
        whole = self.tokens is not None or stage is not None
        place = context.place(tokens.shape[0], whole=whole, device=tokens.device, cu_seqlens=cu_seqlens, layout=layout)
        row_positions = place.positions
        length = rotary_length(self.config, positions, tokens.shape[0] if place.layout is None else place.layout.length)
        positions = place.shard(positions) if positions is not None else row_positions
        shards = place if whole else SequenceShard()  # of what every rank was given
        everyone, tokens = tokens, shards.shard(tokens)
        x = tokens if hidden_states is None else hidden_states
        if self.tokens is not None and hidden_states is None:
            self._seed(dropout_seed, "embeddings", tokens.device)
            x = self._embed(self.tokens, tokens, positions, row_positions)
        angles = None
        if self.config.positions == "rotary":
            angles, positions = self._angles(x, positions, length)
        options = place.core_options if cu_seqlens is None else {**place.core_options, "cu_seqlens": cu_seqlens}
        losses = auxiliary_losses(self, aux_scale, aux_loads)
        common: dict[str, Any] = {
            "positions": positions, "row_positions": row_positions, "core_options": options, "losses": losses
        }  # fmt: skip
        held = [n for n in map(int, self.layers) if n < self.config.num_layers]
        for number in held if self.stages is None or stage is None else self.stages.layers[stage]:
            self._seed(dropout_seed, str(number), tokens.device)
            x = self.layers[str(number)](x, angles, **common)
        if self.norm is None or (self.stages is not None and stage != self.stages.count - 1):
            return x
        x = self.norm(x)
        head = self.tokens if self.head is None else self.head
        if not isinstance(head, VocabParallelEmbedding):  # the loss reads its weight: a wrapper would have no effect
            raise TypeError(
                "Transformer: a stage with norm needs head, or tokens where the embeddings are tied, as a "
                f"VocabParallelEmbedding, got {type(head).__name__}"
            )
        if targets is None:
            return self._logits(x, head)
        loss = self._loss(context, x, head, targets, shards, targets)
        for k, number in enumerate(self._further if self.training else (), 1):
            assert self.tokens is not None
            ahead, later = further(everyone, targets, k, cu_seqlens)
            self._seed(dropout_seed, str(number), tokens.device)
            x = self.layers[str(number)](x, angles, embedding=self.tokens(shards.shard(ahead)), **common)
            weight = self.config.prediction_weight / self.config.prediction_layers
            loss = loss + weight * self._loss(context, x, head, later, shards, targets)
        return loss if losses is None or aux_scale is not None else with_auxiliary(self, loss, losses)

    def _loss(
        self, context: Context, x: Tensor, head: VocabParallelEmbedding, targets: Tensor, shards: SequenceShard,
        of: Tensor,
    ) -> Tensor:  # fmt: skip
        """The losses of ``targets``, of which ``shards`` has this rank's part, by the number of targets ``of``."""
        mean = context.ranks == 1 and of is targets
        loss = vocab_parallel_linear_cross_entropy(
            x, head.local_weight(), shards.shard(targets), group=self.group, sequence_parallel=self.sequence_parallel,
            reduction="mean" if mean else "sum",
        )  # fmt: skip
        return loss if mean else context.mean(loss, (of != IGNORE_INDEX).sum())

    def _seed(self, seed: int | None, part: str, device: torch.device) -> None:
        if seed is None or not self.training or not self.draws:
            return
        key = hashlib.blake2b(f"{seed} {part}".encode(), digest_size=7).digest()
        seed_generators(int.from_bytes(key, "little"), device)

    def _embed(
        self, table: VocabParallelEmbedding, tokens: Tensor, positions: Tensor | None, row_positions: Tensor | None
    ) -> Tensor:
        """Embeddings of tokens and learned positions, with dropout: whole, or this rank's rows."""
        x: Tensor = table(tokens)
        if self.positions is not None:
            rows = torch.arange(tokens.shape[0], device=tokens.device) if positions is None else positions
            x = x + self.positions(rows if rows.dim() == 2 else rows[:, None])
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

    def _angles(self, x: Tensor, positions: Tensor | None, length: Tensor | int) -> tuple[Angles, Tensor | None]:
        """Cosines and sines, and the row of each token in them; ``None`` if they are in the order of the tokens."""
        if positions is None:
            positions = torch.arange(x.shape[0] * (self.ranks if self.sequence_parallel else 1), device=x.device)
        if positions.dim() == 1:
            return rotary_angles(self.config, positions, length), None
        return rotary_angles(self.config, torch.arange(self.config.seq_length, device=x.device), length), positions

    def _logits(self, x: Tensor, head: VocabParallelEmbedding) -> Tensor:
        weight = head.local_weight()
        if self.sequence_parallel:
            # "auto" may measure, which needs weights of the same shape on every rank.
            uneven = self.overlap == "auto" and len(set(head.sizes)) > 1
            overlap: Overlap = "off" if uneven else self.overlap
            logits = all_gather_linear(x, weight, group=self.group, overlap=overlap, grad_reduce=self.grad_reduce)
        else:
            logits = F.linear(copy_to_group(x, self.group, grad_reduce=self.grad_reduce), weight)
        return gather_from_group(logits, self.group, dim=-1, sizes=head.sizes)
