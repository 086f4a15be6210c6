"""The shape of a model: ``Model`` and the mixers of its layers."""

from parallel_ops.planner.model.mixers import CompressedAttention, LatentAttention, RecurrentMixer
from parallel_ops.planner.model.model import LayerKind, Model

# Fields of ``Model`` that are tables in files.
TABLES = {"latent": LatentAttention, "recurrent": RecurrentMixer, "compressed": CompressedAttention}

__all__ = ["TABLES", "CompressedAttention", "LatentAttention", "LayerKind", "Model", "RecurrentMixer"]
