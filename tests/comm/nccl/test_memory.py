"""Windows on memory of NCCL, and when that memory is freed; NCCL answers as it is told."""

import gc
import weakref

import pytest
import torch

from support import nccl as support

_nccl = pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from parallel_ops.comm.nccl import communicator as nccl  # noqa: E402
from parallel_ops.comm.nccl import memory as nccl_memory  # noqa: E402
from parallel_ops.comm.nccl.memory import Window, allocate  # noqa: E402
from support import nccl_communicator  # noqa: E402
from support.nccl_communicator import communicator  # noqa: E402

fake, recorded = support.fake, nccl_communicator.recorded


def page():
    """A tensor at an address that NCCL takes."""
    memory = torch.zeros(8192, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 4096 :][:64]


def test_windows(fake):
    comm, tensor = communicator(fake), page()
    window = Window(comm, tensor)
    window.close()
    window.close()
    register, deregister = fake.log()[-2:]
    assert register == f"CommWindowRegister {tensor.data_ptr():x} size=64 flags=1"
    assert deregister == "CommWindowDeregister 1234"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: page()[1:], ValueError, "tensor must be contiguous, not empty and aligned to 4096 bytes"),
        (lambda: page().to("meta"), ValueError, "tensor is on meta, the communicator on cpu"),
        (lambda: [1], TypeError, "tensor must be a tensor, got list"),
    ],
)
def test_a_rank_without_a_window_tells_the_others_first(fake, make, error, message):
    comm = communicator(fake)
    with pytest.raises(error, match=f"^Window: {message}"):
        Window(comm, make())
    assert [line.split()[0] for line in fake.log()[1:]] == ["GroupStart", "AllReduce", "GroupEnd"] and comm.alive
    fake.all_reduce(1)
    with pytest.raises(nccl.NotSupported, match="Window: rank 0 of the communicator rejected its arguments"):
        Window(comm, page())


@pytest.mark.parametrize("end", [lambda comm, window: window.close(), lambda comm, _: comm.close(),
                                 lambda comm, _: comm.abort("enough")])  # fmt: skip
def test_a_registered_tensor_stays(fake, end):
    comm, tensor = communicator(fake), page()
    alive = weakref.ref(tensor)
    window = Window(comm, tensor)
    del tensor
    window.tensor = None
    gc.collect()
    assert alive() is not None
    end(comm, window)
    gc.collect()
    assert alive() is None


def test_memory_is_freed_after_the_device_is_done(fake, monkeypatch):
    library = _nccl.Library.open(fake.path)
    device, order = torch.device("cuda", 0), []

    def synchronize(of):
        order.append((of, any("MemFree" in line for line in fake.log())))

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    buffer = nccl_memory._Buffer(_nccl.Memory(library, 64), device)
    del buffer
    assert order == [(device, False)]
    assert fake.log()[-1] == "MemFree"


def test_memory_that_may_be_in_use_is_kept(fake, monkeypatch):
    library = _nccl.Library.open(fake.path)
    first, second = (_nccl.Memory(library, 64) for _ in range(2))
    device = torch.device("cuda", 0)

    def capturing(_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "synchronize", capturing)
    with pytest.raises(RuntimeError, match="capturing"):
        nccl_memory._release(first, device)
    del first
    assert not any("MemFree" in line for line in fake.log())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    nccl_memory._release(second, device)
    del second
    assert fake.log()[-2:] == ["MemFree", "MemFree"]


def test_no_memory_of_no_elements():
    with pytest.raises(ValueError, match=r"shape must have at least one element, got \(0, 4\)"):
        allocate((0, 4), torch.float32)
