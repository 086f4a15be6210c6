"""Scripts that run an exported plan: what they start, with the commands that they call replaced by ones that print."""

import os
import shlex
import subprocess

import pytest

from parallel_ops.planner import Plan, presets
from parallel_ops.planner.export import TARGETS, export, find_target
from parallel_ops.planner.export.launcher import LAUNCHERS, script
from parallel_ops.planner.plan import unchecked

LLAMA, H100 = presets.model("llama3-70b"), presets.cluster("h100x64")
PLANS = {
    # The layout of its stages has characters that a shell would read.
    "megatron": Plan(
        dp=2, tp=8, pp=4, zero=1, sequence_parallel=True, global_batch=64, layers_per_chunk=(21, 20, 20, 19)
    ),
    "torchtitan": Plan(dp=8, tp=8, zero=3, sequence_parallel=True, global_batch=64),
    "deepspeed": Plan(dp=64, zero=3, global_batch=64, recompute="full"),
    "parallel_ops": Plan(dp=8, tp=8, zero=3, sequence_parallel=True, global_batch=64),
}


def written(name, plan, launcher, cluster=H100):
    system = find_target(name)
    plan = unchecked(plan, **system.own(plan))
    text = export(name, LLAMA, cluster, plan)
    return text, script(system, text, cluster, plan, launcher)


def started(text, folder, *arguments, **environment):
    """Command that the script starts: the words of the command, and its environment."""
    for name, body in {
        "torchrun": 'env > environment; printf "%s\\n" "$@" > words',
        "srun": '"$@"',
        "scontrol": 'echo "$3-1"; echo "$3-2"',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "run.sh").write_text(text)
    subprocess.run(["bash", "-n", "run.sh"], cwd=folder, check=True)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", **environment}
    subprocess.run(["bash", "run.sh", *arguments], cwd=folder, env=path, check=True)
    lines = (folder / "environment").read_text().splitlines()
    return (folder / "words").read_text().splitlines(), dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_script_starts_the_plan_on_all_nodes(name, launcher, tmp_path):
    text, run = written(name, PLANS[name], launcher)
    given = {"MASTER_ADDR": "node-1"} if launcher == "torchrun" else {"SLURM_JOB_NODELIST": "node", "SLURM_JOB_ID": "7"}
    words, environment = started(run, tmp_path, "--extra", "two words", **given)
    assert words[:2] == ["--nnodes=8", "--nproc-per-node=8"]
    assert "--rdzv-endpoint=node-1:29500" in words
    assert words[-2:] == ["--extra", "two words"]
    system = find_target(name)
    begin = words.index(system.command[0])
    if system.config:
        assert words[begin:-2] == list(system.command)
        assert (tmp_path / system.config).read_text() == text
    else:
        assert words[begin:-2] == [*system.command, *shlex.split(text.replace("\\\n", " "))]
    assert ("#SBATCH --nodes=8" in run) == (launcher == "slurm")
    if name == "megatron":
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    if name == "torchtitan":
        assert environment["PYTHONPATH"] == str(tmp_path)


def test_one_node_needs_no_address(tmp_path):
    plan = Plan(tp=8, sequence_parallel=True, global_batch=8)
    words, _ = started(written("megatron", plan, "torchrun", presets.cluster("h100x8"))[1], tmp_path)
    assert words[:3] == ["--nnodes=1", "--nproc-per-node=8", "--standalone"]


@pytest.mark.parametrize(
    ("cluster", "changes", "value"),
    [("h100x64", {}, "1"), ("b200x64", {}, None), ("h100x64", {"tp": 1, "dp": 16, "sequence_parallel": False}, None)],
)
def test_megatron_orders_kernels_where_it_must(cluster, changes, value):
    found = find_target("megatron").environment(presets.cluster(cluster), unchecked(PLANS["megatron"], **changes))
    assert found.get("CUDA_DEVICE_MAX_CONNECTIONS") == value


def test_unknown_launchers_and_formats_without_a_script():
    with pytest.raises(ValueError, match="unknown launcher 'slurn'; nearest: slurm"):
        written("megatron", PLANS["megatron"], "slurn")
    with pytest.raises(ValueError, match="torchrun: it is a command already; leave --launcher out"):
        written("torchrun", PLANS["megatron"], "slurm")


def test_the_command_line_writes_a_script(run, tmp_path):
    plan = ["--model", "llama3-70b", "--cluster", "h100x64", "--batch", "64"]
    fields = ["--plan", "tp=8,pp=4,zero=1,recompute=full", "--for", "megatron"]
    code, out, err = run("estimate", *plan, *fields, "--launcher", "slurm", "--output", "-")
    assert (code, err) == (0, "") and out.startswith("#!/bin/bash") and "srun torchrun --nnodes=8" in out
    only = "tp=8,pp=4,zero=1,schedule=1f1b,micro_batch=1"
    code, _, err = run(
        "plan", *plan, "--for", "megatron", "--only", only, "--launcher", "torchrun", "--output", tmp_path / "run.sh"
    )
    assert (code, err) == (0, "") and "pretrain_gpt.py" in (tmp_path / "run.sh").read_text()
