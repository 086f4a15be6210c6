"""Scalings of rotary frequencies, and the angles of rotary positions.

LinearScaling     all pairs turn ``factor`` times slower (position interpolation; Chen et al., arXiv:2306.15595)
DynamicScaling    a larger base, by the length of the sequence (NTK-aware)
YarnScaling       slow pairs are interpolated, fast ones kept (Peng et al., arXiv:2309.00071)
Llama3Scaling     the same by another rule (Grattafiori et al., arXiv:2407.21783)
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from parallel_ops.layers.attention import Angles
from parallel_ops.models.checked import Checked


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Checked):
    """All pairs turn ``factor`` times slower.

    Raises:
        ValueError: naming the field that is wrong.

    Examples:
        >>> from parallel_ops.models import LinearScaling, TransformerConfig
        >>> config = TransformerConfig(
        ...     vocab_size=1000, seq_length=512, num_layers=2, hidden_size=64, num_heads=4,
        ...     positions="rotary", rotary_scaling=LinearScaling(factor=4.0),
        ... )
    """

    kind: Literal["linear"] = "linear"
    factor: float

    def __post_init__(self) -> None:
        _check_factor(self)


@dataclass(frozen=True, kw_only=True)
class DynamicScaling(Checked):
    """In a sequence of ``n > original_length`` tokens the base is multiplied by ``(factor n / original_length - factor
    + 1)^(d / (d - 2))``, for ``d`` rotated dimensions of a head. Shorter sequences keep it. ``n`` is the largest
    position of a batch and one, as in Hugging Face's models.

    Attributes:
        factor: at least 1. original_length: in positions.

    Raises:
        ValueError: naming the field that is wrong.

    Examples:
        >>> from parallel_ops.models import DynamicScaling, TransformerConfig
        >>> config = TransformerConfig(
        ...     vocab_size=1000, seq_length=512, num_layers=2, hidden_size=64, num_heads=4,
        ...     positions="rotary", rotary_scaling=DynamicScaling(factor=4.0, original_length=128),
        ... )
    """

    kind: Literal["dynamic"] = "dynamic"
    factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check_factor(self)
        if not self.original_length >= 1:
            self._fail(f"original_length must be at least 1, got {self.original_length}")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Checked):
    """Llama 3.1's scaling of rotary frequencies, for sequences longer than those of pre-training.

    Pairs that turn less than ``low_frequency`` times within ``original_length`` positions turn ``factor`` times slower;
    pairs that turn more than ``high_frequency`` times stay; in between, a linear interpolation by the number of turns.

    Raises:
        ValueError: naming the field that is wrong.

    Examples:
        >>> from parallel_ops.models import Llama3Scaling, TransformerConfig
        >>> scaling = Llama3Scaling(factor=32.0, low_frequency=1.0, high_frequency=4.0, original_length=8192)
        >>> config = TransformerConfig(
        ...     vocab_size=1000, seq_length=128, num_layers=2, hidden_size=64, num_heads=4,
        ...     positions="rotary", rotary_base=500_000.0, rotary_scaling=scaling,
        ... )
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_length: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_frequency", "original_length"):
            if not getattr(self, name) > 0:
                self._fail(f"{name} must be positive, got {getattr(self, name)}")
        if not self.high_frequency > self.low_frequency:
            self._fail(f"high_frequency ({self.high_frequency}) must be above low_frequency ({self.low_frequency})")


@dataclass(frozen=True, kw_only=True)
class YarnScaling(Checked):
    """YaRN's scaling of rotary frequencies, for sequences longer than those of pre-training (Peng et al.,
    arXiv:2309.00071).

    Pairs that turn less than ``beta_slow`` times within ``original_length`` positions turn ``factor`` times slower;
    pairs that turn more than ``beta_fast`` times stay; in between, a linear interpolation by the index of the pair.
    Cosines and sines are multiplied by ``rotary_factor``, which scales the scores of attention by its square.

    Attributes:
        factor: at least 1. original_length: in positions. beta_fast, beta_slow: in turns.
        truncate: round the first interpolated pair down and the last one up.
        attention_factor: the value of ``rotary_factor``; ``None`` to compute it.
        mscale, mscale_all_dim: replace the paper's ``rotary_factor`` if both are given, as DeepSeek-V2 has it
            (DeepSeek-AI, arXiv:2405.04434). ``None`` or 0 for not given.

    Raises:
        ValueError: naming the field that is wrong.

    Examples:
        >>> from parallel_ops.models import TransformerConfig, YarnScaling
        >>> config = TransformerConfig(
        ...     vocab_size=1000, seq_length=512, num_layers=2, hidden_size=64, num_heads=4,
        ...     positions="rotary", rotary_scaling=YarnScaling(factor=4.0, original_length=128),
        ... )
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        _check_factor(self)
        if not self.beta_fast > self.beta_slow > 0:
            self._fail(f"beta_fast must be above beta_slow and both above 0, got {self.beta_fast} and {self.beta_slow}")
        # Otherwise no pair turns often enough, and the range to interpolate in lies before the first one.
        if not self.original_length > 2 * math.pi * self.beta_slow:
            self._fail(
                "original_length must be above 2 pi beta_slow, in which the fastest pair turns beta_slow "
                f"times, got {self.original_length}"
            )
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            self._fail(f"attention_factor must be positive, got {self.attention_factor}")
        for name in ("mscale", "mscale_all_dim"):
            if not 0 <= (getattr(self, name) or 0.0) < math.inf:
                self._fail(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def rotary_factor(self) -> float:
        """The factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_factor(self) -> float:
        """The further factor of the scores of latent attention, as DeepSeek-V2 has it: its rotary part alone
        gets ``rotary_factor``. 1 without ``mscale_all_dim``; no other attention applies it."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


def _check_factor(scaling: "LinearScaling | DynamicScaling | YarnScaling") -> None:
    if not 1 <= scaling.factor < math.inf:
        raise ValueError(f"{type(scaling).__name__}: factor must be at least 1, got {scaling.factor}")


RotaryScaling = LinearScaling | YarnScaling | Llama3Scaling | DynamicScaling


class Config(Protocol):
    """The fields of a ``TransformerConfig`` that set the angles."""

    @property
    def rotary_base(self) -> float: ...
    @property
    def rotary_scaling(self) -> RotaryScaling | None: ...
    @property
    def rotary_dim(self) -> int: ...


def rotary_length(config: Config, positions: Tensor | None, length: int) -> Tensor | int:
    """The largest position of all ranks' tokens and one, if rotary frequencies depend on it, else ``length``."""
    if positions is not None and isinstance(config.rotary_scaling, DynamicScaling) and positions.numel():
        return positions.max() + 1
    return length


def rotary_angles(config: Config, positions: Tensor, length: Tensor | int) -> Angles:
    """Cosines and sines of positions ``[n]``: ``[n, rotary_dim / 2]`` each, fp32.

    Args:
        length: the largest position of the batch, on all ranks, and one.
    """
    scaling = config.rotary_scaling
    frequencies = _frequencies(config.rotary_dim, config.rotary_base, scaling, length, positions.device)
    angles = positions.to(torch.float32)[:, None] * frequencies
    if isinstance(scaling, YarnScaling):
        return angles.cos() * scaling.rotary_factor, angles.sin() * scaling.rotary_factor
    return angles.cos(), angles.sin()


def _frequencies(
    size: int, base: float, scaling: RotaryScaling | None, length: Tensor | int, device: torch.device
) -> Tensor:
    """Radians a position of each pair of ``size`` dimensions of a head, ``[size / 2]`` fp32."""
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    if isinstance(scaling, DynamicScaling):
        if not isinstance(length, Tensor):  # a fill, for which the host does not wait, and which a graph can capture
            length = torch.full((), length, device=device)
        longest = length.to(device, torch.float32).clamp(min=scaling.original_length)
        grown = scaling.factor * longest / scaling.original_length - (scaling.factor - 1)
        return (base * grown ** (size / (size - 2))) ** -exponents
    frequencies = 1.0 / base**exponents
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
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
