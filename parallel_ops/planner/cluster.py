"""GPUs, the links between them, and clusters of them.

A link is described by the alpha-beta model: a message of n bytes takes ``latency + n / bandwidth`` seconds (Hockney
1994; Thakur, Rabenseifner and Gropp 2005). Bandwidths are per GPU and direction.
"""

from dataclasses import dataclass
from functools import lru_cache

from parallel_ops.planner.checks import check_choice, check_counts, check_figures, check_texts
from parallel_ops.planner.precision import DTYPES, peak_name
from parallel_ops.planner.speed import hashed_once

# A search divides the GPUs in all ways: 8 s for this many (two cores of an EPYC, 2026-11).
_MOST_GPUS = 1 << 22
PEAKS = ("fp32", "fp16", "bf16", "fp8", "fp4")


@hashed_once
@dataclass(frozen=True, kw_only=True)
class GPU:
    """One accelerator.

    Attributes:
        generation: GPUs of one generation share the fitted efficiencies.
        memory: bytes.
        bandwidth: memory bandwidth in bytes/s.
        fp32, fp16, bf16, fp8, fp4: peak dense FLOP/s of matmuls in that dtype; 0 if the GPU has none.
        watts: power at full load, for the energy estimate; 0 for unknown.
        multiprocessors: number of SMs, which share the tiles of a matmul. 0 for unknown or none:
            the time of a matmul then depends on its FLOPs alone.
        host_link: bytes/s to the host's memory, each way.

    Raises:
        ValueError, TypeError: naming the field that is wrong.
    """

    name: str
    generation: str
    memory: float
    bandwidth: float
    fp32: float
    fp16: float
    bf16: float
    fp8: float
    watts: float
    multiprocessors: int = 0
    fp4: float = 0.0
    host_link: float = 25e9  # PCIe 4.0 x16; assumed

    def __post_init__(self) -> None:
        check_texts(self, ("name", "generation"))
        check_counts(self, ("multiprocessors",), at_least=0)
        check_figures(self, ("memory", "bandwidth", "host_link"))
        check_figures(self, ("watts", *PEAKS), zero=True)

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in ``dtype``.

        Raises:
            ValueError: this GPU has no matmuls in ``dtype``.
        """
        if dtype not in DTYPES:
            raise ValueError(f"GPU: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        flops: float = getattr(self, peak_name(dtype))
        if not flops:
            known = ", ".join(name for name in DTYPES if getattr(self, peak_name(name)))
            raise ValueError(f"GPU: {self.name} has no {dtype} matrix products; it has {known}")
        return flops


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """A link as seen from one GPU: ``latency`` in seconds, ``bandwidth`` in bytes/s per direction."""

    name: str
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_texts(self, ("name",))
        check_figures(self, ("bandwidth",))
        check_figures(self, ("latency",), zero=True)


@dataclass(frozen=True, kw_only=True)
class Part:
    """``gpus`` GPUs of one kind inside a cluster of several kinds."""

    gpu: GPU
    gpus: int

    def __post_init__(self) -> None:
        check_counts(self, ("gpus",))


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs in nodes, a link inside the nodes and one between them.

    Attributes:
        gpus: number of GPUs: a multiple of ``gpus_per_node``, or fewer than one node.
        intra, inter: the links inside and between nodes.
        topology: ``"fat-tree"`` (full bandwidth between any two nodes of a pod) or ``"torus"`` (full bandwidth between
            neighbours only; ``intra`` is also the link between nodes, and rings map onto its axes).
        oversubscription: bandwidth of a pod's adapters over the bandwidth of the network above the pod; at least 1.
        pod: GPUs that the network connects at full bandwidth; 0 for one node.
        rails: adapters per node that a ring over several nodes uses; 0 for one per GPU, as NCCL does.
        constants: names and values of efficiencies that were measured on it (``parallel-ops calibrate``), which replace
            those of the GPU's generation and of the software.
        price: of one GPU for one hour, in any currency; 0 for unknown.
        parts: the kinds of GPU of a mixed cluster, in the order in which pipeline stages are placed on them; ``gpu`` is
            then the weakest of them. Empty for a cluster of one kind.

    Raises:
        ValueError, TypeError: naming the field that is wrong.
    """

    name: str
    gpu: GPU
    gpus: int
    gpus_per_node: int
    intra: Interconnect
    inter: Interconnect
    topology: str = "fat-tree"
    oversubscription: float = 1.0
    price: float = 0.0
    parts: tuple[Part, ...] = ()
    pod: int = 0
    rails: int = 0
    constants: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        check_texts(self, ("name",))
        check_counts(self, ("gpus", "gpus_per_node"))
        if self.gpus > _MOST_GPUS:
            raise ValueError(f"Cluster: gpus must be at most {_MOST_GPUS:,}, got {self.gpus:,}")
        check_counts(self, ("pod", "rails"), at_least=0)
        check_figures(self, ("price",), zero=True)
        check_choice(self, "topology", ("fat-tree", "torus"))
        check_figures(self, ("oversubscription",))
        if self.oversubscription < 1:
            raise ValueError(f"Cluster: oversubscription must be at least 1, got {self.oversubscription}")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"Cluster: gpus must be a multiple of gpus_per_node ({self.gpus_per_node}), or fewer; got {self.gpus}"
            )
        if self.parts and sum(part.gpus for part in self.parts) != self.gpus:
            raise ValueError(f"Cluster: parts must add up to gpus ({self.gpus})")

    @property
    def node_size(self) -> int:
        """GPUs of one node that are in use."""
        return min(self.gpus, self.gpus_per_node)

    def stage_gpus(self, stages: int) -> tuple[GPU, ...]:
        """The GPU of each of ``stages`` equal pipeline stages; the weakest if a stage spans several kinds."""
        return _stage_gpus(self, stages) if self.parts else (self.gpu,) * stages


@lru_cache(maxsize=4096)
def _stage_gpus(cluster: Cluster, stages: int) -> tuple[GPU, ...]:
    share = cluster.gpus / stages
    ends = [sum(part.gpus for part in cluster.parts[: i + 1]) for i in range(len(cluster.parts))]
    placed = []
    for stage in range(stages):
        first, last = stage * share, (stage + 1) * share
        kinds = [
            part.gpu
            for part, end in zip(cluster.parts, ends, strict=True)
            if end - part.gpus < last - 1e-9 and end > first + 1e-9
        ]
        placed.append(weakest(kinds))
    return tuple(placed)


def weakest(kinds: list[GPU]) -> GPU:
    """A GPU with the smallest of each figure of ``kinds``."""
    if len(set(kinds)) == 1:
        return kinds[0]
    slowest = min(kinds, key=lambda gpu: max(gpu.bf16, gpu.fp16))
    lowest = {name: min(getattr(gpu, name) for gpu in kinds) for name in ("memory", "bandwidth", "host_link", *PEAKS)}
    return GPU(
        name="+".join(sorted({gpu.name for gpu in kinds})),
        generation=slowest.generation,
        watts=max(gpu.watts for gpu in kinds),
        multiprocessors=slowest.multiprocessors,
        **lowest,
    )
