"""Every path that a call can take on a GPU: what chooses it, whose code it is, and what shows that it works."""

from dataclasses import dataclass

EXECUTED = "its machine code for sm_90 is executed in the tests"
STRICT = "gloo under NCCL's blocking rules, lazy and eager"
SAME = "the same code over gloo on CPUs"


@dataclass(frozen=True)
class GpuPath:
    """One path.

    Attributes:
        chosen_by: The call, argument or setting that takes it.
        default: True if some call takes it unasked.
        library: Whose code computes or carries it, if that is not this package.
        ops: The registered ops that it is the CUDA kernel of.
        benchmark: The op of ``benchmarks/results/*.csv`` that measures it; a row of a GPU shows that it has run.
        proofs: Names of proofs of a GPU session, or their beginnings.
        recorded: A run from before sessions kept rows: machine, commit and place of the record.
        evidence: What else speaks for it.
        since: The day on which it was added; runs until then were without it.
    """

    area: str
    name: str
    chosen_by: str
    default: bool
    library: str = ""
    ops: tuple[str, ...] = ()
    benchmark: str = ""
    proofs: tuple[str, ...] = ()
    recorded: str = ""
    evidence: str = ""
    since: str = ""


# The last commit whose kernels an H100 ran, of attention and of a whole model.
_ATTENTION = "H100 80GB HBM3, b81ca1f42e, 2026-11-23 (docs/performance.md); changed since"
_MODEL = "H100 80GB HBM3, b81ca1f42e, 2026-11-23, in a Llama of Transformers (docs/performance.md)"


def _op(
    family: str, name: str, *more: str, backward: bool = True, benchmark: str = "", recorded: str = "", since: str = "",
) -> GpuPath:  # fmt: skip
    ops = (name, f"{name}_backward", *more) if backward else (name, *more)
    return GpuPath(
        "ops", f"`{name}`", f"`{name}` of CUDA tensors", not since, ops=ops, benchmark=benchmark or name,
        recorded=recorded, proofs=(f"tests of {family}",), evidence=EXECUTED, since=since,
    )  # fmt: skip


def _experts(name: str, *ops: str) -> GpuPath:
    return GpuPath(
        "experts", f"`{name}`", f"`{name}` of CUDA tensors", True, ops=(name, *ops), proofs=("tests of experts",),
        evidence=EXECUTED,
    )  # fmt: skip


def _schedule(name: str) -> GpuPath:
    return GpuPath(
        "pipelines", f"`{name}`", f'`parallel.schedule = "{name}"`', name == "1f1b", "torch's NCCL process group",
        proofs=(f"pipeline {name},",), evidence=STRICT,
    )  # fmt: skip


def _parallel(name: str, chosen_by: str, proof: str, *ops: str) -> GpuPath:
    return GpuPath(
        "parallelism", name, chosen_by, True, "torch's NCCL process group",
        ops=(*ops, *(f"{op}_backward" for op in ops)), proofs=(f"{proof}, c10d",), evidence=STRICT,
    )  # fmt: skip


PATHS: tuple[GpuPath, ...] = (
    _op("activations", "bias_gelu"),
    _op("activations", "bias_swiglu", benchmark="bias_swiglu"),
    _op("activations", "silu_mul"),
    _op("activations", "gelu_mul", benchmark="silu_mul"),
    _op("bias_dropout_add", "bias_dropout_add", "bias_dropout_add_"),
    _op("norms", "layer_norm"),
    _op("norms", "rms_norm"),
    _op("rotary_embedding", "rotary_embedding", "rotary_embedding_"),
    _op("softmaxes", "scaled_causal_softmax"),
    _op("softmaxes", "scaled_masked_softmax"),
    _op(
        "cross_entropy", "cross_entropy", "cross_entropy_backward", "cross_entropy_combine", "cross_entropy_statistics",
        "vocab_parallel_cross_entropy", benchmark="vocab_parallel_cross_entropy",
    ),
    GpuPath(
        "ops", "`vocab_parallel_linear_cross_entropy`", "the op, of CUDA tensors", True,
        ops=("vocab_parallel_linear_cross_entropy", "vocab_parallel_linear_cross_entropy_backward"), recorded=_MODEL,
        proofs=("tests of linear_cross_entropy",), evidence="cuBLAS and the kernels of `cross_entropy`",
    ),
    GpuPath(
        "ops", "`linear_log_probs`, `linear_kl_divergence`", "the ops, of CUDA tensors", True, "torch",
        ops=(
            "vocab_parallel_linear_log_probs", "vocab_parallel_linear_log_probs_backward",
            "vocab_parallel_linear_kl_divergence", "vocab_parallel_linear_kl_divergence_backward",
        ),
        proofs=("tests of log_probs",),
        evidence="cuBLAS, torch's elementwise kernels and the kernels of `cross_entropy`",
    ),
    GpuPath(
        "ops", "launches repeated by launchers", "a kernel launched again for tensors of the same kind", True,
        proofs=("repeated launches",), evidence="Triton's driver replaced by one that notes every argument",
    ),
    GpuPath(
        "attention", '`backend="cudnn"`', "`flash_attention`, where torch's SDPA would take it", True, "torch (cuDNN)",
        proofs=("attention backends",), evidence="schemas compared with torch's",
    ),
    GpuPath(
        "attention", '`backend="flash"`', "`flash_attention`, where torch's SDPA would take it", True,
        "torch (FlashAttention-2)", proofs=("attention backends",), evidence="schemas compared with torch's",
    ),
    GpuPath(
        "attention", '`backend="fa4"`',
        "`flash_attention` with flash-attn-4 installed, for the calls of `ops/attention/allow_list.py`", True,
        "flash-attn-4",
        evidence="a stand-in whose parameters are compared with its source; the list's published measurements",
    ),
    GpuPath(
        "attention", '`backend="flash"` with windows or documents',
        "`flash_attention` on an A100, for the calls of `ops/attention/allow_list.py`", True,
        "torch (FlashAttention-2)", evidence="schemas compared with torch's; the list's published measurement",
    ),
    GpuPath(
        "attention", '`backend="triton"`',
        "`flash_attention` with windows, documents, soft caps, dropout, fp32, or in deterministic mode", True,
        ops=("flash_attention", "flash_attention_backward"), proofs=("attention backends",), recorded=_ATTENTION,
        evidence=EXECUTED,
    ),
    _experts("route", "route_backward"),
    _experts("sort_by_expert"),
    _experts("permute"),
    _experts("unpermute", "unpermute_backward"),
    GpuPath(
        "experts", "`grouped_linear`", "bfloat16 on compute capabilities 9 and 10; elsewhere a matmul an expert", True,
        "torch (`grouped_mm`)", ops=("grouped_linear", "grouped_linear_backward"), proofs=("grouped products",),
        evidence="a stand-in of `grouped_mm` that leaves NaN where there are no rows",
    ),
    GpuPath(
        "precision", "float8 linears", '`precision.linears = "fp8_rowwise"`', False, "torch (`_scaled_mm`)",
        proofs=("float8 linear",), evidence="emulated on CPUs",
    ),
    GpuPath(
        "precision", "float8 linears in blocks", '`precision.linears = "fp8_blockwise"`, `"mxfp8"`', False,
        "torch (`scaled_mm`)", proofs=("block-scaled linear",),
        evidence="emulated on CPUs; a stand-in of `scaled_mm` that reads scales where cuBLAS does",
    ),
    GpuPath(
        "precision", "float8 experts", '`precision.experts = "fp8_rowwise"`, `"fp8_blockwise"`, `"mxfp8"`', False,
        "torch (`scaled_grouped_mm`, `scaled_mm`)", proofs=("float8 experts",),
        evidence="emulated on CPUs; a stand-in of `scaled_grouped_mm` that reads scales where its kernels do",
    ),
    GpuPath(
        "precision", "fp32 main gradients", "`main_grad`, split backward", True, "torch (cuBLAS)",
        proofs=("fp32 weight gradients",), evidence="the same call on CPUs",
    ),
    GpuPath(
        "memory", "activations in pinned host memory", '`recompute.offload = "inputs"`, `"all"`', False,
        "torch (`saved_tensors_hooks`, `copy_`)", proofs=("offloaded activations",),
        evidence="the same code on CPUs, with copies as late as they may be",
    ),
    GpuPath("graphs", "a step in a CUDA graph", "`torch.cuda.graph` of one's own", False, proofs=("captured step",),
            recorded="H100 80GB HBM3, b81ca1f42e, 2026-11-23 (docs/performance.md); changed since"),
    GpuPath("graphs", "the trainer's step in a CUDA graph", '`run.cuda_graph = "step"`', False, "torch (`CUDAGraph`)",
            proofs=("captured training step",), evidence="a stand-in of CUDA's captures and replays, on CPUs"),
    GpuPath("graphs", "layers in CUDA graphs", '`run.cuda_graph = "layers"`', False, "torch (`CUDAGraph`)",
            proofs=("captured layers",),
            evidence="a stand-in of CUDA's captures, replays and memory pools, on CPUs"),
    *(_schedule(name) for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe-v")),
    _parallel(
        "tensor and sequence parallelism", "`tp`", "tensor parallelism", "all_gather_linear", "column_parallel_linear",
        "linear_reduce_scatter",
    ),
    _parallel("context parallelism, ring", '`cp`, `cp_kind = "ring"`', "context parallelism, ring", "ring_attention"),
    _parallel("context parallelism, all-to-all", '`cp_kind = "all_to_all"`', "context parallelism, all-to-all"),
    _parallel("expert parallelism", "`ep`", "expert parallelism"),
    GpuPath("parallelism", "sums of what ranks computed", "`tp`", True,
            ops=("sum_partials",), proofs=("tests of sum_partials",), evidence=EXECUTED),
    GpuPath("parallelism", "data parallelism", "`dp`, `zero`", True, "torch (FSDP2, DDP)",
            proofs=("data parallelism",), evidence=SAME),
    GpuPath("parallelism", "optimizer in host memory", '`offload = "optimizer"`', False, "torch (FSDP2)",
            proofs=("offloaded optimizer",), evidence=SAME),
    GpuPath("parallelism", "Muon over shards", '`optimizer.kind = "muon"`', False,
            proofs=("muon over shards",), evidence=SAME),
    GpuPath("parallelism", "checkpoints", "`checkpoint.dir`", False, "torch (DCP)", proofs=("checkpoints of",),
            evidence=SAME),
    GpuPath("parallelism", "FSDP2 beside tensor parallelism", "`tp` with `zero = 3`", True,
            "torch's NCCL process group", proofs=("30 steps of FSDP2 beside tensor parallelism, c10d",),
            evidence=SAME),
    GpuPath("overlap", '`overlap="off"`', "`auto` where chunks gain less than 2 %", True, "torch's NCCL process group",
            proofs=("overlap off",), evidence=STRICT),
    GpuPath("overlap", "chunks", "`auto` where they are faster; `overlap=n`", True, "torch's NCCL process group",
            proofs=("overlap 2",), evidence=STRICT),
    GpuPath("overlap", '`overlap="symmetric"`', "the argument", False, "torch (`symm_mem`)",
            proofs=("overlap symmetric",), evidence="schemas compared with torch's; its references on CPUs"),
    GpuPath("transport", "c10d", "CUDA tensors over a group", True, "torch's NCCL process group",
            proofs=("tensor parallelism, c10d",), evidence=STRICT),
    GpuPath("transport", "nccl", "`PARALLEL_OPS_TRANSPORT=nccl`", False,
            proofs=("tensor parallelism, nccl", "context parallelism, ring, nccl", "expert parallelism, nccl",
                    "30 steps of FSDP2 beside tensor parallelism, nccl"),
            evidence="a stand-in of NCCL that moves the bytes"),
)  # fmt: skip
