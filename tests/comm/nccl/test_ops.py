"""The transport from end to end on the stand-in for NCCL, whose ranks are processes: what arrives, who may connect."""

import os

import pytest
import torch
import torch.distributed as dist

from parallel_ops.comm.transport.registry import use_transport
from support.ranks.distributed import Raised, ranks
from support.transports import nccl as support

pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from support.transports import nccl_ranks

fake = support.fake


def test_ops_have_the_bits_of_the_groups_backend(fake):
    for wrong, calls in ranks(4).run(nccl_ranks.same_bits, fake.path):
        assert wrong == [] and calls >= {"AllGather", "Send", "Recv"}


def test_sums_of_the_backend_are_those_of_nccl(fake):
    for equal in ranks(2).run(nccl_ranks.summed_by_nccl, fake.path):
        assert all(equal)


def test_each_exchange_has_the_bits_of_the_groups_backend(fake):
    assert ranks(4).run(nccl_ranks.differing, fake.path) == [[]] * 4


def test_a_rank_that_cannot_connect_is_named_on_all(fake):
    first, second = ranks(2).run(nccl_ranks.outcomes, fake.path)
    shared = {
        "works": "",
        "another version": "ValueError: transport: the ranks of the group make different calls: rank 0: "
        "PARALLEL_OPS_TRANSPORT=nccl over NCCL 2.29.7; rank 1: PARALLEL_OPS_TRANSPORT=nccl over NCCL 2.28.9",
        "shared GPU": "ValueError: transport: PARALLEL_OPS_TRANSPORT=nccl cannot be: ranks share a GPU",
        "no library": "ValueError: transport: the ranks of the group make different calls: rank 0: "
        "PARALLEL_OPS_TRANSPORT=nccl over NCCL 2.29.7; rank 1: PARALLEL_OPS_TRANSPORT=nccl cannot be: "
        "NCCL was not found",
        "none": "ValueError: transport: PARALLEL_OPS_TRANSPORT=nccl cannot be: the NCCL binding could not be loaded",
    }
    for name, reason in shared.items():
        assert (first[name], second[name]) == (reason, reason)
    assert "PeerError: transport: connect: rank 0 of 2" in first["fails"] and "had no answer" in first["fails"]
    assert "PeerError: transport: connect: rank 1 of 2: NCCL 2.29.7 reported" in second["fails"]
    assert first["no id"].startswith("NcclError: unique_id: NCCL 2.29.7 reported")
    assert second["no id"] == "PeerError: transport: rank 0 has no unique id"


def test_an_id_of_an_earlier_life_is_not_read_again(fake):
    assert ranks(2).run(nccl_ranks.two_lives, fake.path) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("variable", "argument", "name"),
    [(None, None, "c10d"), ("c10d", None, "c10d"), ("nccl", None, "nccl"), (None, "nccl", "nccl"),
     ("nccl", "c10d", "c10d")],
)  # fmt: skip
def test_groups_send_over_torch_unless_asked_otherwise(variable, argument, name):
    own = int(name == "nccl")
    for rank, found in enumerate(ranks(2).run(nccl_ranks.chosen, variable, argument)):
        order = found.pop("order")
        assert found == {"cpu": "c10d", "names": [name, name], "calls": own, "log": own * int(rank == 0)}
        assert argument != "nccl" or order == "1"


@pytest.mark.parametrize(
    ("bound", "variable", "said"), [("cuda:0", None, True), ("cuda:0", "0", False), (None, None, False)]
)
def test_an_order_of_launches_that_comes_too_late_is_said(bound, variable, said, monkeypatch, caplog):
    """A group that is bound to its GPU, as torch 2.15 binds all of NCCL, has its communicator already."""
    monkeypatch.setattr(os, "environ", {} if variable is None else {"NCCL_LAUNCH_ORDER_IMPLICIT": variable})
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    group.bound_device_id = None if bound is None else torch.device(bound)
    for _ in range(2):
        use_transport(group, "nccl")
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == said and all("NCCL_LAUNCH_ORDER_IMPLICIT=1" in text for text in warned)


def test_a_misspelt_transport_raises_on_every_rank():
    for outcome in ranks(2).outcomes(nccl_ranks.misspelt):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert "rank 1: transport (PARALLEL_OPS_TRANSPORT must be nccl or c10d, got 'ncll')" in outcome.message


def test_exchanges_are_captured_in_graphs(fake):
    for found in ranks(2).run(nccl_ranks.captured, fake.path):
        assert found == {"steps": True, "early": False, "right": True}
