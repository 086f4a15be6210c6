"""Days, GPU hours, money and energy of a whole training run, with failures, checkpoints and restarts.

With F failures a second, checkpoints that take C and restarts that take R seconds, saving every T seconds wastes the
share C / T + F (T / 2 + R) of the time; least for T = sqrt(2 C / F) (Young, CACM 17, 1974). Goodput is the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from parallel_ops.planner.checks import check_counts, check_figures, unknown
from parallel_ops.planner.estimate import estimate
from parallel_ops.planner.feasibility import memory_problem
from parallel_ops.planner.memory.adapters import saved_parameters
from parallel_ops.planner.results import Estimate

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv:2407.21783, table 5).
GPU_HOURS_TO_FAILURE = 54 * 24 * 16384 / 419
# Seconds from a failure to the next step: noticing it, new nodes, loading. Assumed.
RESTART = 600.0
# Bytes of a checkpoint for each parameter: fp32 weights and two moments. Bytes/s of storage for a node. Assumed.
_SAVED, _STORAGE = 12, 2e9


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Part of a run: ``tokens`` in steps of ``batch`` sequences of ``seq_length`` tokens."""

    tokens: float
    batch: int
    seq_length: int

    def __post_init__(self) -> None:
        check_figures(self, ("tokens",))
        check_counts(self, ("batch", "seq_length"))


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run.

    Attributes:
        tokens: to train on, without padding.
        mtbf: GPU hours between failures of a GPU or what it needs, so that a run of n GPUs fails every mtbf / n hours.
        checkpoint: seconds that training stops for a checkpoint; 0 for all states at 2 GB/s a node.
        restart: seconds from a failure to the next step, besides what is computed again.
        phases: batch-size ramp and growth of sequences: what comes before the batch and sequences of the estimate.

    Raises:
        ValueError, TypeError: naming the field that is wrong.
    """

    tokens: float
    mtbf: float = GPU_HOURS_TO_FAILURE
    checkpoint: float = 0.0
    restart: float = RESTART
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        check_figures(self, ("tokens", "mtbf"))
        check_figures(self, ("checkpoint", "restart"), zero=True)
        if (first := sum(phase.tokens for phase in self.phases)) > self.tokens:
            raise ValueError(f"run: phases have {first:,.0f} tokens, but the run {self.tokens:,.0f}")


class Expected(NamedTuple):
    """Expected cost of a run.

    Attributes:
        days: with all that is lost. steps: optimizer steps.
        goodput: share of the time in steps that count; 0 if failures come faster than restarts.
        failures: expected number. interval, checkpoint: seconds between checkpoints, and of each.
        gpu_hours, kwh: of all GPUs; energy at full power, times the ``pue`` of the prices. 0 kWh if power is unknown.
        money: of GPU hours; energy: of kWh; both in the currency of the prices, 0 without a price.
    """

    days: float
    steps: float
    goodput: float
    failures: float
    interval: float
    checkpoint: float
    gpu_hours: float
    kwh: float
    money: float
    energy: float


def expected(found: Estimate, run: TrainingRun, prices: Mapping[str, float] | None = None) -> Expected:
    """Days, GPU hours, money and energy of ``run`` with the steps of ``found``.

    ``prices``: of an hour of a GPU by its name, ``kwh`` of a kWh, ``pue`` the energy of the data centre over that of
    GPUs (1 without). Without the GPU's name ``Cluster.price`` counts.

    Raises:
        ValueError: the plan cannot run a phase or does not fit in one, a price is of no GPU of the cluster, is
            negative, or failures leave no time to train.
    """
    cluster, plan = found.cluster, found.plan
    kinds = [(part.gpu, part.gpus) for part in cluster.parts] or [(cluster.gpu, plan.gpus)]
    known = {"kwh", "pue", *(gpu.name for gpu, _ in kinds)}
    for name, price in (prices or {}).items():
        if name not in known:
            raise unknown("price", name, known)
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise ValueError(f"prices: {name} must be zero or more, got {price!r}")
    paid = dict(prices or {})
    nodes = math.ceil(plan.gpus / cluster.gpus_per_node)
    saving = run.checkpoint or _SAVED * saved_parameters(found.model) / (_STORAGE * nodes)
    rate = plan.gpus / (run.mtbf * 3600)
    interval = math.sqrt(2 * saving / rate)
    goodput = 1 - saving / interval - rate * (interval / 2 + run.restart)
    if goodput <= 0:
        raise ValueError(
            f"run: with a failure every {1 / rate:,.0f} s, checkpoints of {saving:,.0f} s and restarts of "
            f"{run.restart:,.0f} s leave no time to train; fewer GPUs, faster checkpoints or a larger mtbf"
        )
    parts = [(phase.tokens, _in_phase(found, phase)) for phase in run.phases]
    parts.append((run.tokens - sum(phase.tokens for phase in run.phases), found))
    seconds = sum(tokens / each.data_tokens_per_second for tokens, each in parts) / goodput
    hours = seconds / 3600
    kwh = sum(gpu.watts * count for gpu, count in kinds) * hours / 1000 * paid.get("pue", 1.0)
    return Expected(
        days=seconds / 86400,
        steps=sum(tokens / (each.plan.global_batch * each.model.seq_length) for tokens, each in parts)
        / (1 - found.model.padding),
        goodput=goodput,
        failures=seconds * rate,
        interval=interval,
        checkpoint=saving,
        gpu_hours=plan.gpus * hours,
        kwh=kwh,
        money=sum(paid.get(gpu.name, cluster.price) * count for gpu, count in kinds) * hours,
        energy=kwh * paid.get("kwh", 0.0),
    )


def _in_phase(found: Estimate, phase: Phase) -> Estimate:
    """The estimate of the same plan with the batch and the sequences of a phase."""
    where = f"run: the phase of {phase.batch:,} x {phase.seq_length:,} tokens a step"
    try:
        plan = replace(found.plan, global_batch=phase.batch)
        made = estimate(replace(found.model, seq_length=phase.seq_length), found.cluster, plan, software=found.software)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if (problem := memory_problem(found.cluster, plan, made.memory)) is not None:
        raise ValueError(f"{where} does not fit: {problem.reason}")
    return made
