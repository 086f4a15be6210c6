"""The time of one optimizer step.

    step      = pipeline + exposed data-parallel communication + optimizer
    pipeline  = m (F + I + W) of the slowest stage, with the communication of its layers, + its idle time

The idle time is simulated from the schedule's actions (``planner.schedules.schedule``); a search simulates a smaller
pipeline instead (``planner.schedules.steady_state``). Data-parallel communication of c seconds overlaps with one
micro-batch of w seconds (ZeRO-0 to 2: one per step; ZeRO-3: each) and lengthens it by
max(0, c - w) + interference * min(c, w); without overlap, by c. What lengthens each micro-batch lengthens the idle
time as well. Copies of offload run beside both, on another link; copies around the collectives come on top.
"""

from dataclasses import replace
from typing import Any

from parallel_ops.planner.cluster import Cluster, Interconnect
from parallel_ops.planner.communication.network import repeat, transfer
from parallel_ops.planner.communication.step_traffic import (
    DataParallelTraffic,
    PipelineTraffic,
    host_copies,
    sharding_key,
)
from parallel_ops.planner.communication.traffic import end_traffic, layer_traffic
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.work import work_of
from parallel_ops.planner.memory.states import state_bytes
from parallel_ops.planner.model import Model
from parallel_ops.planner.passes import beside, costs_of, ends_read, layer_costs, rank_passes
from parallel_ops.planner.placement import (
    chunk_layers,
    chunk_rank,
    head_rank,
    kind_counts,
    layer_counts,
    stage_layout,
)
from parallel_ops.planner.plan import V_SHAPED, Plan
from parallel_ops.planner.results import Transfer
from parallel_ops.planner.schedules.schedule import Simulation, Times, actions, simulate
from parallel_ops.planner.schedules.steady_state import idle_time, step_time

# Fields that change neither the passes nor the idle time of a pipeline.
_OUTSIDE = {"zero": 0, "dp_replicate": 1, "moment_dtype": "", "offload": ""}


def step_seconds(
    model: Model, cluster: Cluster, plan: Plan, constants: Efficiency, shared: dict[object, Any] | None = None
) -> float:
    """Seconds of a step, without checks and with a simulation of a smaller pipeline: what a search compares.
    ``shared``: see ``StepTime``."""
    return StepTime(model, cluster, plan, constants, shared).seconds()


class StepTime:
    """Parts of the step time of one plan, in seconds. Does not check that the plan can run.

    ``shared``: a dict for plans of one model, cluster and constants, to pass to each: what they have in common.
    """

    def __init__(
        self, model: Model, cluster: Cluster, plan: Plan, constants: Efficiency,
        shared: dict[object, Any] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.cluster, self.plan, self.constants = model, cluster, plan, constants
        self.gpus, self.micro_batches = cluster.stage_gpus(plan.pp), plan.micro_batches
        shared = {} if shared is None else shared
        self._known: dict[str, Any] = shared.setdefault(tuple({**vars(plan), **_OUTSIDE}.values()), {})
        if "passes" not in self._known:
            of_layers = work_of(plan), stage_layout(plan), plan.hides_dispatch
            self._known["messages"] = PipelineTraffic(model, cluster, plan, constants)
            self._known["passes"] = *of_layers, *rank_passes(model, cluster, constants, *of_layers)
        self.messages: PipelineTraffic = self._known["messages"]
        found = self._known["passes"]
        self.work, self.layout, self.paired, self.slowest, self.passes, self.busy, self.others = found
        key = sharding_key(plan, self.slowest)
        if key not in shared:
            shared[key] = DataParallelTraffic(model, cluster, plan, constants, self.slowest)
        self.sharding: DataParallelTraffic = shared[key]
        # All wait for the rank that updates most, which takes seconds on a host.
        self.updated = self.sharding.most_owned if "optimizer" in plan.offload else self.sharding.owned
        self.copied = host_copies(model, cluster, plan, self.updated, self.slowest)

    def seconds(self) -> float:
        """Step time, with a pipeline of equal ranks."""
        known = self._known
        if "pipeline" not in known:
            known["pipeline"] = self.micro_batches * self.busy + self._idle(self.messages.link) + self.gathers()
        pipeline: float = known["pipeline"]
        return pipeline + self.data_parallel() + self.optimizer() + self.host()

    def simulated_seconds(self) -> float:
        """Step time, with the pipeline simulated."""
        return self.pipeline() + self.data_parallel() + self.optimizer() + self.host()

    def pipeline(self) -> float:
        """Time from the first forward pass to the last backward pass."""
        plan = self.plan
        if plan.pp == 1:
            return plan.micro_batches * self.busy
        sizes = plan.pp, plan.micro_batches, plan.virtual_stages
        return step_time(plan.schedule, *sizes, self.times(), barrier=plan.optimizer_barrier) + self.gathers()

    def gathers(self) -> float:
        """All-gathers of pipeline messages that are split over the tensor-parallel ranks."""
        return 2 * self.micro_batches * self.plan.virtual_stages * self.messages.blocking

    def simulation(self) -> Simulation:
        """The simulated pipeline schedule, with the times of its stages."""
        plan, times = self.plan, self.times()
        own_times = times if plan.schedule == "zb-2p" else None
        return simulate(
            actions(plan.schedule, plan.pp, plan.micro_batches, plan.virtual_stages, times=own_times), times
        )

    def times(self) -> Times:
        """Seconds of the passes of each stage, with exposed communication, and of the messages between stages."""
        plan = self.plan
        chunks = chunk_layers(self.model, plan)
        passes = []
        for chunk, layers in enumerate(chunks):
            rank = chunk_rank(chunk, plan.pp, plan.schedule in V_SHAPED)
            end = chunk == len(chunks) - 1
            kinds, ends = kind_counts(self.model, layers, head=end), (chunk == 0, end)
            of_gpu = self.model, self.cluster, self.gpus[rank], self.constants, self.work, self.paired
            compute, waits = costs_of(*of_gpu).of_chunk(kinds, ends)
            passes.append(compute + waits)
        # Without overlap the message is part of the pass, except at the ends of the model.
        link, last = self.messages.link, len(passes) - 1
        sends = 0.0 if plan.overlap else link
        return Times(
            forward=[p.forward + (sends if chunk < last else 0.0) for chunk, p in enumerate(passes)],
            input_grad=[p.input_grad + (sends if chunk > 0 else 0.0) for chunk, p in enumerate(passes)],
            weight_grad=[p.weight_grad for p in passes],
            link=link if plan.overlap else 0.0,
            input_grad_first=plan.input_grad_first,
        )

    def _idle(self, link: float) -> float:
        """Idle time of the slowest rank with messages of ``link`` seconds. The other ranks take their mean time."""
        plan = self.plan
        if plan.pp == 1:
            return 0.0
        compute, waits = self.passes
        whole = (compute + waits).times(self.others / self.busy / plan.virtual_stages)
        sends = 0.0 if plan.overlap else link
        passes = whole.forward + sends, whole.input_grad + sends, whole.weight_grad
        link = link if plan.overlap else 0.0
        sizes = plan.pp, self.micro_batches, plan.virtual_stages
        order = {"barrier": plan.optimizer_barrier, "input_grad_first": plan.input_grad_first}
        waited = idle_time(plan.schedule, *sizes, passes, link, **order)
        return waited + 2 * self.micro_batches * plan.virtual_stages * sends

    def data_parallel(self) -> float:
        """Exposed data-parallel communication, with the copies around it."""
        exposed = self._not_hidden(self.sharding.once, self.busy) + self._rounds() * self._sharded()
        return exposed + self.sharding.copies

    def _rounds(self) -> float:
        """Micro-batches that the slowest rank computes or is idle for: what lengthens each pass lengthens both."""
        known = self._known
        if "rounds" not in known:
            known["rounds"] = self.micro_batches + self._idle(0.0) / self.busy
        rounds: float = known["rounds"]
        return rounds

    def _sharded(self) -> float:
        """Exposed gathers and reductions of ZeRO-2 and 3, per micro-batch.

        A layer's parameters are gathered while the previous layer runs, its gradients reduced while the next one does:
        the first gather and the last reduction of a pass are exposed. None of it takes longer than without overlap.
        """
        forward, backward = self.sharding.each
        if not backward or not self.plan.overlap:
            return forward + backward
        compute, waits = self.passes
        busy = compute.forward + waits.forward
        layers = max(1, sum(layer_counts(self.model, self.layout)[self.slowest]))
        hidden = self._not_hidden(forward, busy) + self._not_hidden(backward, self.busy - busy)
        return min(forward + backward, hidden + (forward + backward) / layers)

    def _not_hidden(self, seconds: float, busy: float) -> float:
        """Time that ``seconds`` of communication add to ``busy`` seconds of computation."""
        return beside(self.constants, seconds, busy) if self.plan.overlap else seconds

    def optimizer(self) -> float:
        """Adam: gradients are read for the norm and for the update; two moments and the master weights are read and
        written."""
        width, gradient, _ = state_bytes(self.plan)
        moved = self.updated * (2 * gradient + 24 + width)
        if "optimizer" in self.plan.offload:
            return moved / self.constants.host_memory
        return moved / (self.gpus[self.slowest].bandwidth * self.constants.memory)

    def host(self) -> float:
        """Exposed copies to and from the host: optimizer states once per step, activations beside the passes."""
        if not self.copied:
            return 0.0
        once, busy = "optimizer" in self.plan.offload, self.busy + self._sharded()  # the first copy is that of states
        each = sum(beside(self.constants, seconds, busy) for _, seconds, _ in self.copied[once:])
        return sum(seconds for _, seconds, _ in self.copied[:once]) + self._rounds() * each

    def transfers(self) -> tuple[Transfer, ...]:
        """All communication of the slowest stage in one step."""
        given = self.model, self.cluster, self.work, self.constants
        layers = layer_counts(self.model, self.layout)[self.slowest]
        parts = []
        for count, (shape, sparse) in zip(layers, self.model.kinds, strict=True):
            of_layer = shape, self.cluster, self.gpus[self.slowest], self.constants, self.work, sparse, self.paired
            if count:
                parts.append((layer_traffic(shape, *given[1:], sparse), layer_costs(*of_layer)[1].total, count))
        reads = ends_read(self.model, (self.slowest == 0, self.slowest == head_rank(self.layout)))
        for last, count in enumerate(reads):
            found = end_traffic(*given, last=bool(last))
            parts.append((found, found.exposed.total, count))
        out: list[Transfer] = []
        for found, waits, count in parts:
            total = sum(each.seconds * times for each, times in found.transfers)
            number = count * self.plan.micro_batches
            for each, times in found.transfers if number else ():
                share = each.seconds * times / total if total else 0.0
                out.append(repeat(each, times * number, waits * number * share))
        return _merged(out) + self._with_exposed()

    def _with_exposed(self) -> tuple[Transfer, ...]:
        exposed = {"dp": self.data_parallel(), "host": self.host()}
        if self.plan.pp > 1:
            exposed["pp"] = max(0.0, self._idle(self.messages.link) - self._idle(0.0))  # ZB-2p's order may be luckier
        host = Interconnect(name="host", latency=0.0, bandwidth=self.cluster.gpu.host_link)
        copies = (repeat(transfer("host", "copy", "direct", host, 1, *one), count) for *one, count in self.copied)
        transfers = (*self.messages.transfers(self.plan), *self.sharding.transfers(), *copies)
        kinds = [t.group.partition("_")[0] for t in transfers]  # replicas reduce beside shards
        totals: dict[str, float] = {}
        for kind, each in zip(kinds, transfers, strict=True):
            totals[kind] = totals.get(kind, 0.0) + each.seconds
        return tuple(
            replace(t, exposed=min(t.seconds, exposed[kind] * t.seconds / totals[kind]) if t.seconds else 0.0)
            for kind, t in zip(kinds, transfers, strict=True)
        )


def _merged(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """Sums transfers with the same group and collective."""
    merged: dict[tuple[str, str], Transfer] = {}
    for each in transfers:
        key = (each.group, each.collective)
        if before := merged.get(key):
            names = ("count", "bytes", "seconds", "exposed")
            merged[key] = replace(before, **{name: getattr(before, name) + getattr(each, name) for name in names})
        else:
            merged[key] = each
    return tuple(merged.values())
