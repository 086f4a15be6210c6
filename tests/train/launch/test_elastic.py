"""Nodes that go and come while a run is under way: two agents of torchrun on this machine, one rank each.

A minute, most of it torchrun's waiting: only with ``--elastic``.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.ranks import processes


class Node:
    """An agent, and its rank."""

    def __init__(self, folder, port):
        self.log = folder / f"node-{len(list(folder.glob('node-*')))}"
        call = (
            f"{sys.executable} -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 "
            f"--rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id run --local-addr localhost "
            "--rdzv-conf last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=5 "
            "-m parallel_ops train run.toml --resume --elastic --steps 1000000 --set checkpoint.interval=50 "
            "--set logging.interval=1000"
        )
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.log.open("wb") as log:
            self.agent = subprocess.Popen(call.split(), cwd=folder, env=env, stdout=log, stderr=log)

    def said(self):
        return self.log.read_text()

    def kill(self):
        children = subprocess.run(["pgrep", "-P", str(self.agent.pid)], capture_output=True, text=True, check=False)
        for process in (self.agent.pid, *map(int, children.stdout.split())):
            os.kill(process, signal.SIGKILL)
        self.agent.wait()


def test_nodes_go_and_come(folder, request):
    if not request.config.getoption("--elastic"):
        pytest.skip("takes one to two minutes, most of it torchrun's waiting: --elastic runs it")
    port = processes.free_port()
    nodes = [Node(folder, port)]

    def last():
        file = folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def wait(there):
        end = time.monotonic() + 180
        while not there():
            assert time.monotonic() < end, "\n".join(node.said()[-2000:] for node in nodes)
            time.sleep(0.2)

    def resumed(times):
        """All have begun again, and taken steps."""
        wait(lambda: sum(node.said().count("resumes from") for node in nodes) == times)
        step = last()
        wait(lambda: last() > step + 20)

    try:
        time.sleep(2)  # the first hosts what they meet at
        nodes.append(Node(folder, port))
        wait(lambda: last() > 60)
        nodes[1].kill()
        resumed(1)
        assert "plan for 1 rank: dp1, zero3, b1 x 4 in the place of dp2, zero3, b1 x 2" in nodes[0].said()
        nodes.append(Node(folder, port))
        resumed(2)
        nodes[2].agent.send_signal(signal.SIGTERM)
        resumed(3)
        nodes[0].agent.send_signal(signal.SIGTERM)
        assert nodes[0].agent.wait() == 1  # torchrun's own, of a signal
        assert "stopped by SIGTERM after step" in nodes[0].said()
    finally:
        for node in nodes:
            if node.agent.poll() is None:
                node.kill()
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
