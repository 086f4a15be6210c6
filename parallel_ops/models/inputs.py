"""The inputs of a transformer: checks of shapes, and the angles of rotary positions."""

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel_ops.layers.attention import Angles
from parallel_ops.models.config import Llama3Scaling, TransformerConfig, YarnScaling
from parallel_ops.models.context import Context
from parallel_ops.pipeline_parallel.cut import Stages


class Model(Protocol):
    """What the checks read of a ``Transformer``."""

    config: TransformerConfig
    context: Context
    ranks: int
    sequence_parallel: bool
    stages: Stages | None
    pp_rank: int

    @property
    def tokens(self) -> nn.Module | None: ...
    def stream_shape(self, s: int, b: int) -> tuple[int, int, int]: ...


def check_inputs(
    model: Model,
    tokens: Tensor,
    targets: Tensor | None,
    positions: Tensor | None,
    stage: int | None,
    stream: Tensor | None,
) -> None:
    """Raises ValueError unless the arguments of ``Transformer.forward`` fit the model and each other."""
    _check_stage(model, tokens, stage, stream)
    if model.tokens is None and stage is None:
        return
    shape, longest = list(tokens.shape), model.config.seq_length
    # With positions a row may hold several sequences.
    if tokens.dim() != 2 or not 1 <= shape[0] <= (longest if positions is None else shape[0]):
        raise ValueError(f"Transformer: tokens must have shape [s, b] with s from 1 to {longest}, got {shape}")
    if model.sequence_parallel and any(length % model.ranks for length in model.context.lengths(shape[0])):
        shares = f" in each of {model.context.ranks} shares" if model.context.ranks > 1 else ""
        raise ValueError(
            f"Transformer: tokens must have a length that the {model.ranks} ranks can split evenly{shares}, got "
            f"{shape[0]}"
        )
    if targets is not None and list(targets.shape) != shape:
        raise ValueError(f"Transformer: targets must have shape {shape}, got {list(targets.shape)}")
    if positions is not None and list(positions.shape) not in (shape, shape[:1]):
        raise ValueError(f"Transformer: positions must have shape {shape[:1]} or {shape}, got {list(positions.shape)}")


def _check_stage(model: Model, tokens: Tensor, stage: int | None, stream: Tensor | None) -> None:
    if model.stages is None:
        if stage is not None or stream is not None:
            raise ValueError("Transformer: stage and stream must be None for a model without stages")
        return
    if stage not in (own := model.stages.on(model.pp_rank)):
        raise ValueError(
            f"Transformer: stage must be one of {own}, those of pipeline rank {model.pp_rank}, got {stage}"
        )
    if (stream is None) != (stage == 0):
        raise ValueError(f"Transformer: stream must be None for stage 0 alone, got stage {stage}")
    if stream is not None and tokens.dim() == 2 and tuple(stream.shape) != model.stream_shape(*tokens.shape):
        expected = list(model.stream_shape(*tokens.shape))
        raise ValueError(f"Transformer: stream must have shape {expected}, got {list(stream.shape)}")


def rotary_angles(config: TransformerConfig, positions: Tensor) -> Angles:
    """Cosines and sines of positions ``[n]``: ``[n, rotary_dim / 2]`` each, fp32."""
    scaling = config.rotary_scaling
    frequencies = _frequencies(config.rotary_dim, config.rotary_base, scaling, positions.device)
    angles = positions.to(torch.float32)[:, None] * frequencies
    if isinstance(scaling, YarnScaling):
        return angles.cos() * scaling.rotary_factor, angles.sin() * scaling.rotary_factor
    return angles.cos(), angles.sin()


def _frequencies(size: int, base: float, scaling: Llama3Scaling | YarnScaling | None, device: torch.device) -> Tensor:
    """Radians a position of each pair of ``size`` dimensions of a head, ``[size / 2]`` fp32."""
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    frequencies = 1.0 / base**exponents
    if scaling is None:
        return frequencies
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_length * frequencies / (2 * math.pi)
        share = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    else:
        first, last = _yarn_range(size, base, scaling)
        share = (last - torch.arange(size // 2, device=device, dtype=torch.float32)) / (last - first)
    return torch.lerp(frequencies / scaling.factor, frequencies, share.clamp(0, 1))


def _yarn_range(size: int, base: float, scaling: YarnScaling) -> tuple[float, float]:
    """The indices of two pairs: YaRN interpolates between them, keeps those before and scales those behind."""
    # Pair i turns original_length / (2 pi base^(2 i / size)) times.
    first, last = (
        size * math.log(scaling.original_length / (2 * math.pi * turns)) / (2 * math.log(base))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return first, last if last > first else first + 1e-3
