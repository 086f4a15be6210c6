"""The modules of a transformer: layers and tables of this rank's stages, their names, shapes and initial values."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops._internal.distributed.groups import GradReduce
from parallel_ops.context_parallel import SequenceLayout
from parallel_ops.layers import Norm, VocabParallelEmbedding
from parallel_ops.layers.core_attention import CoreAttention
from parallel_ops.models.config import plain_name
from parallel_ops.models.context import Context
from parallel_ops.models.huggingface import PretrainedModel
from parallel_ops.models.layers import layer_of, normal
from parallel_ops.models.lora_config import Lora
from parallel_ops.pipeline_parallel.cut import Stages
from parallel_ops.pipeline_parallel.loads import PipelineExpertLoads
from parallel_ops.tensor_parallel.linear.call import Overlap


class TransformerStructure(PretrainedModel):
    """The modules of ``Transformer``, which sets these attributes before ``_build``."""

    stages: Stages | None
    pp_rank: int
    context: Context
    overlap: Overlap
    grad_reduce: GradReduce
    sequence_parallel: bool
    ep_mesh: DeviceMesh | None
    lora: Lora | None
    _core_attention: CoreAttention | None

    def _build(self, dtype: torch.dtype | None) -> None:
        config = self.config
        # On the meta device, so that weights are initialised once, and not before a checkpoint replaces them.
        common: dict[str, Any] = {"tp_mesh": self.mesh, "device": "meta", "dtype": dtype}
        common["sequence_parallel"] = self.sequence_parallel

        def table(rows: int) -> VocabParallelEmbedding:
            return VocabParallelEmbedding(rows, config.hidden_size, init_method=normal(config.init_std), **common)

        first, last, held = self._held()
        tied, shared = config.tied_embeddings, config.tied_embeddings or config.prediction_layers
        self.tokens: VocabParallelEmbedding | None = table(config.vocab_size) if first or (last and shared) else None
        # Sharded like the vocabulary, so that its gradients are complete however the tokens are split.
        self.positions = table(config.seq_length) if first and config.positions == "learned" else None
        self.layers = nn.ModuleDict(
            {
                str(number): layer_of(
                    config, number, core_attention=self._core_attention, overlap=self.overlap,
                    grad_reduce=self.grad_reduce, ep_mesh=self.ep_mesh, cp_group=self.context.group, **common,
                )
                for number in range(config.all_layers)
                if (number in held if number < config.num_layers else last)
            }
        )  # fmt: skip
        self.norm: Norm | None = Norm(config.hidden_size, config.norm, config.norm_eps, **common) if last else None
        self.head = table(config.vocab_size) if last and not tied else None

    def _held(self) -> tuple[bool, bool, Sequence[int]]:
        """Whether this rank has the first and the last stage, and its layers."""
        if self.stages is None:
            return True, True, range(self.config.num_layers)
        own = self.stages.on(self.pp_rank)
        return 0 in own, self.stages.count - 1 in own, self.stages.layers_on(self.pp_rank)

    @property
    def draws(self) -> bool:
        """Training draws random numbers, for dropout."""
        rates = self.config.dropout, self.config.attention_dropout, 0.0 if self.lora is None else self.lora.dropout
        return any(rates)

    @property
    def block_names(self) -> list[str]:
        """The layers of the whole model."""
        return [f"layers.{number}" for number in range(self.config.all_layers)]

    def loads_of_model(self) -> PipelineExpertLoads | None:
        """For the pipeline of a model whose auxiliary loss is over all its layers; ``None`` for others."""
        experts = self.config.experts
        if self.stages is None or experts is None or not experts.loss_over_model:
            return None
        return PipelineExpertLoads(
            experts.num_experts, self.config.num_layers - experts.dense_layers, self.stages.count - 1
        )  # fmt: skip

    def stage_blocks(self, stage: int) -> list[nn.Module]:
        """The layers of a stage of this rank."""
        assert self.stages is not None
        further = self._further if stage == self.stages.count - 1 else ()
        return [self.layers[str(number)] for number in (*self.stages.layers[stage], *further)]

    @property
    def _further(self) -> range:
        """The layers that predict further tokens."""
        return range(self.config.num_layers, self.config.all_layers)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The table of tokens that the first and the last stage use, where this rank has it."""
        shared = self.config.tied_embeddings or self.config.prediction_layers
        return self.tokens.weight if shared and self.tokens is not None else None

    def stream_shape(self, s: int, b: int) -> tuple[int, int, int]:
        """The shape of the residual stream on this rank, of ``b`` sequences of ``s`` tokens."""
        rows = self.context.lengths(s)[self.context.rank]
        return (rows // self.ranks if self.sequence_parallel else rows), b, self.config.hidden_size

    def sequence_layout(self, s: int, cu_seqlens: Tensor | None = None, cp_ranks: int | None = None) -> SequenceLayout:
        """Which rank of ``context`` has which of ``s`` tokens; it orders logits, as ``join_sequence`` does.

        Args:
            cu_seqlens: as in ``forward``; the balanced layout depends on it. cp_ranks: as there.
        """
        return self.context.over(cp_ranks).layout(s, cu_seqlens)

    @torch.no_grad()
    def reset_parameters(self, only: type[nn.Module] = nn.Module) -> None:
        """Normal weights and sinks, zero biases, norms of one; a module's seed is made of its name and torch's seed.

        Args:
            only: The class of the modules that are initialised.
        """
        base = int(torch.randint(2**62, (), device="cpu"))
        state = torch.get_rng_state()
        for name, module in self.named_modules():
            if not module._parameters or not isinstance(module, only):
                continue
            key = hashlib.blake2b(f"{base} {plain_name(name)}".encode(), digest_size=7).digest()
            torch.default_generator.manual_seed(int.from_bytes(key, "little"))
            module.reset_parameters()  # type: ignore[operator]
            for own, parameter in module._parameters.items():
                if own.endswith("bias") and parameter is not None:
                    nn.init.zeros_(parameter)
        torch.set_rng_state(state)
