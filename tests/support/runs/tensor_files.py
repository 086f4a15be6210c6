"""Tensors of a folder's files."""

from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
