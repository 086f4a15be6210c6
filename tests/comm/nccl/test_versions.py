"""What the binding asks of the version of a library, before it calls anything that may not be there."""

import pytest

from support import nccl as support

_nccl = pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

from support.nccl_binding import CALLS, call, communicator, library  # noqa: E402

fake = support.fake


def test_a_library_knows_its_version_and_path(fake):
    assert (library(fake).version, library(fake).path) == ("2.28.3", fake.path)
    fake.version(2708)  # the shorter encoding of before 2.9
    assert library(fake).version == "2.7.8"


def test_a_function_that_is_missing_from_a_new_enough_library_is_not_called(tmp_path):
    source = tmp_path / "bare.cpp"
    source.write_text(
        'extern "C" int ncclGetVersion(int* v) { *v = 23203; return 0; }\n'
        'extern "C" const char* ncclGetErrorString(int) { return ""; }\n'
    )
    support.compile_cpp(source, "-shared", "-fPIC", "-o", tmp_path / "bare.so")
    with pytest.raises(_nccl.NotSupported, match=r"ncclGetUniqueId is not in NCCL 2\.32\.3, from .*bare\.so"):
        _nccl.Library.open(str(tmp_path / "bare.so")).unique_id()


@pytest.mark.parametrize(
    ("setting", "value", "since"),
    [
        ("max_ctas", 4, 21700),
        ("net_name", "IB", 21700),
        ("traffic_class", 1, 22500),
        ("comm_name", "x", 22700),
        ("cta_policy", 1, 22700),
        ("cta_policy", 2, 22800),
        ("nvls_ctas", 2, 22700),
        ("channels_per_net_peer", 2, 22800),
    ],
)
def test_settings_need_their_version(fake, setting, value, since):
    fake.version(since - 1)
    needed = f"{since // 10000}.{since // 100 % 100}.0"
    with pytest.raises(_nccl.NotSupported, match=rf"config\.{setting}.* needs NCCL {needed} or later; this is 2\."):
        communicator(fake, **{setting: value})
    assert fake.log() == []
    fake.version(since)
    assert communicator(fake, **{setting: value}).alive()


def test_types_need_their_version_before_the_group_starts(fake):
    fake.version(22303)
    comm = communicator(fake)
    calls = [call(**CALLS["Send"][0]), call(**CALLS["AllReduce"][0], type=10)]
    with pytest.raises(_nccl.NotSupported, match=r"a float8 tensor needs NCCL 2\.24\.0 or later; this is 2\.23\.3"):
        comm.launch("op", calls, 0, 5.0)
    assert len(fake.log()) == 1 and comm.alive()


def test_communicators_need_their_version(fake):
    fake.version(21303)
    with pytest.raises(_nccl.NotSupported, match=r"ncclCommInitRankConfig needs NCCL 2\.14\.0 or later"):
        communicator(fake)
    assert fake.log() == []
