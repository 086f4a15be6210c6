"""Build of the compiled extension. Everything else is declared in pyproject.toml.

Environment:
  FORCE_CUDA            unset: build csrc/cuda when there are CUDA sources, a toolkit and a GPU;
                        1: build it or fail; 0: never.
  TORCH_CUDA_ARCH_LIST  when set, counts as FORCE_CUDA=1 and names the architectures.
  MAX_JOBS              compilers run side by side.
"""

import os
import shutil
import sys
from glob import glob

from setuptools import Extension, setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    sys.exit(
        "parallel_ops: building needs torch 2.11 or later in this environment; "
        "install it, then run: pip install --no-build-isolation ."
    )

# The oldest torch that the built wheel runs on (its stable ABI).
TORCH_TARGET_VERSION = "0x020b000000000000"


def cuda_sources() -> list[str]:
    """The CUDA sources to build: none, unless asked for or unless a toolkit and a GPU are there."""
    sources = sorted(glob("csrc/cuda/*.cu"))
    force = os.environ.get("FORCE_CUDA")
    if not sources or force == "0":
        return []
    wanted = force == "1" or bool(os.environ.get("TORCH_CUDA_ARCH_LIST"))
    buildable = cpp_extension.CUDA_HOME is not None and torch.version.cuda is not None
    if wanted and not buildable:
        sys.exit("parallel_ops: FORCE_CUDA=1 needs a CUDA toolkit (CUDA_HOME) and a CUDA build of torch")
    return sources if buildable and (wanted or torch.cuda.is_available()) else []


def check_compiler() -> None:
    """One clear sentence instead of a page of ninja output."""
    compiler = os.environ.get("CXX", "c++").split()[-1]
    if shutil.which(compiler) is None:
        sys.exit(f"parallel_ops: no C++ compiler found (looked for {compiler!r}); install g++ 11 or later, or set CXX")


def extension() -> Extension:
    cuda = cuda_sources()
    factory = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    macros = [("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)]
    # NaN and infinities keep their meaning, so no -ffast-math; these two only let loops with a choice vectorise.
    flags = [
        "-O3",
        "-std=c++17",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
    ]
    return factory(
        name="parallel_ops._C",
        sources=["csrc/registration.cpp", *sorted(glob("csrc/cpu/*.cpp")), *cuda],
        depends=sorted(glob("csrc/**/*.h", recursive=True)),
        define_macros=macros,
        extra_compile_args={"cxx": flags, "nvcc": ["-O3", "-std=c++17"]} if cuda else flags,
        py_limited_api=True,
    )


if not {"sdist", "egg_info", "dist_info", "--version"} & set(sys.argv):
    check_compiler()

setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": cpp_extension.BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    packages=[
        "parallel_ops",
        "parallel_ops.models",
        "parallel_ops.ops",
        "parallel_ops.planner",
        "parallel_ops.planner.cli",
        "parallel_ops.planner.presets",
        "parallel_ops.planner.schedules",
        "parallel_ops.planner.validation",
        "parallel_ops.tensor_parallel",
        "parallel_ops.train",
        "parallel_ops.triton_kernels",
    ],
    package_dir={"parallel_ops.triton_kernels": "triton_kernels"},
    package_data={
        "parallel_ops": ["py.typed"],
        "parallel_ops.planner.presets": ["*.json"],
        "parallel_ops.planner.validation": ["*.json"],
    },
)
