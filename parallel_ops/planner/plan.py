"""How it is trained: the sizes of every kind of parallelism, the schedule, and what is recomputed or offloaded."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from parallel_ops.planner.checks import check_choice, check_counts, unknown
from parallel_ops.planner.cluster import DTYPES

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe-v")
# Two chunks of layers a rank, the second in reverse order of the ranks, so that the first rank holds both ends.
V_SHAPED = ("zb-v", "dualpipe-v")
# What a search tries; "operators" besides, for those who ask for it.
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "optimizer+activations")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way of spreading a model over a cluster.

    The GPUs of a plan are ``dp * tp * pp * cp``. Ranks are laid out as Megatron-LM does: tensor-parallel groups are
    adjacent, then context, then data, then pipeline.

    Attributes:
        dp, tp, pp, cp: sizes of data, tensor, pipeline and context parallelism.
        dp_replicate: of ``dp``, how many replicas of the shards there are (hybrid sharding, HSDP): ``zero`` shards over
            the ``dp_shard = dp / dp_replicate`` others.
        ep: size of expert parallelism, inside ``dp_shard * cp``, which it divides.
        zero: what is sharded over data-parallel ranks: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters.
        fsdp: shards are those of PyTorch's FSDP2, in fp32, which are cast as they are gathered; without, ZeRO-3 keeps
            16-bit shards beside the master weights, as DeepSpeed and Megatron-LM do.
        sequence_parallel: shard the activations outside tensor-parallel regions too (arXiv:2205.05198).
        schedule: one of ``SCHEDULES``. ``virtual_stages``: chunks of layers a rank; above 1 for ``interleaved``, 2 for
            V-shaped ones.
        cp_kind: ``"ring"`` (arXiv:2310.01889) or ``"all-to-all"`` (arXiv:2309.14509).
        micro_batch: sequences of one forward pass on one data-parallel rank. ``global_batch``: sequences of one step in
            all.
        recompute: ``"none"``, ``"selective"`` (attention scores, arXiv:2205.05198; with FlashAttention norms and
            activation functions), ``"operators"`` (every second matrix product and what is elementwise, as torch's
            selective checkpointing in torchtitan) or ``"full"`` (whole layers).
        offload: what lives in host memory.
        dtype: of parameters and activations. ``grad_dtype``: of accumulated gradients, ``"fp32"`` or ``dtype``.
        flash_attention: scores are never stored, as in arXiv:2205.14135.
        fused_ops: elementwise ops next to each other are one kernel (bias-GeLU, bias-dropout-add, masked softmax).
        fused_loss: output embedding and cross-entropy are one op (``vocab_parallel_linear_cross_entropy``), which keeps
            no logits.
        scatter_gather: a pipeline message is split over the tensor-parallel ranks (arXiv:2104.04473, section 4.1).
        overlap: data-parallel communication and pipeline messages run beside computation.
        optimizer_barrier: no rank updates its parameters before all ranks have their gradients, as a gradient norm over
            the whole model needs it; without, a rank begins the next step while others finish this one
            (post-validation, arXiv:2401.10241, section 4).
        layers_per_chunk: layers of each of the ``pp * virtual_stages`` consecutive chunks, for uneven stages; empty for
            as even as they can be.

    Raises:
        ValueError, TypeError: naming the field that is wrong.
    """

    dp: int = 1
    dp_replicate: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    fsdp: bool = True
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    virtual_stages: int = 1
    cp_kind: str = "ring"
    micro_batch: int = 1
    global_batch: int = 1
    recompute: str = "none"
    offload: str = "none"
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    flash_attention: bool = True
    fused_ops: bool = True
    fused_loss: bool = False
    scatter_gather: bool = True
    overlap: bool = True
    optimizer_barrier: bool = True
    layers_per_chunk: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_counts(
            self, ("dp", "dp_replicate", "tp", "pp", "cp", "ep", "virtual_stages", "micro_batch", "global_batch")
        )
        check_choice(self, "zero", (0, 1, 2, 3))
        check_choice(self, "schedule", SCHEDULES)
        check_choice(self, "cp_kind", ("ring", "all-to-all"))
        check_choice(self, "recompute", (*RECOMPUTE, "operators"))
        check_choice(self, "offload", OFFLOAD)
        check_choice(self, "dtype", DTYPES)
        check_choice(self, "grad_dtype", ("fp32", self.dtype))
        if self.dp % self.dp_replicate:
            raise ValueError(f"Plan: dp_replicate must divide dp ({self.dp}), got {self.dp_replicate}")
        if (self.dp_shard * self.cp) % self.ep:
            share = f"{'dp' if self.dp_replicate == 1 else 'dp_shard'} * cp ({self.dp_shard * self.cp})"
            raise ValueError(f"Plan: ep must divide {share}, got {self.ep}")
        if self.global_batch % (self.dp * self.micro_batch):
            share = f"dp * micro_batch ({self.dp * self.micro_batch})"
            raise ValueError(f"Plan: global_batch must be a multiple of {share}, got {self.global_batch}")
        expected = {"interleaved": "2 or more", **dict.fromkeys(V_SHAPED, "2")}.get(self.schedule, "1")
        right = self.virtual_stages >= 2 if self.schedule == "interleaved" else str(self.virtual_stages) == expected
        if not right:
            raise ValueError(
                f"Plan: virtual_stages must be {expected} for the schedule {self.schedule}, got {self.virtual_stages}"
            )
        chunks = self.pp * self.virtual_stages
        if self.layers_per_chunk and (len(self.layers_per_chunk) != chunks or min(self.layers_per_chunk) < 0):
            wanted = f"pp * virtual_stages ({chunks}) entries of zero or more"
            raise ValueError(f"Plan: layers_per_chunk must have {wanted}, got {self.layers_per_chunk}")

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step on one data-parallel rank."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def dp_shard(self) -> int:
        """Ranks with the same weights and different data that ``zero`` shards over, but for ``cp``."""
        return self.dp // self.dp_replicate

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The plan of a text, ``dp=2,tp=2,zero=3``; what it leaves out has its default.

        Raises:
            ValueError, TypeError: what ``parse_fields`` and ``Plan`` raise.
        """
        return cls(**parse_fields(text))

    @property
    def text(self) -> str:
        """The fields that are not at their default, as ``parse`` takes them: ``dp=2,tp=2,zero=3``."""

        def value(given: Any) -> str:
            if isinstance(given, tuple):
                return ":".join(map(str, given))
            return str(given).lower() if isinstance(given, bool) else str(given)

        changed = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return ",".join(f"{name}={value(given)}" for name, given in changed)

    def describe(self) -> str:
        """One line: the sizes above 1, and what is not at its default."""
        sizes = [f"{name}{getattr(self, name)}" for name in ("dp", "tp", "pp", "cp", "ep") if getattr(self, name) > 1]
        parts = sizes or ["dp1"]
        parts += [f"{self.dp_replicate} replicas"] if self.dp_replicate > 1 else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["sp"] if self.sequence_parallel else []
        if self.pp > 1:
            parts += [self.schedule + (f" v{self.virtual_stages}" if self.schedule == "interleaved" else "")]
        parts += [self.cp_kind] if self.cp > 1 else []
        parts += [f"b{self.micro_batch} x {self.micro_batches}"]
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        parts += [f"layers {self._stages()}"] if self.layers_per_chunk else []
        parts += [f"offload {self.offload}"] if self.offload != "none" else []
        parts += ["no barrier"] if self.pp > 1 and not self.optimizer_barrier else []
        return ", ".join(parts)

    def _stages(self) -> str:
        """Layers of each chunk, 11*7/3 for seven of 11 and one of 3."""
        runs = [(size, len(list(group))) for size, group in itertools.groupby(self.layers_per_chunk)]
        return "/".join(str(size) if count == 1 else f"{size}*{count}" for size, count in runs)


def unchecked(plan: Plan, **changes: Any) -> Plan:
    """``dataclasses.replace`` without the checks, for changes that leave the plan valid: nine times as fast, where a
    search makes hundreds of thousands of plans."""
    made = object.__new__(Plan)
    made.__dict__.update(plan.__dict__, **changes)
    return made


PLAN_FIELDS = {field.name: field.default for field in fields(Plan)}


def parse_fields(text: str, where: str = "Plan", known: Iterable[str] = PLAN_FIELDS) -> dict[str, Any]:
    """Fields of a plan, ``tp=8,zero=1,layers_per_chunk=11:12``, each of its type.

    Args:
        where: what messages begin with. known: the fields that it may have.

    Raises:
        ValueError: an unknown field, with the nearest names; a value that is not of the field's type; one given twice.
    """
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, value = parse_field(part, where, known)
        if name in found:
            raise ValueError(f"{where}: {name} is given twice")
        found[name] = value
    return found


def parse_field(part: str, where: str, known: Iterable[str]) -> tuple[str, Any]:
    """``tp=8`` as a name and a value of the type that the field has."""
    name, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals:
        raise ValueError(f"{where} takes fields as name=value, separated by commas; got {part.strip()!r}")
    if name not in known:
        raise unknown(f"field of {where}", name, known)
    default = PLAN_FIELDS[name]
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{where}: {name} must be true or false, got {value!r}")
        return name, value.lower() == "true"
    if isinstance(default, int):
        if not re.fullmatch(r"-?\d+", value):
            raise ValueError(f"{where}: {name} must be an integer, got {value!r}")
        return name, int(value)
    if isinstance(default, tuple):
        if not re.fullmatch(r"\d+(:\d+)*", value):
            raise ValueError(f"{where}: {name} must be numbers separated by colons, got {value!r}")
        return name, tuple(map(int, value.split(":")))
    return name, value
