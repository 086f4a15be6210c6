"""``parallel-ops doctor``: what is wrong is said in words, and a call that does not return is named with its ranks."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("pydantic")

import torch

from parallel_ops.doctor import machine
from parallel_ops.doctor.ranks import check_ranks, probe_rank
from support.runs.trainer import parallel_ops


def found(findings, status):
    return [finding for finding in findings if finding.status == status]


def test_a_machine_like_this_one_has_no_failures():
    assert not found(machine.check_machine({}), "failed")


def test_a_cpu_build_beside_a_driver(monkeypatch, tmp_path):
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(machine, "_DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", None)
    (finding,) = found(machine.check_machine({}), "failed")
    assert finding.check == "torch" and "CPU build, beside an NVIDIA driver" in finding.found
    assert "CUDA build" in finding.cure


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 64])
def test_a_machine_without_an_address_and_shared_memory(monkeypatch, tmp_path, name):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(machine, "_SHM", tmp_path / "shm")
    warned = {finding.check: finding for finding in found(machine.check_machine({}), "warning")}
    assert f"{name} has no address" in warned["host name"].found
    assert f"there is no {tmp_path}/shm" in warned["shared memory"].found and warned["shared memory"].cure


def test_gpus_that_do_not_read_each_other():
    reads = [[True] * 4 for _ in range(4)]
    assert [f.status for f in machine.check_peers(reads)] == ["ok"]
    for i, j in ((0, 2), (3, 1), (2, 3), (0, 3)):
        reads[i][j] = False
    (finding,) = machine.check_peers(reads)
    assert "GPUs 2 and 0, 3 and 0, 3 and 1 and 1 more pairs do not read" in finding.found
    assert not list(machine.check_peers([[True]]))


@pytest.mark.parametrize("name", machine._VARIABLES)
def test_variables_that_slow_a_run_down(name):
    assert [f.check for f in found(machine.check_machine({name: "1"}), "warning")].count(name) == 1
    assert name not in [f.check for f in machine.check_machine({name: "0"})]


def test_a_launcher_that_sets_half_of_its_variables(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    (finding,) = found(machine.check_machine({}), "failed")
    assert finding.check == "launcher" and "MASTER_ADDR" in finding.found


def stuck(rank, ranks, *rest):
    """Rank 1 never sends to rank 2."""
    if rank == 1:
        reports = rest[-1]
        reports.put((rank, "begins", "send 1 to 2", 0.0))
        time.sleep(600)
    reports = rest[-1]
    reports.put((rank, "begins", "send 1 to 2" if rank == 2 else "end", 0.0))
    time.sleep(600)


def killed(rank, ranks, *rest):
    rest[-1].put((rank, "begins", "all-reduce, first", 0.0))
    time.sleep(0.5)
    if rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(600)


def corrupting(rank, ranks, *rest):
    """Rank 1 adds another number than it says."""
    import torch.distributed as dist

    reduce = dist.all_reduce

    def corrupted(x):
        if rank == 1:
            x.add_(1)
        reduce(x)

    dist.all_reduce = corrupted
    probe_rank(rank, ranks, *rest)


def unconnected(*given):
    """gloo, beside the default group, finds no way to the other node."""
    import torch.distributed as dist

    def refused(backend, **_):
        raise RuntimeError(f"{backend}: connection refused, remote=[127.0.1.1]")

    dist.new_group = refused
    probe_rank(*given)


@pytest.mark.runs
def test_what_does_not_return_is_named():
    (finding,) = check_ranks(3, "gloo", 0.5, stuck)
    assert finding.status == "failed"
    assert "end: rank 0; send 1 to 2: rank 1, 2" in finding.found
    (finding,) = check_ranks(2, "gloo", 5.0, killed)
    assert (finding.check, finding.found) == ("all-reduce, first", "rank 1 ended with exit code -9")
    lost = found(check_ranks(2, "gloo", 5.0, unconnected), "failed")
    assert {finding.check for finding in lost} == {"gloo group"}
    assert "gloo: connection refused" in lost[0].found and "GLOO_SOCKET_IFNAME" in lost[0].cure
    wrong = found(check_ranks(2, "gloo", 5.0, corrupting), "failed")
    assert wrong and all("the sum is 4, not 3: data is corrupted" in finding.found for finding in wrong)


@pytest.mark.runs
def test_the_command():
    """On three ranks: every pair, and two steps of a run."""
    command = [sys.executable, "-m", "parallel_ops", "doctor", "--processes", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    checks = {finding["check"]: finding["status"] for finding in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout + done.stderr
    pairs = {f"send {i} to {j}" for i in range(3) for j in range(3) if i != j}
    assert (
        checks.keys() >= pairs | {"gloo group", "all-reduce of 4 MiB", "two steps"} and "failed" not in checks.values()
    )


@pytest.mark.parametrize("call", [["doctor"], ["calibrate", "here.json"]])
@pytest.mark.parametrize("seconds", ["0", "1e30", "inf", "nan"])
def test_times_that_are_none(call, seconds):
    code, said = parallel_ops(*call, "--seconds", seconds)
    assert code == 2 and "Invalid value for '--seconds'" in said
