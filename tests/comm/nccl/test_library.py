"""How NCCL is found, and the real library, where nvidia-nccl-cu13 or -cu12 is installed."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.transports import nccl as support

_nccl = pytest.importorskip("parallel_ops._nccl", reason="the NCCL binding is not built")

# All in one process, since importing torch takes seconds. Each step prints what was found.
ORDER = """
import importlib.metadata, os, sys
import torch, parallel_ops
print("loaded by import:", "libnccl" in open("/proc/self/maps").read(), "parallel_ops._nccl" in sys.modules)
from parallel_ops.comm.nccl.library import NotSupported, load_nccl

def found(step):
    load_nccl.cache_clear()
    try:
        print(step + ":", load_nccl().path)
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
    assert steps["loaded"].startswith(
        f"PARALLEL_OPS_NCCL={named} cannot be used: this process has already loaded {system}, and two copies"
    )


@pytest.fixture
def library():
    return _nccl.Library.open(str(support.installed()))


def test_the_real_library(library):
    assert library.version_code >= 20000 and library.version.startswith("2.")
    assert library.unique_id() != library.unique_id()
    assert len(library.unique_id()) == 128
    real = ctypes.CDLL(library.path)
    table = re.findall(r"F\((\w+), ", (support.ROOT / "csrc/nccl/api.h").read_text())
    assert len(table) > 14 and all(hasattr(real, f"nccl{name}") for name in table)


# In a process of its own, as that of other tests has a driver that stands in.
ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_nccl", sys.argv[1])
nccl = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nccl)
library = nccl.Library.open(sys.argv[2])
try:
    nccl.Communicator(library, library.unique_id(), 1, 0, 0, 16, 5.0)
except nccl.NotSupported as error:
    print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_connecting_without_a_driver_says_what_is_wrong(library):
    run = subprocess.run(
        [sys.executable, "-c", ALONE, _nccl.__file__, library.path], capture_output=True, text=True, check=True
    )
    assert run.stdout == "the CUDA driver, libcuda.so.1, is not there or too old\n"
