"""The transport over gloo, and over gloo beside NCCL."""

import pytest
import torch

from support.ranks.distributed import ranks
from support.transports import collectives


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_chunks_arrive(size, dtype):
    shifts = list(range(1, size))
    for rank, got in enumerate(ranks(size).run(collectives.transported, shifts, dtype)):
        for shift, tensor in zip(shifts, got, strict=True):
            sent = torch.full((shift + 1, 3), 10 * ((rank - shift) % size) + shift).to(dtype).double()
            assert torch.equal(tensor, sent)


def test_a_group_with_gloo_and_nccl_sends_from_the_cpu():
    first, second = ranks(2).run(collectives.transported, [1], torch.float32, "cpu:gloo,cuda:nccl")
    assert torch.equal(first[0], torch.full((2, 3), 11.0).double())
    assert torch.equal(second[0], torch.full((2, 3), 1.0).double())


def test_chunks_on_other_devices():
    for said in ranks(2).run(collectives.refused_chunks):
        assert said == [
            "op: chunks[0] is on meta, but c10d sends from cpu",
            "op: chunks[0] is on meta, but c10d sends from cpu and cuda",
            "op: chunks[1] is on meta, but chunks[0] on cpu; post them as two batches",
        ]
