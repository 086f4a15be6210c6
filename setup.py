"""Build of the compiled extension. Everything else is declared in pyproject.toml.

Environment:
  PARALLEL_OPS_NCCL_BUILD
                        unset: build csrc/nccl if pybind11 is there, and go on without if it does not compile;
                        1: build it or fail; 0: never.
  MAX_JOBS              compilers run side by side.
  CXX, CFLAGS           the compiler; its flags, of which -march=... is for what processors g++ 11 and Clang compile.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from glob import glob

from setuptools import Extension, find_packages, setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    torch = None

# The oldest torch that the built wheel runs on (its stable ABI).
TORCH_TARGET_VERSION = "0x020b000000000000"

# A subpackage of parallel_ops that lies beside it in the source tree.
KERNELS = "parallel_ops.triton_kernels"


def packages() -> list[str]:
    """Every folder with an ``__init__.py`` of the two trees."""
    kernels = [f"{KERNELS}.{name}" for name in find_packages("triton_kernels")]
    return [*find_packages(include=["parallel_ops", "parallel_ops.*"]), KERNELS, *kernels]


def nccl_extension() -> Extension | None:
    """The NCCL binding. It needs neither NCCL nor CUDA to build, but pybind11, which has no stable ABI."""
    wanted = os.environ.get("PARALLEL_OPS_NCCL_BUILD", "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"parallel_ops: PARALLEL_OPS_NCCL_BUILD must be unset, 0 or 1, got {wanted!r}")
    if wanted == "0" or sys.platform != "linux":
        return None
    try:
        import pybind11
    except ImportError:
        if wanted == "1":
            sys.exit("parallel_ops: PARALLEL_OPS_NCCL_BUILD=1 needs pybind11; run: pip install pybind11")
        return None
    return Extension(
        name="parallel_ops._nccl",
        sources=sorted(glob("csrc/nccl/*.cpp")),
        depends=sorted(glob("csrc/nccl/*.h")),
        include_dirs=[pybind11.get_include()],
        # Its calls take far longer than what is around them; -O1 keeps the build short.
        extra_compile_args=["-O1", "-g0", "-std=c++17", "-fvisibility=hidden", "-Wall", "-Wextra"],
        extra_link_args=["-ldl"],
        optional=wanted != "1",
    )


def build_command() -> type:
    """The ``build_ext`` command."""

    class BuildExtension(cpp_extension.BuildExtension):
        """torch's, in which a failure of an optional extension is a warning, as it is in setuptools' own."""

        def build_extensions(self) -> None:
            # Not in a temporary folder, so that ninja compiles again only what a change concerns.
            if self.editable_mode:
                self.build_temp = f"build/{self.plat_name}-{sys.implementation.cache_tag}"
            super().build_extensions()

        def build_extension(self, ext: Extension) -> None:
            try:
                super().build_extension(ext)
            except Exception as error:
                if not ext.optional:
                    raise
                self.warn(f"{ext.name} was not built, since it failed to compile: {error}")

    return BuildExtension


def check_compiler() -> None:
    """One clear sentence instead of a page of ninja output."""
    compiler = os.environ.get("CXX", "c++").split()[-1]
    if shutil.which(compiler) is None:
        sys.exit(f"parallel_ops: no C++ compiler found (looked for {compiler!r}); install g++ 11 or later, or set CXX")


def instruction_set() -> list[str]:
    """Flags for compilers that cannot compile a function for several instruction sets, to take the processor's.

    GCC 12 and later can. What others compile would be for the first processors of 64 bits: they compile for AVX2, if
    this machine has it, unless CFLAGS says for what.
    """
    compiler = os.environ.get("CXX", "c++").split()
    if platform.machine() != "x86_64" or "-march=" in os.environ.get("CFLAGS", "") or not shutil.which(compiler[0]):
        return []
    command = [*compiler, "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    gcc = re.search(r"#define __GNUC__ (\d+)", macros)
    if "#define __clang__ " not in macros and gcc is not None and int(gcc[1]) >= 12:
        return []
    return ["-march=x86-64-v3"] if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else []


def extension() -> Extension:
    # NaN and infinities keep their meaning, so no -ffast-math; these two only let loops with a choice vectorise.
    flags = [
        "-O3",
        "-g0",  # Python asks for debugging information, which takes a quarter of the build
        "-std=c++17",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Wno-psabi",  # vectors are passed between inlined functions alone
        *instruction_set(),
    ]
    return cpp_extension.CppExtension(
        name="parallel_ops._C",
        sources=["csrc/registration.cpp", *sorted(glob("csrc/cpu/**/*.cpp", recursive=True))],
        depends=sorted(glob("csrc/**/*.h", recursive=True)),
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
        extra_compile_args=flags,
        py_limited_api=True,
    )


def extensions() -> dict:
    """The arguments of ``setup`` that concern the extensions. Metadata and the sdist need no torch and no compiler."""
    builds = not {"sdist", "egg_info", "dist_info", "--version"} & set(sys.argv)
    if torch is None and builds:
        sys.exit("parallel_ops: building needs torch 2.11 or later; install it, then run: pip install .")
    if torch is None:
        return {}
    if builds:
        check_compiler()
    nccl = nccl_extension()
    return {
        "ext_modules": [extension()] if nccl is None else [extension(), nccl],
        "cmdclass": {"build_ext": build_command()},
        # Without the NCCL binding one wheel serves every CPython from 3.10; with it, the version that built it.
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}} if nccl is None else {},
    }


setup(
    packages=packages(),
    package_dir={KERNELS: "triton_kernels"},
    package_data={"": ["py.typed", "*.pyi", "*.json", "*.csv"]},
    **extensions(),
)
