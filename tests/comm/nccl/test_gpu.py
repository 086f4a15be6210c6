"""The transport with the real NCCL, one rank on a GPU."""

import pytest
import torch

pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from parallel_ops._internal.distributed.compat import current_raw_stream
from parallel_ops._nccl import Communicator
from parallel_ops.comm.nccl.library import load_nccl
from parallel_ops.comm.nccl.transport import MAX_CTAS, NcclTransport


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_collectives_on_a_gpu_eager_and_captured():
    library, device = load_nccl(), torch.device("cuda", torch.cuda.current_device())
    native = Communicator(library, library.unique_id(), 1, 0, device.index, MAX_CTAS, 60.0)
    end = NcclTransport(native, 0, 1, device, current_raw_stream(device))
    x = torch.arange(6.0, device=device).view(2, 3)
    gathered, total = torch.zeros_like(x), torch.zeros_like(x)

    def exchange():
        end.all_gather("op", gathered, x).wait()
        end.reduce_scatter("op", total, gathered).wait()
        end.all_reduce("op", total).wait()

    exchange()
    assert torch.equal(gathered, x) and torch.equal(total, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchange()
    x.add_(1)
    graph.replay()
    assert torch.equal(total, x)
