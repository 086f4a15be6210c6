"""Ahead-of-time compilation of the Triton kernels for GPUs that this machine does not have.

The launchers run as they are, on tensors of the meta device; launches are recorded instead of executed. So what is
compiled and inspected is what a GPU would get: the same block sizes, warps, constants and alignment hints.
"""

import contextlib
import dataclasses
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

# Shared memory that one block may use, in bytes (CUDA C++ Programming Guide, table of technical specifications).
SHARED_MEMORY_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}

_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One specialisation of one kernel: what Triton's cache would be keyed by."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]
    call: Any = dataclasses.field(default=None, compare=False, repr=False)  # (arguments, keywords, grid), if recorded

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def __str__(self) -> str:
        types = ",".join(t for _, t in self.signature if t.startswith("*"))
        constants = ",".join(f"{k}={v}" for k, v in self.constants if k.isupper())
        return f"{self.name}[{types}][{constants}]"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiled code of one launch uses."""

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    cubin: bytes = dataclasses.field(repr=False)

    @property
    def spills(self) -> bool:
        """Whether it has any memory of a thread's own, which is where ptxas puts registers that it lacks."""
        return self.stack_bytes > 0 or self.local_bytes > 0

    @functools.cached_property
    def sass(self) -> str:
        """The machine code. Its disassembly takes as long as the compilation, so only what counts it asks for it."""
        return _cuobjdump("-sass", self.cubin)

    @property
    def spill_instructions(self) -> list[str]:
        return re.findall(r"\b(?:LDL|STL)\b[^;]*", self.sass)


@contextlib.contextmanager
def chosen_for(capability: int) -> Iterator[None]:
    """Launchers choose for ``sm_<capability>``, not for the GPU that they assume where there is none."""
    from parallel_ops.triton_kernels import _common

    before = _common.assumed_capability, _common.assumed_shared_memory
    _common.assumed_capability, _common.assumed_shared_memory = capability, SHARED_MEMORY_LIMIT[capability]
    try:
        yield
    finally:
        _common.assumed_capability, _common.assumed_shared_memory = before


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Records the launches of the block, without duplicates, instead of executing them."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = dataclasses.replace(specialise(self, args, dict(kwargs)), call=(args, kwargs, grid))
        assert all(1 <= g < 2**31 for g in grid[:1]) and all(1 <= g <= 65535 for g in grid[1:]), (str(launch), grid)
        if launch not in launches:
            launches.append(launch)

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def specialise(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
    bound = kernel.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    signature, constants, aligned = {}, {}, []
    for index, (param, value) in enumerate(zip(kernel.params, bound.arguments.values(), strict=True)):
        if param.annotation_type and not param.is_constexpr:  # its type is fixed, whatever the value
            unspecialised = param.do_not_specialize or param.annotation_type.startswith("fp")
            assert unspecialised, f"{kernel.__name__}: {param.name} is typed, so leave it unspecialised"
            signature[param.name] = param.annotation_type
        elif (
            param.is_constexpr
            or value is None
            or (isinstance(value, int) and value == 1 and not param.do_not_specialize)
        ):
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = _TYPES[value.dtype]
            if value.storage_offset() * value.element_size() % 16 == 0:  # torch's allocator aligns to 512 bytes
                aligned.append(index)
        elif isinstance(value, int):
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                aligned.append(index)
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            raise TypeError(f"{kernel.__name__}: {param.name} is a {type(value).__name__}")
    return Launch(
        kernel,
        tuple(signature.items()),
        tuple(constants.items()),
        tuple(aligned),
        tuple(options.items()),
    )


def compiled(launch: Launch, capability: int, *, machine_code: bool = True) -> Any:
    """Triton's compiled kernel; without ``machine_code``, up to its PTX: ptxas takes an eighth of the time."""
    source = ASTSource(
        launch.kernel,
        dict(launch.signature),
        dict(launch.constants),
        {(index,): [["tt.divisibility", 16]] for index in launch.aligned},
    )
    target, options = GPUTarget("cuda", capability, 32), dict(launch.options)
    # Triton 3.6 does not tell in its cache what stops before ptxas.
    if machine_code or triton.__version__.startswith("3.6."):
        return triton.compile(source, target=target, options=options)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = _until_ptx
        return triton.compile(source, target=target, options=options)


def _until_ptx(*arguments: Any) -> tuple[str, str] | None:
    """Triton calls this without arguments for what to add to its cache's key, else with the compiler's stages."""
    if not arguments:
        return "until PTX", "until PTX"
    arguments[1]["cubin"] = lambda ptx, metadata: b""
    return None


def assembly(launch: Launch, capability: int) -> str:
    """The PTX of ``launch`` for ``sm_<capability>``."""
    text: str = compiled(launch, capability).asm["ptx"]
    return text


@functools.cache
def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compiles ``launch`` for ``sm_<capability>`` and reads what it uses."""
    kernel = compiled(launch, capability)
    cubin: bytes = kernel.asm["cubin"]
    usage = _cuobjdump("-res-usage", cubin)
    numbers = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    shared = max(numbers["SHARED"], kernel.metadata.shared)
    return Compiled(numbers["REG"], numbers["STACK"], numbers["LOCAL"], shared, cubin)


def _cuobjdump(flag: str, cubin: bytes) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([tool, flag, str(path)], check=True, capture_output=True, text=True).stdout
