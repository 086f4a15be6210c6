"""The transport from end to end on the stand-in for NCCL, whose ranks are processes: what arrives, who may connect."""

import pytest

from support import nccl as support
from support.distributed import ranks

pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from support import nccl_ranks

fake = support.fake


@pytest.mark.parametrize(
    ("version", "called", "never"),
    [
        (22907, {"AllGather", "AlltoAll", "PutSignal", "WaitSignal", "CommWindowRegister"}, set()),
        (22809, {"AllGather", "AlltoAll", "Send", "Recv", "CommWindowRegister"}, {"PutSignal", "Signal"}),
        (22203, {"AllGather", "Send", "Recv"}, {"PutSignal", "AlltoAll", "CommWindowRegister", "MemAlloc"}),
    ],
)
def test_ops_have_the_bits_of_the_groups_backend(fake, version, called, never):
    for wrong, calls in ranks(4).run(nccl_ranks.same_bits, fake.path, version):
        assert wrong == [] and calls >= called and not calls & never


def test_sums_of_the_backend_are_those_of_nccl(fake):
    for equal in ranks(2).run(nccl_ranks.summed_by_nccl, fake.path):
        assert all(equal)


@pytest.mark.parametrize("version", [22907, 22809, 22203])
def test_each_exchange_has_the_bits_of_the_groups_backend(fake, version):
    assert ranks(4).run(nccl_ranks.differing, fake.path, version) == [[]] * 4


def test_no_rank_leases_what_one_has_no_memory_for(fake):
    assert ranks(2).run(nccl_ranks.limited, fake.path) == [[True, True, False]] * 2


def test_all_take_the_groups_backend_if_one_cannot_connect(fake):
    first, second = ranks(2).run(nccl_ranks.outcomes, fake.path)
    both = {
        "works": "",
        "another version": "the ranks have different versions of NCCL: [22907, 22809]",
        "shared GPU": "ranks 0 and 1 share a GPU",
        "unwanted": "rank 1: PARALLEL_OPS_TRANSPORT=c10d",
        "misspelt": "transport: rank 1: PARALLEL_OPS_TRANSPORT must be nccl or c10d",
        "puts": "False",
    }
    for name, reason in both.items():
        assert (first[name], second[name]) == (reason, reason)
    assert first["no library"] == "rank 1: it found no NCCL"
    assert second["no library"] == "rank 1: it found no NCCL: neither loaded nor installed"
    assert first["broken"] == "rank 1: it could not look for NCCL"
    assert second["broken"] == "rank 1: it could not look for NCCL: no such device"
    assert "rank 0 could not make its communicator: " in first["fails"] and "had no answer" in first["fails"]
    assert "rank 1 could not make its communicator: connect: rank 1 of 2: NCCL 2.29.7 reported" in second["fails"]
    assert first["no id"].startswith("rank 0 could not make its communicator: unique_id: NCCL 2.29.7 reported")
    assert second["no id"] == "rank 1 could not make its communicator: rank 0 has no unique id"


def test_groups_send_from_cuda_over_what_connects_once(monkeypatch):
    monkeypatch.delenv("PARALLEL_OPS_TRANSPORT", raising=False)
    for found in ranks(2).run(nccl_ranks.chosen, ""):
        assert found == {
            "before": None, "cpu": "c10d", "names": ["nccl", "nccl"], "calls": ["nccl"], "why": "", "log": []
        }  # fmt: skip
    for found in ranks(2).run(nccl_ranks.chosen, "ranks 0 and 1 share a GPU"):
        assert found["names"] == ["c10d", "c10d"] and found["calls"] == ["nccl"]
        assert found["why"] == "ranks 0 and 1 share a GPU" and len(found["log"]) == 1
        assert "sends over its backend: ranks 0 and 1 share a GPU" in found["log"][0]


@pytest.mark.parametrize("version", [22907, 22203])
def test_exchanges_are_captured_in_graphs(fake, version):
    leased = version >= 22700
    for found in ranks(2).run(nccl_ranks.captured, fake.path, version):
        assert found == {"steps": True, "early": False, "leased": leased, "right": True}
