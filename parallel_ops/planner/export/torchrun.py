"""A torchrun command for every node, and the mesh that the script builds. Options: ``torchrun --help``."""

from collections.abc import Iterator

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.export.target import ExportTarget
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan


def _problems(model: Model, cluster: Cluster, plan: Plan) -> Iterator[str]:
    per_node = min(plan.gpus, cluster.gpus_per_node)
    if plan.gpus % per_node:
        yield f"{plan.gpus} GPUs do not fill nodes of {per_node}"


def _write(model: Model, cluster: Cluster, plan: Plan) -> str:
    per_node = min(plan.gpus, cluster.gpus_per_node)
    # Without ZeRO all ranks are replicas.
    data = {"dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard} if plan.zero else {"dp_replicate": plan.dp}
    if plan.zero and plan.dp_replicate == 1:
        del data["dp_replicate"]
    found = {"pp": plan.pp, **data, "cp": plan.cp, "tp": plan.tp, "ep": plan.ep}
    sizes = ", ".join(f"{name}={size}" for name, size in found.items())
    nodes = plan.gpus // per_node
    rendezvous = ["--standalone"] if nodes == 1 else ["--rdzv-backend=c10d", '--rdzv-endpoint="$MASTER_ADDR:29500"']
    command = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={per_node}", *rendezvous, "train.py"]
    return f"# In train.py: mesh = parallel_ops.ParallelMesh({sizes})\n{' '.join(command)}\n"


TORCHRUN = ExportTarget(name="torchrun", write=_write, problems=_problems)
