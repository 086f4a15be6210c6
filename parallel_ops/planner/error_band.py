"""Error bands of estimates, from the errors of similar published rows (``validation``): ``presets/error_bands.json``.

Rows are similar if they share the kernels of the software, the GPU's generation, dense layers, experts or experts
with biases, the dtype of matmuls (fp8 or 16-bit), sharding of parameters (ZeRO-3 or not) and size (one node or
several). If too few rows share all six, the last ones are dropped. The error of a row is that of constants that were
fitted without its table.
"""

from dataclasses import dataclass, replace

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.software import CURRENT, era, measured_kernels, uncertainty
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.precision import FORMATS
from parallel_ops.planner.presets.figures import figures


@dataclass(frozen=True, kw_only=True)
class ErrorBand:
    """Relative half-widths (0.1 for 10 %) that hold four of five of the similar published rows.

    Attributes:
        time: of the step time, and so of throughput and MFU.
        memory: of the peak memory.
        rows: number of published step times behind ``time``; 0 if no published row is similar.
        like: what these rows have in common, as text.
    """

    time: float
    memory: float
    rows: int
    like: str

    def sentence(self) -> str:
        """A sentence that explains ``±`` beside a figure."""
        of = f"{self.rows} published runs like it ({self.like})" if self.rows else "published runs of other kinds"
        return (
            f"± {self.time:.0%} of times and rates and ± {self.memory:.0%} of memory hold four of five of the errors "
            f"in {of}."
        )


def error_band(cluster: Cluster, plan: Plan, *, software: str = CURRENT, experts: str | bool = False) -> ErrorBand:
    """The error band of an estimate of ``plan`` on ``cluster``.

    Args:
        software: name of an era (``parallel_ops.planner.compute.software``).
        experts: whether the model has experts; ``"biased"`` if these have biases (``Model.expert_kind``).
    """
    table = figures("presets/error_bands")["bands"]
    found = next((key for key in keys(cluster, plan, software, experts) if key in table), "any")
    band = ErrorBand(**table[found], like=found)
    few = uncertainty(cluster.gpu.generation, cluster.gpu.name, software)
    band = replace(band, time=max(band.time, few))
    # Kernels without constants of their own for this GPU: at least as uncertain as on the GPUs where they have some.
    own = table.get(kernels := era(software).kernels, table["any"])
    if measured_kernels(kernels, cluster.gpu.generation) != kernels and own["time"] > band.time:
        return ErrorBand(**own, like=kernels)
    return band


def keys(cluster: Cluster, plan: Plan, software: str, experts: str | bool) -> tuple[str, ...]:
    """Keys of similar rows in ``presets/error_bands.json``, the most similar first."""
    generation = cluster.gpu.generation
    dtype = "fp8" if plan.dtype in FORMATS else "16-bit"
    sharded = "zero-3" if plan.zero == 3 else "zero-0 to 2"
    size = "one node" if plan.gpus <= cluster.gpus_per_node else "several nodes"
    kernels = measured_kernels(era(software).kernels, generation)
    kind = "experts with biases" if experts == "biased" else "experts" if experts else "dense"
    names = kernels, generation, kind, dtype, sharded, size
    return tuple(", ".join(names[:count]) for count in range(len(names), 1, -1))


def tied(seconds: float, best: float, width: float) -> bool:
    """Whether step times of ``seconds`` and ``best`` are equal within half of ``width``, the band of ``best``.

    Half, since plans of one search share most of their error.
    """
    return seconds <= best * (1 + width / 2)
