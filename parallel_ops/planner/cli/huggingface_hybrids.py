"""Kinds of layers in the ``config.json`` of Hugging Face folders, and the families that mix several."""

from collections.abc import Mapping
from typing import Any

from parallel_ops.planner.model import CompressedAttention, RecurrentMixer
from parallel_ops.planner.presets.figures import figures

_NAMES = figures("presets/huggingface")
# Kinds of ``Model.layers`` by their name in files, and names in files of the fields of mixers.
LAYERS: dict[str, str] = _NAMES["layer_types"]
MIXERS: dict[str, dict[str, str]] = _NAMES["mixers"]
# Families whose fields mean what ``huggingface_config.model_of`` takes them for, each with what its files do not say.
# Others are read likewise, and said to be assumed.
FAMILIES: dict[str, dict[str, Any]] = _NAMES["families"]
_RATIOS = {0: "window", 4: "csa", 128: "hca"}


def integer(text: Mapping[str, Any], *names: str) -> int | None:
    """The value of the first of these keys that has one; ``None`` if none has.

    Raises:
        ValueError: it is no integer. Lists, as of experts of two modalities, are other models.
    """
    for name in names:
        if (value := text.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"config.json: {name} must be an integer, got {value!r}")
            return value
    return None


def kinds_of(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The kinds of attention layers: those of ``layer_types``, or every n-th over all keys, others over a window."""
    named = tuple(LAYERS.get(kind, "full") for kind in text.get("layer_types") or ())
    if named:  # a pattern beside it may be a text, as EXAONE 4's "LLLG"
        return shortest(named[:layers])
    usual = FAMILIES.get(str(text.get("model_type")), {})
    every = integer(text, "sliding_window_pattern") or usual.get("full_attention_every", 0)
    return ("window",) * (min(every, layers + 1) - 1) + ("full",) if every else ()


def shortest(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The fewest kinds that give these when they are repeated."""
    for period in range(1, len(kinds)):
        if all(kind == kinds[layer % period] for layer, kind in enumerate(kinds)):
            return kinds[:period]
    return kinds


def _mixer(text: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {field: text[name] for field, name in MIXERS[kind].items()}


def hybrid(text: Mapping[str, Any], family: str) -> dict[str, Any] | None:
    """Fields of ``Model`` of a family with other layers than attention; ``None`` for other families."""
    if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        every = integer(text, "full_attention_interval") or 4
        mixer = RecurrentMixer(kind="delta_net", **_mixer(text, "delta_net"))
        kinds = kinds_of(text, text["num_hidden_layers"]) or ("recurrent",) * (every - 1) + ("full",)
        return {"layers": kinds, "recurrent": mixer, "attention_gate": True, "window": 0}
    if family == "nemotron_h":
        kinds = tuple(text.get("hybrid_override_pattern") or text["layers_block_type"])
        if text.get("moe_latent_size"):  # experts of another width than the model
            raise KeyError("moe_latent_size")
        mixer = RecurrentMixer(kind="mamba2", **_mixer(text, "mamba2"))
        layers = shortest(tuple(_NAMES["nemotron_layers"][kind] for kind in kinds))
        sparse = bool({"E", "moe"} & set(kinds))
        if sparse and {"-", "mlp"} & set(kinds):
            raise KeyError("layers_block_type")
        fields = {"num_layers": len(kinds), "layers": layers, "recurrent": mixer, "norm": "rms", "window": 0}
        return fields if sparse else {**fields, "experts": 0}  # files have a number of experts without any, too
    if family == "deepseek_v4":
        ratios = text.get("compress_ratios")
        kinds = tuple(_RATIOS[ratio] for ratio in ratios) if ratios else kinds_of(text, text["num_hidden_layers"])
        attention = CompressedAttention(**_mixer(text, "compressed"))
        kinds = kinds[: text["num_hidden_layers"]]
        streams = integer(text, "hc_mult") or 1
        return {"layers": shortest(kinds), "compressed": attention, "residual_streams": streams}
    return None
