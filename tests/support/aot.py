"""Ahead-of-time compilation of the Triton kernels for GPUs that this machine does not have.

The launchers run as they are, on tensors of the meta device; launches are recorded instead of executed. So what is
compiled and inspected is what a GPU would get: the same block sizes, warps, constants and alignment hints.
"""

import collections
import contextlib
import dataclasses
import linecache
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

# Shared memory that one block may use, in bytes (CUDA C++ Programming Guide, table of technical specifications).
SHARED_MEMORY_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

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
_OPTIONS = ("num_warps", "num_stages")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One specialisation of one kernel: what Triton's cache would be keyed by."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]

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
    spill_instructions: tuple[str, ...]
    access_bits: dict[str, list[int]]  # by operand, the width of each access to global memory, in bits

    def wide_share(self, beside: Collection[str] = ()) -> float:
        """The share of the bytes loaded and stored per pass that moves 128 bits at a time.

        Operands in ``beside`` are no bulk data: they do not count.
        """
        widths = [w for operand, bits in self.access_bits.items() if operand not in beside for w in bits]
        return sum(w for w in widths if w == 128) / max(1, sum(widths))


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Records the launches of the block, without duplicates, instead of executing them."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _specialise(self, args, kwargs)
        assert all(1 <= g < 2**31 for g in grid[:1]) and all(1 <= g <= 65535 for g in grid[1:]), (str(launch), grid)
        if launch not in launches:
            launches.append(launch)

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def _specialise(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    options = {k: kwargs.pop(k) for k in _OPTIONS if k in kwargs}
    bound = kernel.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    signature, constants, aligned = {}, {}, []
    for index, (param, value) in enumerate(zip(kernel.params, bound.arguments.values(), strict=True)):
        if param.annotation_type and not param.is_constexpr:  # its type is fixed, whatever the value
            unspecialised = param.do_not_specialize or param.annotation_type.startswith("fp")
            assert unspecialised, f"{kernel.__name__}: {param.name} is typed, so leave it unspecialised"
            signature[param.name] = param.annotation_type
        elif param.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = _TYPES[value.dtype]
            aligned.append(index)  # torch's allocator aligns to 512 bytes
        elif isinstance(value, int):
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
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


def _compile(launch: Launch, capability: int) -> Any:
    source = ASTSource(
        launch.kernel,
        dict(launch.signature),
        dict(launch.constants),
        {(index,): [["tt.divisibility", 16]] for index in launch.aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))


def assembly(launch: Launch, capability: int) -> str:
    """The PTX of ``launch`` for ``sm_<capability>``."""
    text: str = _compile(launch, capability).asm["ptx"]
    return text


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compiles ``launch`` for ``sm_<capability>`` and reads the machine code."""
    kernel = _compile(launch, capability)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        usage = _cuobjdump("-res-usage", cubin)
        sass = _cuobjdump("-sass", cubin)
    numbers = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return Compiled(
        registers=numbers["REG"],
        stack_bytes=numbers["STACK"],
        local_bytes=numbers["LOCAL"],
        shared_bytes=max(numbers["SHARED"], kernel.metadata.shared),
        spill_instructions=tuple(re.findall(r"\b(?:LDL|STL)\b[^;]*", sass)),
        access_bits=_accesses(kernel.asm["ptx"], Path(launch.kernel.fn.__code__.co_filename).parent),
    )


def _cuobjdump(flag: str, cubin: Path) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, flag, str(cubin)], check=True, capture_output=True, text=True).stdout


_ACCESS = re.compile(r"\b(?:ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\s")
_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\s[^;]*\], 0x(\w+)")
_POINTERS = (re.compile(r"(\w+)_ptr\b"), re.compile(r"\btl\.(?:load|store)\((\w+)"))
_FRAME = re.compile(r"([\w.]+\.py):(\d+)")


def _accesses(ptx: str, folder: Path) -> dict[str, list[int]]:
    """The width of each access, by the name of the pointer on the source line that asked for it, without its _ptr.

    An access within an inlined function has its callers' lines too; the outermost that names a pointer counts.
    """
    accesses: dict[str, list[int]] = collections.defaultdict(list)
    operand = "?"
    for line in ptx.splitlines():
        if ".loc" in line:
            texts = [linecache.getline(str(folder / file), int(number)) for file, number in _FRAME.findall(line)]
            names = [name for pattern in _POINTERS for text in reversed(texts) for name in pattern.findall(text)]
            operand = names[0] if names else "?"
        elif access := _ACCESS.search(line):
            accesses[operand].append(int(access[1] or 1) * int(access[2]))
        elif copy := _ASYNC_COPY.search(line):
            accesses[operand].append(8 * int(copy[1], 16))
    return dict(accesses)
