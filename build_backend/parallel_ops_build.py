"""setuptools' build backend, which uses the torch that is installed already.

pip builds in an environment of its own, for which it would download the newest torch of the index: gigabytes of CUDA
libraries, to compile an extension that is the same with any torch from 2.11 on. So torch is not in pyproject.toml's
``requires``; it is asked for here, and only if the environment that pip installs into has none.
"""

import importlib.metadata
import importlib.util
import re
import site
import sysconfig

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the other hooks)

OLDEST = (2, 11)

if importlib.util.find_spec("torch") is None:
    # pip's own environment hides these folders, but its Python is the one that they belong to. They are added last, so
    # that setuptools, ninja and pybind11 still come from the build requirements.
    for _folder in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        site.addsitedir(_folder)


def _torch() -> list[str]:
    """The requirement for torch: none if a torch that fits is installed."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = "0.0"
    major, minor = re.findall(r"\d+", version)[:2]
    return [] if (int(major), int(minor)) >= OLDEST else [f"torch>={OLDEST[0]}.{OLDEST[1]}"]


def get_requires_for_build_wheel(config_settings=None):
    """What a build needs beside pyproject.toml's ``requires``."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch()]


get_requires_for_build_editable = get_requires_for_build_wheel
