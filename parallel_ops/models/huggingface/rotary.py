"""Rotary positions in a config.json: its keys, and those of the scalings of frequencies."""

from collections.abc import Callable, Iterable
from typing import Any

from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.rotary_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    YarnScaling,
)

Options = dict[str, Any]


def listed(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names)))


def read_rotary(options: Options) -> Options:
    """Rotary options in the format of transformers 5 (``rope_parameters``) or 4 (``rope_theta``, ``rope_scaling``)."""
    given = [options.pop(key, None) for key in ("rope_parameters", "rope_scaling")]
    if all(given):
        raise ValueError("has both rope_parameters and rope_scaling")
    rope = dict(given[0] or given[1] or {})
    base = options.pop("rope_theta", 10_000.0)
    fraction = options.pop("partial_rotary_factor", 1.0)
    kind = rope.pop("type", "default")
    kind, base = rope.pop("rope_type", kind), rope.pop("rope_theta", base)
    if rope.pop("partial_rotary_factor", fraction) != 1.0:
        raise ValueError("has a partial_rotary_factor, which is not supported")
    scaling: RotaryScaling | None = None
    if kind != "default":
        if kind not in _READERS:
            raise ValueError(f"has rope_type {kind!r}; supported are 'default', {', '.join(map(repr, _READERS))}")
        try:
            scaling = _READERS[kind](rope, options)
        except KeyError as missing:
            raise ValueError(f"lacks {missing.args[0]} in its rope_scaling") from None
    if rope:
        raise ValueError(f"has {listed(rope)} in its rope_scaling, which is not supported")
    return {"rotary_base": base, "rotary_scaling": scaling}


def _read_linear(rope: Options, options: Options) -> LinearScaling:
    return LinearScaling(factor=rope.pop("factor"))


def _read_dynamic(rope: Options, options: Options) -> DynamicScaling:
    """Its original length is ``max_position_embeddings``: sequences may be longer."""
    rope.pop("original_max_position_embeddings", None)
    return DynamicScaling(factor=rope.pop("factor"), original_length=options["max_position_embeddings"])


def _read_llama3(rope: Options, options: Options) -> Llama3Scaling:
    rope.setdefault("original_max_position_embeddings", options["max_position_embeddings"])
    return Llama3Scaling(**{ours: rope.pop(theirs) for ours, theirs in _LLAMA3.items()})


def _read_yarn(rope: Options, options: Options) -> YarnScaling:
    rope.setdefault("original_max_position_embeddings", options["max_position_embeddings"])
    if (factor := rope.pop("factor")) is None:
        factor = options["max_position_embeddings"] / rope["original_max_position_embeddings"]
    given = {ours: rope.pop(theirs) for ours, theirs in _YARN.items() if theirs in rope}
    return YarnScaling(factor=factor, **{ours: value for ours, value in given.items() if value is not None})


_READERS: dict[str, Callable[[Options, Options], RotaryScaling]] = {
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}


def write_rotary(config: TransformerConfig) -> Options:
    scaling = config.rotary_scaling
    if scaling is None:
        return {"rope_theta": config.rotary_base, "rope_scaling": None}
    if isinstance(scaling, LinearScaling | DynamicScaling):
        scaled = {"rope_type": scaling.kind, "factor": scaling.factor}
        # The longest sequence of a model with DynamicScaling is the one from which on it scales.
        more = {"max_position_embeddings": scaling.original_length} if isinstance(scaling, DynamicScaling) else {}
        return {"rope_theta": config.rotary_base, "rope_scaling": scaled, **more}
    kind, names = ("llama3", _LLAMA3) if isinstance(scaling, Llama3Scaling) else ("yarn", {"factor": "factor"} | _YARN)
    values = {theirs: getattr(scaling, ours) for ours, theirs in names.items()}
    scaled = {"rope_type": kind} | {key: value for key, value in values.items() if value is not None}
    return {"rope_theta": config.rotary_base, "rope_scaling": scaled}


_LLAMA3 = {
    "factor": "factor",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
_YARN = {
    "original_length": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
