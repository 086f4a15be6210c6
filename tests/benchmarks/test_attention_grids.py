"""How full the grids of attention keep a GPU, and the order in which their programs start."""

import pytest

from benchmarks.gpu_model import attention, devices
from benchmarks.gpu_model.attention import Grid, busy, grids

GPUS = {d.name: d for d in devices.DEVICES}
CAUSAL = [shape for shape in attention.SHAPES if shape[-1] is None]


def test_the_schedule():
    assert busy([1] * 8, 4) == 1.0
    assert busy([4, 1, 1, 1, 1], 2) == 1.0
    assert busy([1, 1, 1, 1, 4], 2) == 8 / 12
    grid = Grid("_forward_kernel", 256, 128, 64, pairs=3, section=2, members=1, window=None)
    assert grid.times() == [5, 5, 3, 3, 5, 3]  # two heads, longest first, then the third
    keys = Grid("_keys_kernel", 256, 128, 64, pairs=4, section=4, members=3, window=None)
    assert keys.times() == [13] * 4 + [7] * 4
    windowed = Grid("_forward_kernel", 512, 128, 64, pairs=1, section=1, members=1, window=64)
    assert windowed.times() == [4, 4, 4, 3]


@pytest.mark.parametrize("shape", CAUSAL, ids=str)
def test_grids_fill_an_h100(shape):
    for grid in grids(shape, GPUS["H100 SXM"], compiled=False):
        assert grid.busy(132) >= 0.95, f"{grid}: {grid.busy(132):.1%}"


@pytest.mark.parametrize("shape", CAUSAL, ids=str)
def test_grids_fill_a_b200(shape):
    """Of 8 heads and 4,096 tokens the longest program of 128 queries takes more than a 148th of all work."""
    for grid in grids(shape, GPUS["B200"], compiled=False):
        least = 0.89 if shape[1] == 4096 and grid.kernel != "_keys_kernel" else 0.94
        assert grid.busy(148) >= least, f"{grid}: {grid.busy(148):.1%}"


def test_a_window_of_1024():
    for grid in grids((1, 8192, 32, 8, 128, 1024), GPUS["H100 SXM"], compiled=False):
        assert grid.busy(132) >= 0.9, f"{grid}: {grid.busy(132):.1%}"


def test_sections_fit_the_l2_cache():
    """8 heads of 8,192 tokens have 4 MB of keys and values each; 32 sections of one head would be as before."""
    forward, keys, queries = grids((1, 8192, 32, 32, 128, None), GPUS["H100 SXM"], compiled=False)
    assert forward.section == queries.section == 8 and keys.section == 8
    assert grids((1, 8192, 8, 1, 128, None), GPUS["H100 SXM"], compiled=False)[0].section == 8
