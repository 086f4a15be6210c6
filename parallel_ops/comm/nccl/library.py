"""Finds NCCL. Nothing is loaded before ``load_nccl`` is called.

In this order:

1. the ``libnccl.so.2`` that the process has loaded already, which is torch's: two copies would each have their own
   threads, buffers and view of the network;
2. the file that the environment variable ``PARALLEL_OPS_NCCL`` names;
3. the installed package ``nvidia-nccl-cu13`` or ``nvidia-nccl-cu12``, the one of torch's CUDA version first;
4. ``libnccl.so.2`` where the dynamic loader looks.
"""

import functools
import importlib.metadata
import os
from pathlib import Path

import torch

try:
    from parallel_ops._nccl import Library, NcclError, NotSupported
except ImportError as error:
    raise ImportError(
        f"parallel_ops.comm.nccl: the NCCL binding could not be loaded ({error}); it is built where pybind11 is "
        "installed, for one version of Python: pip install pybind11, then PARALLEL_OPS_NCCL_BUILD=1 pip install "
        "--no-build-isolation --force-reinstall --no-deps . in its source folder"
    ) from error

__all__ = ["Library", "NcclError", "NotSupported", "load_nccl"]

_SONAME, _VARIABLE = "libnccl.so.2", "PARALLEL_OPS_NCCL"


@functools.cache
def load_nccl() -> Library:
    """The NCCL library of this process; the same one on every call.

    Raises:
        NotSupported: none was found, or the one that ``PARALLEL_OPS_NCCL`` names cannot be loaded or is not the one
            that the process has loaded already.
    """
    named = os.environ.get(_VARIABLE)
    if (loaded := Library.loaded()) is not None:
        if named and Path(named).resolve() != Path(loaded.path).resolve():
            raise NotSupported(
                f"{_VARIABLE}={named} cannot be used: this process has already loaded {loaded.path}, "
                "and two copies of NCCL do not work together"
            )
        return loaded
    path = named or next(map(str, installed_libraries()), _SONAME)
    try:
        return Library.open(path)
    except RuntimeError as error:
        what = f"{_VARIABLE}={named}" if named else f"NCCL was not found as {path}"
        raise NotSupported(f"{what} ({error})") from error


def installed_libraries() -> list[Path]:
    """The libraries of the installed NCCL packages, that of torch's CUDA version first."""
    own = (torch.version.cuda or "").partition(".")[0]
    found = []
    for major in sorted(("13", "12"), key=lambda major: major != own):
        try:
            files = importlib.metadata.files(f"nvidia-nccl-cu{major}") or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found += [path for file in files if file.name == _SONAME and (path := Path(str(file.locate()))).exists()]
    return found
