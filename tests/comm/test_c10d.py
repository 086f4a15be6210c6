"""The transport over gloo."""

import pytest
import torch

from support import collectives
from support.distributed import ranks


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_chunks_arrive(size, dtype):
    shifts = list(range(1, size))
    for rank, got in enumerate(ranks(size).run(collectives.transported, shifts, dtype)):
        for shift, tensor in zip(shifts, got, strict=True):
            sent = torch.full((shift + 1, 3), 10 * ((rank - shift) % size) + shift).to(dtype).double()
            assert torch.equal(tensor, sent)
