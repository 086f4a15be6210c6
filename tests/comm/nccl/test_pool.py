"""The registered memory that ops lease: places, reuse, growth."""

import pytest
import torch

from parallel_ops.comm.nccl.pool import Lease, Pool

PAGE = 2 << 20


class Windows:
    """Makes segments of torch's memory, up to ``refused_from`` of them."""

    def __init__(self, refused_from=100):
        self.sizes, self.refused_from = [], refused_from

    def __call__(self, size):
        self.sizes.append(size)
        return None if len(self.sizes) > self.refused_from else self

    def tensor(self, device):
        assert device == -1
        return torch.utils.dlpack.to_dlpack(torch.zeros(self.sizes[-1], dtype=torch.uint8))


def pool(windows, *, least=PAGE, limit=4 * PAGE):
    return Pool(windows, -1, least=least, limit=limit)


def test_the_first_place_that_fits_is_taken_and_given_back_whole():
    memory = pool(Windows())
    a, b, c = (memory.take(nbytes, may_grow=True) for nbytes in (1, 513, 512))
    assert (a, b, c) == (Lease(0, 0, 512), Lease(0, 512, 1024), Lease(0, 1536, 512))
    memory.give(b)
    assert memory.take(600, may_grow=False) == b
    for lease in (a, c, b):
        memory.give(lease)
    assert memory.take(PAGE, may_grow=False) == Lease(0, 0, PAGE)


def test_it_grows_by_pages_up_to_its_limit_and_only_where_it_may():
    windows = Windows()
    memory = pool(windows)
    assert memory.take(1, may_grow=False) is None and windows.sizes == []
    assert memory.take(PAGE + 1, may_grow=True) == Lease(0, 0, PAGE + 512)
    assert memory.take(PAGE, may_grow=True) == Lease(1, 0, PAGE)  # a rest of less than a page is left
    assert windows.sizes == [2 * PAGE, PAGE]
    assert memory.take(2 * PAGE, may_grow=True) is None and len(windows.sizes) == 2
    assert memory.take(PAGE, may_grow=True) == Lease(2, 0, PAGE)


def test_no_rank_asks_again_for_memory_that_one_has_not():
    windows = Windows(refused_from=1)
    memory = pool(windows)
    assert memory.take(PAGE, may_grow=True) is not None
    assert memory.take(PAGE, may_grow=True) is None
    assert memory.take(512, may_grow=True) is None and len(windows.sizes) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_what_is_leased_is_a_tensor_whose_place_is_found(dtype):
    memory = pool(Windows())
    memory.take(1, may_grow=True)
    lease = memory.take(6 * dtype.itemsize, may_grow=True)
    x = memory.tensor(lease, (2, 3), dtype, 6 * dtype.itemsize)
    assert (x.shape, x.dtype) == ((2, 3), dtype) and x.is_contiguous()
    assert memory.find(x.data_ptr()) == (0, lease.start) and memory.find(x[1].data_ptr())[1] > lease.start
    assert memory.find(torch.zeros(1).data_ptr()) is None
