"""Triton kernels and their launchers, one file an op.

A launcher takes tensors, derives sizes and strides, and writes into outputs that the caller allocated. It knows
nothing of autograd, modules or process groups, and makes no host synchronisation. Importing a file here imports
triton; nothing in ``parallel_ops`` does so before the first CUDA tensor.
"""

import torch

if torch.version.hip is not None:
    # Kernels hold PTX, and launches are those of Triton's backend for NVIDIA.
    raise RuntimeError(
        f"parallel_ops: its kernels are for NVIDIA GPUs, and this torch is built for ROCm {torch.version.hip}; "
        "keep the tensors on the CPU"
    )
