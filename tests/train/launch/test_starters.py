"""Ranks as torchrun and other starters make them: their variables, GPUs and names."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from parallel_ops.train.launch.rendezvous import check_environment, name_of_start
from parallel_ops.train.launch.worker import gpu_of_rank, prepare_captures
from support.runs.trainer import settings_of

RANK_OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, None),
        (RANK_OF_TWO, None),
        ({"RANK": "", "WORLD_SIZE": ""}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set, beside RANK=0, WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT are not set"),
        (RANK_OF_TWO | {"RANK": "a"}, "RANK must be an integer of at least 0, got 'a'"),
        (RANK_OF_TWO | {"RANK": "-1"}, "RANK must be an integer of at least 0, got '-1'"),
        (RANK_OF_TWO | {"RANK": "2"}, "RANK must be less than WORLD_SIZE=2, got 2"),
        (RANK_OF_TWO | {"WORLD_SIZE": "two"}, "WORLD_SIZE must be an integer of at least 1, got 'two'"),
        (RANK_OF_TWO | {"MASTER_PORT": "http"}, "MASTER_PORT must be an integer of at least 1, got 'http'"),
        (RANK_OF_TWO | {"MASTER_PORT": "70000"}, "MASTER_PORT must be at most 65535, got 70000"),
        (RANK_OF_TWO | {"LOCAL_RANK": "x"}, "LOCAL_RANK must be an integer of at least 0, got 'x'"),
        (RANK_OF_TWO | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK must be less than LOCAL_WORLD_SIZE=2"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS is 4: srun has started"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID is 3: srun has started .* RANK=\\$SLURM_PROCID, WORLD_SIZE"),
        (RANK_OF_TWO | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, None),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2: mpirun has started"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_SIZE is 2: mpiexec has started"),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE is 2: mpirun has started"),
    ],
)
def test_variables_of_starters_are_named(monkeypatch, variables, message):
    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "SLURM_", "OMPI_", "PMI", "MV2_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_environment()


def test_ranks_find_a_name_that_no_start_before_them_had():
    """Three starts on one store, of which the second breaks off: its rank 1 asks and is gone."""
    store = HashStore()

    def start(ranks):
        with ThreadPoolExecutor(len(ranks)) as pool:
            return set(pool.map(lambda rank: name_of_start(store, rank, 3, 60), ranks))

    first = start((0, 1, 2))
    store.set("parallel_ops/3/1", "nobody")
    last = start((2, 0, 1))
    assert len(first) == len(last) == 1 and first != last


@pytest.mark.parametrize(
    ("variables", "visible", "found"),
    [
        ({"LOCAL_RANK": "0"}, 8, 0),
        ({"LOCAL_RANK": "7"}, 8, 7),
        ({}, 8, 0),
        ({"LOCAL_RANK": "5"}, 1, 0),
        (RANK_OF_TWO, 2, "LOCAL_RANK is not set, .* 2 GPUs"),
        ({"LOCAL_RANK": "4"}, 4, "LOCAL_RANK is 4, but this process sees 4 GPUs; start at most as many ranks"),
    ],
)
def test_a_rank_takes_its_own_gpu(variables, visible, found, monkeypatch):
    """Also where the launcher lets each process see its own alone, as SLURM does with one GPU a task."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    if isinstance(found, int):
        assert gpu_of_rank() == found
        return
    with pytest.raises(ValueError, match=found):
        gpu_of_rank()


@pytest.mark.parametrize(
    ("graph", "given", "found"), [(False, None, None), ("step", None, "0"), ("layers", None, "0"), ("step", "1", "1")]
)
def test_nccl_registers_no_buffers_of_captures(graph, given, found, data, monkeypatch):
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")  # restored
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    if given is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", given)
    prepare_captures(settings_of(data, run={"cuda_graph": graph}))
    assert os.environ.get("NCCL_GRAPH_REGISTER") == found
