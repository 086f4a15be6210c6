"""``python -m benchmarks.gpu_session.machine``: versions, which attention torch takes, and what the GPU reaches.

Ceilings are a clone of 1 GiB and a matmul of 8192 x 8192 x 8192 in bfloat16, medians of events.
"""

import importlib.metadata
import sys

import torch
from torch.nn.attention import SDPBackend

from benchmarks.harness.timing import Rounds, device_timer, take_turns

_PACKAGES = ("torch", "triton", "setuptools", "pytest", "pytest-xdist", "transformers", "liger-kernel")


def versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} is not installed")
    return [f"python {sys.version.split()[0]}", *found, f"cuDNN {torch.backends.cudnn.version()}"]


def attention_taken(device: torch.device) -> str:
    """The backend of ``scaled_dot_product_attention`` for 32 heads on 8 of 128 dims, causal."""
    q, k = (torch.empty(1, heads, 256, 128, dtype=torch.bfloat16, device=device) for heads in (32, 8))
    choice = torch._fused_sdp_choice(q, k, k, None, 0.0, True, scale=None, enable_gqa=True)
    return next((name for name, value in SDPBackend.__members__.items() if int(value.value) == choice), str(choice))


def ceilings(device: torch.device, clone_bytes: int, size: int) -> tuple[float, float]:
    """(GB/s that a clone moves, TFLOP/s of a square matmul)."""
    source = torch.randn(clone_bytes // 2, device=device).to(torch.bfloat16)
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    stats = take_turns({"clone": source.clone, "product": lambda: a @ b}, device_timer(device, repeat=2), Rounds(10))
    return 2 * source.nbytes / stats["clone"].median / 1e9, 2 * size**3 / stats["product"].median / 1e12


def main(device: str = "cuda", clone_bytes: int = 1 << 30, size: int = 8192) -> None:
    print(", ".join(versions()))
    where = torch.device(device)
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        print(
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB, "
            f"L2 {properties.L2_cache_size / 2**20:.0f} MiB"
        )
    print(f"scaled_dot_product_attention takes {attention_taken(where)}")
    moved, computed = ceilings(where, clone_bytes, size)
    print(f"clone {moved:,.0f} GB/s, product {computed:,.1f} TFLOP/s")


if __name__ == "__main__":
    main()
