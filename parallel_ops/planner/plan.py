"""A parallel training strategy: sizes of parallelism, schedule, recomputation and offload."""

import itertools
from dataclasses import dataclass, fields
from typing import Any

from parallel_ops.planner.checks import check_choice, check_counts, check_figures, check_flags
from parallel_ops.planner.field_text import parse_fields
from parallel_ops.planner.memory.recomputation import KINDS, check_recompute
from parallel_ops.planner.precision import DTYPES, stored

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe-v")
# Two chunks of layers per rank, the second in reverse order of the ranks, so that rank 0 holds both ends of the model.
V_SHAPED = ("zb-v", "dualpipe-v")
# Recomputation and offload that a search tries by default.
RECOMPUTE = KINDS[:3]
OFFLOAD = ("none", "optimizer", "optimizer+activations")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One parallel training strategy on ``dp * tp * pp * cp`` GPUs.

    Ranks are ordered as in Megatron-LM: tensor-parallel ranks are adjacent, then context, data and pipeline.

    Attributes:
        dp, tp, pp, cp: sizes of data, tensor, pipeline and context parallelism.
        dp_replicate: replicas of the shards (hybrid sharding, HSDP); divides ``dp``. ``zero`` shards over the
            ``dp_shard = dp / dp_replicate`` ranks of a replica.
        ep: size of expert parallelism; divides ``dp_shard * cp * tp / expert_tp``.
        expert_tp: size of tensor parallelism inside experts; divides ``tp``, 0 for ``tp``. With 1, experts are spread
            over the tensor-parallel ranks too, and each of these routes its own part of the tokens.
        zero: ZeRO stage, sharded over ``dp_shard * cp`` ranks: 0 nothing, 1 optimizer, 2 also gradients, 3 also
            parameters.
        fsdp: shards as PyTorch's FSDP2 keeps them, in fp32 and cast when gathered. If False, ZeRO-3 keeps 16-bit shards
            beside the master weights, as DeepSpeed and Megatron-LM do.
        gather_parameters: ZeRO-3 gathers parameters one by one and keeps them up to a limit, as DeepSpeed does. If
            False, it gathers a layer, and the next one beside it.
        sequence_parallel: also shard the activations outside tensor-parallel regions (arXiv:2205.05198).
        schedule: one of ``SCHEDULES``.
        virtual_stages: chunks of layers per rank: 2 or more for ``interleaved``, 2 for V-shaped schedules, else 1.
        cp_kind: ``"ring"`` (arXiv:2310.01889) or ``"all_to_all"`` (arXiv:2309.14509).
        micro_batch: sequences of one forward pass on one data-parallel rank.
        global_batch: sequences of one step over all ranks; a multiple of ``dp * micro_batch``.
        recompute: ``"none"``, ``"selective"`` (attention scores, arXiv:2205.05198; with FlashAttention norms and
            activation functions), ``"operators"`` (every second matmul and all elementwise ops, as torch's
            selective checkpointing in torchtitan), ``"experts"`` (the matmuls and activation of routed experts, but
            nothing that is sent), ``"full"`` (whole layers), or modules of Megatron-LM (``recomputation.MODULES``)
            joined by ``+``.
        recompute_layers: layers of the whole model that ``recompute`` applies to, spread evenly; 0 for all.
        offload: what is kept in host memory, one of ``OFFLOAD``, ``"activations"`` or, with ZeRO-3,
            ``"optimizer+parameters"``: the shards of parameters too (arXiv:2104.07857).
        offload_layers: layers of the whole model whose activations are offloaded, spread evenly; 0 for all.
        dtype: of parameters and activations, or the format of the matmuls of linears (``precision.DTYPES``).
        grad_dtype: of accumulated gradients, ``"fp32"`` or ``dtype``; ``"bf16"`` with a low-precision format.
        activation_dtype: of the inputs of linear layers that are kept for the backward pass: ``"fp8"`` for one byte
            each, "" for that of other activations.
        moment_dtype: of the two Adam moments, ``"fp32"``, ``"bf16"`` or ``"8bit"`` (arXiv:2110.02861).
        master_bytes: of the master weight that belongs to a 16-bit parameter: 4; 2 for the lower half of an fp32
            number, of which the parameter is the upper one; 0 for none.
        flash_attention: attention scores are not stored (arXiv:2205.14135).
        fused_ops: adjacent elementwise ops are one kernel (bias-GeLU, bias-dropout-add, masked softmax).
        inplace_loss: the loss writes the gradient over the 16-bit logits, as Transformer Engine's cross-entropy does.
        fused_loss: output embedding and cross-entropy are one op (``vocab_parallel_linear_cross_entropy``), which keeps
            no logits.
        scatter_gather: a pipeline message is split over the tensor-parallel ranks (arXiv:2104.04473, section 4.1).
        overlap: data-parallel communication and pipeline messages overlap with computation.
        tp_overlap: tensor-parallel communication overlaps with the matmuls beside it, to the share that the
            software reaches (``Efficiency.tp_overlap``).
        ep_overlap: the all-to-alls of experts overlap with the computation of another micro-batch, as DualPipe's do.
        capacity_factor: rows of each expert, relative to equal loads: further tokens are dropped, missing ones padded.
            0: experts compute all tokens that are routed to them, for whose number the host waits (dropless).
        cuda_graph: launches that CUDA graphs replace: ``"none"``, ``"attention"`` (attention, norms and router of a
            layer), or ``"full"`` (the whole step), so that nothing waits for the host.
        dispatcher: sends tokens to experts: ``"all_to_all"`` (a copy for each expert), ``"deepep"`` or ``"hybridep"``
            (a copy for each rank and node, permuted on the way).
        optimizer_barrier: parameters are updated once all ranks have their gradients, as a gradient norm over the whole
            model requires. If False, a rank may begin the next step while others finish this one (post-validation,
            arXiv:2401.10241, section 4).
        input_grad_first: the whole backward pass of a micro-batch on a stage, B, computes the gradient of the stage's
            input and sends it before it computes the gradients of the weights, for which it needs no weights. 1F1B is
            then idle for (p - 1) (F + I) instead of (p - 1) (F + I + W). If False, the gradient is sent at the end.
        layers_per_chunk: layers of each of the ``pp * virtual_stages`` consecutive chunks; empty for an even split.

    Raises:
        ValueError, TypeError: naming the field that is wrong.
    """

    dp: int = 1
    dp_replicate: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 0
    zero: int = 0
    fsdp: bool = True
    gather_parameters: bool = False
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    virtual_stages: int = 1
    cp_kind: str = "ring"
    micro_batch: int = 1
    global_batch: int = 1
    recompute: str = "none"
    recompute_layers: int = 0
    offload: str = "none"
    offload_layers: int = 0
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    activation_dtype: str = ""
    moment_dtype: str = "fp32"
    master_bytes: int = 4
    flash_attention: bool = True
    fused_ops: bool = True
    inplace_loss: bool = False
    fused_loss: bool = False
    scatter_gather: bool = True
    overlap: bool = True
    tp_overlap: bool = True
    ep_overlap: bool = False
    capacity_factor: float = 0.0
    cuda_graph: str = "none"
    dispatcher: str = "all_to_all"
    optimizer_barrier: bool = True
    input_grad_first: bool = False
    layers_per_chunk: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_flags(self)
        check_counts(
            self, ("dp", "dp_replicate", "tp", "pp", "cp", "ep", "virtual_stages", "micro_batch", "global_batch")
        )
        check_counts(self, ("expert_tp", "recompute_layers", "offload_layers"), at_least=0)
        check_figures(self, ("capacity_factor",), zero=True)
        check_choice(self, "zero", (0, 1, 2, 3))
        check_choice(self, "schedule", SCHEDULES)
        check_choice(self, "cp_kind", ("ring", "all_to_all"))
        check_recompute(self.recompute)
        check_choice(self, "offload", (*OFFLOAD, "activations", "optimizer+parameters"))
        check_choice(self, "dtype", DTYPES)
        check_choice(self, "grad_dtype", ("fp32", stored(self.dtype)))
        check_choice(self, "cuda_graph", ("none", "attention", "full"))
        check_choice(self, "dispatcher", ("all_to_all", "deepep", "hybridep"))
        check_choice(self, "activation_dtype", ("", "fp8"))
        check_choice(self, "moment_dtype", ("fp32", "bf16", "8bit"))
        check_choice(self, "master_bytes", (4, 2, 0))
        if self.dp % self.dp_replicate:
            raise ValueError(f"Plan: dp_replicate must divide dp ({self.dp}), got {self.dp_replicate}")
        if self.expert_tp and self.tp % self.expert_tp:
            raise ValueError(f"Plan: expert_tp must divide tp ({self.tp}), got {self.expert_tp}")
        if self.expert_ranks % self.ep:
            share = f"{'dp' if self.dp_replicate == 1 else 'dp_shard'} * cp"
            share += " * tp / expert_tp" if self.expert_ranks != self.dp_shard * self.cp else ""
            raise ValueError(f"Plan: ep must divide {share} ({self.expert_ranks}), got {self.ep}")
        if self.global_batch % (self.dp * self.micro_batch):
            each = self.dp * self.micro_batch
            below = self.global_batch // each * each
            nearest = f"{below}, {below + each}" if below else each
            wanted = f"a multiple of dp * micro_batch ({each})"
            raise ValueError(f"Plan: global_batch must be {wanted}, got {self.global_batch}; nearest: {nearest}")
        expected = {"interleaved": "2 or more", **dict.fromkeys(V_SHAPED, "2")}.get(self.schedule, "1")
        right = self.virtual_stages >= 2 if self.schedule == "interleaved" else str(self.virtual_stages) == expected
        if not right:
            raise ValueError(
                f"Plan: virtual_stages must be {expected} for the schedule {self.schedule}, got {self.virtual_stages}"
            )
        chunks = self.pp * self.virtual_stages
        if isinstance(self.layers_per_chunk, list):  # as JSON and TOML have it
            object.__setattr__(self, "layers_per_chunk", tuple(self.layers_per_chunk))
        if not isinstance(self.layers_per_chunk, tuple) or not all(type(n) is int for n in self.layers_per_chunk):
            raise TypeError(f"Plan: layers_per_chunk must be a list of integers, got {self.layers_per_chunk!r}")
        if self.layers_per_chunk and (len(self.layers_per_chunk) != chunks or min(self.layers_per_chunk) < 0):
            wanted = f"pp * virtual_stages ({chunks}) entries of zero or more"
            raise ValueError(f"Plan: layers_per_chunk must have {wanted}, got {self.layers_per_chunk}")

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on one data-parallel rank."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def dp_shard(self) -> int:
        """Data-parallel ranks of one replica, ``dp / dp_replicate``; ``zero`` shards over these and ``cp``."""
        return self.dp // self.dp_replicate

    @property
    def hides_dispatch(self) -> bool:
        """Whether the all-to-alls of experts overlap with the computation of another micro-batch."""
        return (self.ep_overlap and self.micro_batches > 1) or self.schedule == "dualpipe-v"

    @property
    def expert_shards(self) -> int:
        """Tensor-parallel ranks that one expert is split over: ``expert_tp``, or ``tp`` if that is 0."""
        return self.expert_tp or self.tp

    @property
    def copied_experts(self) -> bool:
        """Whether each tensor-parallel rank has a copy of all experts, over which FSDP2 does not shard: the copies'
        gradients are summed for every micro-batch. Other systems shard over these ranks, too."""
        return self.fsdp and self.ep == 1 and self.expert_shards < self.tp

    @property
    def expert_ranks(self) -> int:
        """Ranks of one pipeline stage and replica that experts can be spread over."""
        return self.dp_shard * self.cp * self.tp // self.expert_shards

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The plan of a text such as ``dp=2,tp=2,zero=3``. Fields that are left out have their default.

        Raises:
            ValueError, TypeError: see ``parse_fields`` and ``Plan``.
        """
        return cls(**parse_fields(text, "Plan", PLAN_FIELDS))

    @property
    def text(self) -> str:
        """The fields that differ from their default, for ``parse``: ``dp=2,tp=2,zero=3``."""

        def value(given: Any) -> str:
            if isinstance(given, tuple):
                return ":".join(map(str, given))
            return str(given).lower() if isinstance(given, bool) else str(given)

        changed = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return ",".join(f"{name}={value(given)}" for name, given in changed)

    def describe(self) -> str:
        """One line: sizes above 1 and what differs from the default: ``dp4, tp8, zero1, sp, b2 x 64``."""
        sizes = [f"{name}{getattr(self, name)}" for name in ("dp", "tp", "pp", "cp", "ep") if getattr(self, name) > 1]
        parts = sizes or ["dp1"]
        parts += [f"expert tp{self.expert_tp}"] if self.expert_shards != self.tp else []
        parts += [f"{self.dp_replicate} replicas"] if self.dp_replicate > 1 else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["sp"] if self.sequence_parallel else []
        parts += [self.dtype] if self.dtype != "bf16" else []
        if self.pp > 1:
            parts += [self.schedule + (f" v{self.virtual_stages}" if self.schedule == "interleaved" else "")]
        parts += [self.cp_kind] if self.cp > 1 else []
        parts += [f"b{self.micro_batch} x {self.micro_batches}"]
        some = f" of {self.recompute_layers} layers" if self.recompute_layers else ""
        parts += [f"recompute {self.recompute}{some}"] if self.recompute != "none" else []
        parts += [f"layers {self._stages()}"] if self.layers_per_chunk else []
        some = f" of {self.offload_layers} layers" if self.offload_layers else ""
        parts += [f"offload {self.offload}{some}"] if self.offload != "none" else []
        parts += [f"CUDA graph {self.cuda_graph}"] if self.cuda_graph != "none" else []
        parts += [f"capacity {self.capacity_factor:g}"] if self.capacity_factor not in (0, 1) else []
        parts += [self.dispatcher] if self.dispatcher != "all_to_all" else []
        parts += ["no barrier"] if self.pp > 1 and not self.optimizer_barrier else []
        parts += ["input grad first"] if self.pp > 1 and self.input_grad_first else []
        return ", ".join(parts)

    def _stages(self) -> str:
        """Layers of each chunk, ``11*7/3`` for seven chunks of 11 and one of 3."""
        runs = [(size, len(list(group))) for size, group in itertools.groupby(self.layers_per_chunk)]
        return "/".join(str(size) if count == 1 else f"{size}*{count}" for size, count in runs)


def unchecked(plan: Plan, **changes: Any) -> Plan:
    """``dataclasses.replace`` without the checks, for changes that keep the plan valid.

    Nine times as fast; a search makes hundreds of thousands of plans.
    """
    return _made({**plan.__dict__, **changes})


def _made(values: dict[str, Any]) -> Plan:
    made = object.__new__(Plan)
    object.__setattr__(made, "__dict__", values)
    return made


def restored(values: tuple[Any, ...]) -> Plan:
    """The plan that has these ``vars().values()``."""
    return _made(dict(zip(PLAN_FIELDS, values, strict=True)))


PLAN_FIELDS = {field.name: field.default for field in fields(Plan)}
