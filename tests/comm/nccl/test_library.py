"""How NCCL is found, and the real library and header, where nvidia-nccl-cu13 or -cu12 is installed."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import nccl as support

_nccl = pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

# All in one process, since importing torch takes seconds. Each step prints what was found.
ORDER = """
import ctypes, importlib.metadata, os, sys, warnings
import torch, parallel_ops
print("loaded by import:", "libnccl" in open("/proc/self/maps").read(), "parallel_ops._nccl" in sys.modules)
from parallel_ops.comm.nccl.library import NotSupported, load_nccl

def found(step):
    load_nccl.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(step + ":", load_nccl().path, *[w.message for w in caught])
    except NotSupported as error:
        print(step + ":", error)

named, missing, packages = sys.argv[1:]
os.environ["PARALLEL_OPS_NCCL"] = missing
found("missing")
os.environ["PARALLEL_OPS_NCCL"] = named
found("named")
del os.environ["PARALLEL_OPS_NCCL"]
sys.path.insert(0, packages)
torch.version.cuda = None
found("package")
torch.version.cuda = "12.8"
found("package of torch")
def none(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.files = none
found("system")
os.environ["PARALLEL_OPS_NCCL"] = named
found("loaded")
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch has loaded NCCL already")
def test_order(tmp_path):
    named = support.build("named/libnccl.so.2")
    system = support.build("system/libnccl.so.2")
    packages = {}
    for name in ("nvidia_nccl_cu12", "nvidia_nccl_cu13"):
        info = tmp_path / f"{name}-2.28.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 2.28.3\n")
        (info / "RECORD").write_text(f"{name}/lib/libnccl.so.2,,\n{name}/lib/other.so,,\n")
        packages[name] = tmp_path / name / "lib/libnccl.so.2"
        packages[name].parent.mkdir(parents=True)
        packages[name].write_bytes(Path(named).read_bytes())
    env = {**os.environ, "LD_LIBRARY_PATH": str(Path(system).parent)}
    env.pop("PARALLEL_OPS_NCCL", None)
    missing = str(tmp_path / "missing.so")
    result = subprocess.run(
        [sys.executable, "-c", ORDER, named, missing, str(tmp_path)],
        capture_output=True, text=True, cwd="/", env=env, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    steps = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert steps["loaded by import"] == "False False"
    assert steps["missing"].startswith(f"PARALLEL_OPS_NCCL={missing} ({missing}: cannot open")
    assert steps["named"] == named
    assert steps["package"] == str(packages["nvidia_nccl_cu13"])
    assert steps["package of torch"] == str(packages["nvidia_nccl_cu12"])
    assert steps["system"] == system
    path, _, warning = steps["loaded"].partition(" ")
    assert path == system
    assert warning.startswith(f"PARALLEL_OPS_NCCL={named} is ignored: this process has already loaded {system}")


def installed() -> Path:
    from parallel_ops.comm.nccl.library import installed_libraries

    named = os.environ.get("PARALLEL_OPS_NCCL")
    paths = [Path(named)] if named else installed_libraries()
    if not paths:
        pytest.skip("needs nvidia-nccl-cu13 or nvidia-nccl-cu12, or PARALLEL_OPS_NCCL naming a library")
    return paths[0]


@pytest.fixture
def library():
    return _nccl.Library.open(str(installed()))


def test_the_real_library(library):
    assert library.version_code >= 20000 and library.version.startswith("2.")
    assert library.unique_id() != library.unique_id()
    assert len(library.unique_id()) == 128
    real = ctypes.CDLL(library.path)
    table = re.findall(r"F\((\w+), version\(([\d, ]+)\)", (support.ROOT / "csrc/nccl/api.h").read_text())
    assert len(table) > 20
    for name, since in table:
        major, minor, *patch = map(int, since.split(","))
        if 10000 * major + 100 * minor + sum(patch) <= library.version_code:
            assert hasattr(real, f"nccl{name}")


# In a process of its own, as that of other tests has a driver that stands in.
ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_nccl", sys.argv[1])
nccl = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nccl)
library = nccl.Library.open(sys.argv[2])
try:
    nccl.Communicator(library, library.unique_id(), 1, 0, 0, 0, 16, 5.0, 5.0)
except nccl.NotSupported as error:
    print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_connecting_without_a_driver_says_what_is_wrong(library):
    run = subprocess.run(
        [sys.executable, "-c", ALONE, _nccl.__file__, library.path], capture_output=True, text=True, check=True
    )
    assert run.stdout == "the CUDA driver, libcuda.so.1, is not there or too old\n"


STUBS = {
    "cuda_runtime.h": "#include <cstddef>\n#define CUDART_VERSION 0\ntypedef struct CUstream_st* cudaStream_t;\n"
    "typedef struct CUevent_st* cudaEvent_t;\n",
    "cuda_fp16.h": "",
}

COMPARISON = """
#include <nccl.h>
#include <nccl_device/core.h>
#include <cstddef>
#include <type_traits>
#include "api.h"
namespace p = parallel_ops::nccl;

template <class A, class B>
constexpr bool alike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
                       std::is_class_v<A> == std::is_class_v<B>;
template <class R, class... A, class S, class... B>
constexpr bool same_call(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) return false;
  else return alike<R, S> && (alike<A, B> && ...);
}
#define COMPARE(name, since, result, parameters) \\
  static_assert(same_call(&::nccl##name, static_cast<result (*) parameters>(nullptr)), "nccl" #name);
"""

FIELDS = {
    "size": "size",
    "magic": "magic",
    "header_version": "version",
    "blocking": "blocking",
    "cga_cluster_size": "cgaClusterSize",
    "min_ctas": "minCTAs",
    "max_ctas": "maxCTAs",
    "net_name": "netName",
    "split_share": "splitShare",
    "traffic_class": "trafficClass",
    "comm_name": "commName",
    "collnet_enable": "collnetEnable",
    "cta_policy": "CTAPolicy",
    "shrink_share": "shrinkShare",
    "nvls_ctas": "nvlsCTAs",
    "channels_per_net_peer": "nChannelsPerNetPeer",
    "nvlink_centric_sched": "nvlinkCentricSched",
}
VALUES = {
    **{f"k{n}": f"nccl{n}" for n in ("Success", "UnhandledCudaError", "SystemError", "InternalError", "RemoteError")},
    **{f"k{n}": f"nccl{n}" for n in ("InvalidArgument", "InvalidUsage", "InProgress")},
    **{f"k{n}": f"nccl{n}" for n in ("Int8", "Uint8", "Int32", "Uint32", "Int64", "Uint64", "Float16", "Float32")},
    **{f"k{n}": f"nccl{n}" for n in ("Float64", "Bfloat16", "Float8e4m3", "Float8e5m2")},
    "kSum": "ncclSum",
    "kUndefined": "NCCL_CONFIG_UNDEF_INT",
    "kCtaPolicyZero": "NCCL_CTA_POLICY_ZERO",
    "kWindowSymmetric": "NCCL_WIN_COLL_SYMMETRIC",
}
PROPERTIES = {
    "rank": "rank",
    "size_of_group": "nRanks",
    "device_api": "deviceApiSupport",
    "gin_type": "ginType",
    "lsa_teams": "nLsaTeams",
    "host_rma": "hostRmaSupport",
    "railed_gin_type": "railedGinType",
}
DESCRIPTOR = {"count": "opCnt", "peer": "peer", "signal_index": "sigIdx", "context": "ctx"}


def test_own_declarations_agree_with_the_header(tmp_path):
    """Layouts, values and signatures, checked by the compiler; CUDA's types are stubs, so no toolkit is needed."""
    include = installed().parent.parent / "include"
    if not (include / "nccl.h").exists():
        pytest.skip("needs nccl.h beside the library")
    if int(re.search(r"NCCL_VERSION_CODE (\d+)", (include / "nccl.h").read_text())[1]) < 22907:
        pytest.skip("needs the header of NCCL 2.29.7 or later, which has all functions")
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
    lines = [COMPARISON, "namespace parallel_ops::nccl {", "PARALLEL_OPS_NCCL_FUNCTIONS(COMPARE)", "}"]
    lines += [
        f"static_assert(offsetof(p::{kind}, {own}) == offsetof({theirs}, {field}));"
        for kind, theirs, fields in (
            ("RawConfig", "ncclConfig_t", FIELDS),
            ("Properties", "ncclCommProperties_t", PROPERTIES),
            ("WaitSignalDesc", "ncclWaitSignalDesc_t", DESCRIPTOR),
        )
        for own, field in fields.items()
    ]
    lines += [f"static_assert(int(p::{own}) == int({theirs}));" for own, theirs in VALUES.items()]
    lines += [
        "static_assert(sizeof(p::UniqueId) == sizeof(ncclUniqueId));",
        "static_assert(sizeof(p::RawConfig) <= sizeof(ncclConfig_t));",
        "static_assert(sizeof(p::Properties) <= sizeof(ncclCommProperties_t));",
        "static_assert(sizeof(p::WaitSignalDesc) == sizeof(ncclWaitSignalDesc_t));",
        "static_assert(p::version(2, NCCL_MINOR, NCCL_PATCH) == NCCL_VERSION_CODE);",
        "constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;",
        "static_assert(p::RawConfig().magic == theirs.magic);",
    ]
    source = tmp_path / "comparison.cpp"
    source.write_text("\n".join(lines) + "\n")
    support.compile_cpp(source, "-fsyntax-only", "-I", include, "-I", tmp_path)
