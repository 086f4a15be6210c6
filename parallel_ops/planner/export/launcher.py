"""A bash script that runs an exported plan: by torchrun on every node, or as a Slurm job.

The script writes the configuration into the working directory, which all nodes must share, and starts one torchrun a
node. Arguments of the script are appended to the command. Options: ``torchrun --help``, ``man sbatch``.
"""

from parallel_ops.planner.checks import unknown
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.export.target import ExportTarget
from parallel_ops.planner.plan import Plan

LAUNCHERS = ("torchrun", "slurm")
_END = "END_OF_CONFIGURATION"


def script(system: ExportTarget, text: str, cluster: Cluster, plan: Plan, launcher: str) -> str:
    """The script that runs ``text``, an export of ``plan`` for ``system``.

    Args:
        launcher: one of ``LAUNCHERS``: ``"torchrun"`` for a script to start on every node with ``MASTER_ADDR`` set to
            one of them, ``"slurm"`` for ``sbatch``.

    Raises:
        ValueError: the launcher is unknown, the system has no command, or the GPUs do not fill nodes.
    """
    if launcher not in LAUNCHERS:
        raise unknown("launcher", launcher, LAUNCHERS)
    if not system.command:
        raise ValueError(f"{system.name}: it is a command already; leave --launcher out")
    per_node = min(plan.gpus, cluster.gpus_per_node)
    if plan.gpus % per_node:
        raise ValueError(f"{system.name}: {plan.gpus} GPUs do not fill nodes of {per_node}")
    nodes = plan.gpus // per_node
    lines = ["#!/bin/bash", f"# {plan.describe()}"]
    if launcher == "slurm":
        lines += [f"#SBATCH --nodes={nodes}", "#SBATCH --ntasks-per-node=1", f"#SBATCH --gpus-per-node={per_node}"]
    lines += ["set -euo pipefail", ""]
    lines += [f"export {name}={value}" for name, value in system.environment(cluster, plan).items()]
    if system.config:
        lines += [f"cat > {system.config} <<'{_END}'", text.rstrip("\n"), _END, "CONFIGURATION=()"]
    else:
        options = (f"  {line.removesuffix(chr(92)).rstrip()}" for line in text.rstrip("\n").splitlines())
        lines += ["CONFIGURATION=(", *options, ")"]
    rendezvous = ["--standalone"]
    if nodes > 1:
        if launcher == "slurm":
            lines.append('MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)')
        rendezvous = ["--rdzv-backend=c10d", '--rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}"']
        rendezvous += ['--rdzv-id="$SLURM_JOB_ID"'] if launcher == "slurm" else []
    start = ["srun"] if launcher == "slurm" else []
    command = [*start, "torchrun", f"--nnodes={nodes}", f"--nproc-per-node={per_node}", *rendezvous, *system.command]
    return "\n".join([*lines, " ".join([*command, '"${CONFIGURATION[@]}"', '"$@"'])]) + "\n"
