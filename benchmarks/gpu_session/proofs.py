"""Proofs of a GPU session: what each runs, and on how many ranks that share the GPU.

A proof is a function of this package that raises where a result is wrong. Its ranks are processes on one GPU, which
NCCL 2.30 and later allow with ``NCCL_MULTI_RANK_GPU_ENABLE=1``. On a CPU the same functions run over gloo, so a session
without a GPU shows that every command starts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_session import kernels, ranks


@dataclass(frozen=True)
class Proof:
    """One function on a number of ranks.

    Attributes:
        part: The step of a session that runs it.
        environment: Variables of its processes; proofs with the same ones share processes.
        alone: It has new processes.
        seconds: After these the processes are killed, and the proof has failed.
    """

    name: str
    part: str
    processes: int
    run: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 40.0
    alone: bool = False


_LLAMA = {
    "vocab_size": 64, "seq_length": 64, "num_layers": 8, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2,
    "activation": "swiglu", "norm": "rms_norm", "bias": False, "positions": "rotary", "tied_embeddings": False,
}  # fmt: skip
_TIED = {"vocab_size": 64, "seq_length": 64, "num_layers": 8, "hidden_size": 64, "num_heads": 4}
_SMALL = _LLAMA | {"num_layers": 2}
_WIDE = _SMALL | {"seq_length": 512, "hidden_size": 512, "num_heads": 8}
_EXPERTS = _SMALL | {
    "experts": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 64, "shared_experts": 1, "aux_loss": 0.01}
}
# Schedules and the stages of a rank.
_SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-2p": 1, "zb-v": 2, "dualpipe-v": 2}


def _pipelines() -> Iterator[Proof]:
    """Every schedule over two ranks, and over four, where an order of messages can lock; lazy and eager groups."""
    cases: list[tuple[int, str, str, dict[str, Any]]] = [(2, name, "llama", _LLAMA) for name in _SCHEDULES]
    cases += [(2, "1f1b", "tied", _TIED), (4, "1f1b", "tied", _TIED), (4, "zb-v", "llama", _LLAMA)]
    for start in ("lazy", "eager"):
        for size, schedule, kind, model in cases:
            plan = {"pp": size, "schedule": schedule, "virtual_stages": _SCHEDULES[schedule]}
            yield Proof(
                f"pipeline {schedule}, {size} stages, {kind}, {start}", "pipelines", size, ranks.trains_alike,
                (model, plan, {}, start == "eager"),
                # torch 2.11 crashes where a second world of a process splits its communicator (pytorch pull 192109).
                alone=start == "eager",
            )  # fmt: skip


def _parallel() -> Iterator[Proof]:
    """Each parallelism over two ranks, over torch's communicators and over the package's."""
    plans: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "tensor parallelism": (_WIDE, {"tp": 2, "sequence_parallel": True}),
        "context parallelism, ring": (_SMALL, {"cp": 2}),
        "context parallelism, all-to-all": (_SMALL, {"cp": 2, "cp_kind": "all_to_all"}),
        "expert parallelism": (_EXPERTS, {"dp": 2, "ep": 2}),
    }
    for transport in ("c10d", "nccl"):
        for name, (model, plan) in plans.items():
            yield Proof(
                f"{name}, {transport}", "parallel", 2, ranks.trains_alike, (model, plan),
                {"PARALLEL_OPS_TRANSPORT": transport},
            )  # fmt: skip
    tp = {"tp": 2, "sequence_parallel": True}
    for overlap in ("off", 2):
        yield Proof(f"overlap {overlap}", "parallel", 2, ranks.trains_alike, ({**_WIDE, "overlap": overlap}, tp))
    # torch maps the memory of another rank on the same GPU only with it.
    shared = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    yield Proof("overlap symmetric", "parallel", 2, ranks.symmetric_linears, (), shared)
    for zero in (0, 1, 2, 3):
        yield Proof(
            f"data parallelism, zero {zero}", "parallel", 2, ranks.trains_alike, (_SMALL, {"dp": 2, "zero": zero})
        )
    replicas = {"dp": 4, "dp_replicate": 2, "zero": 3}
    yield Proof("data parallelism, hybrid shards", "parallel", 4, ranks.trains_alike, (_SMALL, replicas))


def _training() -> Iterator[Proof]:
    """What the trainer does over two ranks beside steps in fp32 by AdamW."""
    shards = {"dp": 2, "zero": 3}
    muon = {"optimizer": {"kind": "muon", "lr": 1e-3, "grad_clip": 0.5}}
    cases: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
        "muon over shards": (ranks.trains_alike, (_SMALL, {"dp": 2, "zero": 2}, muon)),
        "offloaded optimizer": (ranks.trains_alike, (_SMALL, {**shards, "offload": "optimizer"})),
        "checkpoints of shards": (ranks.resumes, (_SMALL, shards)),
        "checkpoints of tensor parallelism in bf16": (
            ranks.resumes, (_SMALL, {"tp": 2, "sequence_parallel": True}, {"precision": {"dtype": "bf16"}}),
        ),
        "checkpoints of a pipeline": (ranks.resumes, (_SMALL, {"pp": 2})),
    }  # fmt: skip
    for name, (run, arguments) in cases.items():
        yield Proof(name, "training", 2, run, arguments)


def _beside() -> Iterator[Proof]:
    """FSDP2's collectives beside those of tensor parallelism: several communicators on the GPU, many steps."""
    plan = {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True}
    variables: dict[str, dict[str, str]] = {
        "": {},
        ", one queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        ", implicit order": {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"},
    }
    for transport in ("c10d", "nccl"):
        for name, environment in variables.items():
            yield Proof(
                f"30 steps of FSDP2 beside tensor parallelism, {transport}{name}", "beside", 4, ranks.keeps_training,
                (_SMALL, plan, 30), {"PARALLEL_OPS_TRANSPORT": transport, **environment}, 75.0,
            )  # fmt: skip


def _kernels() -> Iterator[Proof]:
    for name, function in kernels.PROOFS.items():
        yield Proof(name, "kernels", 1, function, seconds=80.0)  # the first compiles kernels of many shapes


def _tests() -> Iterator[Proof]:
    for family in ("activations", "norms", "softmaxes", "cross_entropy", "attention", "experts"):
        seconds = 180.0 if family in ("attention", "experts") else 90.0  # kernels of many shapes are compiled
        yield Proof(f"tests of {family}", "tests", 1, kernels.tests, (f"tests/ops/{family}",), seconds=seconds)
    files = {
        "bias_dropout_add": "ops/test_bias_dropout_add.py",
        "rotary_embedding": "ops/test_rotary_embedding.py",
        "linear_cross_entropy": "tensor_parallel/test_linear_cross_entropy.py",
        "log_probs": "tensor_parallel/test_log_probs.py",
        "sum_partials": "comm/test_sum_partials.py",
    }
    for name, path in files.items():
        yield Proof(f"tests of {name}", "tests", 1, kernels.tests, (f"tests/{path}",), seconds=60.0)


def proofs() -> dict[str, Proof]:
    """All proofs by name; within a part those of most worth come first."""
    return {
        proof.name: proof for proof in (*_pipelines(), *_parallel(), *_training(), *_beside(), *_kernels(), *_tests())
    }
