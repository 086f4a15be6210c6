"""ParallelMesh: the layout of ranks, the groups, and what it refuses."""

import pytest

from parallel_ops import ParallelMesh
from support import mesh
from support.distributed import Raised, ranks


@pytest.mark.parametrize("sizes", mesh.layouts(4), ids=str)
def test_groups_follow_the_layout(sizes):
    tp, cp, pp, dp, ep = (sizes[n] for n in ("tp", "cp", "pp", "dp", "ep"))
    strides = {"tp": 1, "cp": tp, "pp": tp * cp, "dp": tp * cp * pp}
    for rank, groups in enumerate(ranks(4).run(mesh.described, sizes)):
        at = {name: rank // strides[name] % sizes[name] for name in strides}
        for name, stride in strides.items():
            expected = [rank + (i - at[name]) * stride for i in range(sizes[name])]
            assert groups[name][:3] == (sizes[name], at[name], expected)
        first = rank - at["dp"] * strides["dp"]
        replicas = [first + i * strides["dp"] for i in range(dp)]
        block = at["dp"] // ep
        assert groups["ep"][2] == replicas[block * ep : (block + 1) * ep]
        assert groups["expert_dp"][2] == replicas[at["dp"] % ep :: ep]
        assert groups["dp_cp"][2] == [
            r + i * strides["cp"] for r in (x - at["cp"] * strides["cp"] for x in replicas) for i in range(cp)
        ]
        for size, own, members, group in (groups[name] for name in mesh.NAMES):
            assert len(members) == size and members[own] == rank
            assert group == (None if size == 1 else members)
        assert groups["device_mesh"] == (("dp", "pp", "cp", "tp"), (dp, pp, cp, tp))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, "pp=1 * dp=1 * cp=1 * tp=3 is 3, but the default process group has 2 ranks"),
        ({}, "is 1, but the default process group has 2 ranks"),
        ({"dp": 2, "ep": 4}, "ep=4 must divide dp=2"),
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"tp": 2.0}, "tp must be an int, got float"),
        ({"tp": 2, "device_type": "tpu"}, "device_type must be 'cpu' or 'cuda', got 'tpu'"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    for outcome in ranks(2).outcomes(mesh.described, sizes):
        assert isinstance(outcome, Raised)
        assert outcome.type in ("ValueError", "TypeError")
        assert message in outcome.message


def test_one_rank_without_a_process_group():
    alone = ParallelMesh()
    assert alone.group("tp") is None
    assert (alone.size("dp_cp"), alone.rank("ep"), alone.ranks("pp")) == (1, 0, [0])
    assert repr(alone) == "ParallelMesh(pp=1, dp=1, cp=1, tp=1, ep=1)"
    with pytest.raises(RuntimeError, match="init_process_group"):
        _ = alone.device_mesh
    with pytest.raises(ValueError, match="no group 'sp'; the groups are dp, pp, cp, tp, ep, expert_dp, dp_cp"):
        alone.group("sp")
    with pytest.raises(ValueError, match="tp=2 is 2, but there is no default process group"):
        ParallelMesh(tp=2)
