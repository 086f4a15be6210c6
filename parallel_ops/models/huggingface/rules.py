"""Keys of config.json that are no plain fields: their conversion to fields of ``TransformerConfig``, and back."""

from collections.abc import Iterable, Sequence

from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.huggingface.family import Rule
from parallel_ops.models.huggingface.rotary import Options, listed, read_rotary, write_rotary

ROTARY = Rule(read_rotary, write_rotary)


def window(default: int | None) -> Rule:
    """One window for all layers."""
    return Rule(
        lambda options: {"window": options.pop("sliding_window", default)},
        lambda config: {"sliding_window": config.windows[0]},
    )


def _read_qwen(options: Options) -> Options:
    layers, window = options["num_hidden_layers"], options.pop("sliding_window", 4096)
    if not options.pop("use_sliding_window", False):
        window = None
    first = options.pop("max_window_layers", 28)
    kinds = options.pop("layer_types", None)
    if kinds is None:
        kinds = _kinds_of(window is not None and layer >= first for layer in range(layers))
    return {"window": _windows_of(kinds, layers, window)}


def _write_qwen(config: TransformerConfig) -> Options:
    sliding = [window is not None for window in config.windows]
    return {
        "use_sliding_window": any(sliding),
        "sliding_window": next((window for window in config.windows if window is not None), None),
        "max_window_layers": sliding.index(True) if any(sliding) else config.num_layers,
        "layer_types": _kinds_of(sliding),
    }


_KINDS = ("full_attention", "sliding_attention")


def _kinds_of(sliding: Iterable[bool]) -> list[str]:
    """The ``layer_types`` of layers, by whether their window slides."""
    return [_KINDS[slides] for slides in sliding]


def _windows_of(kinds: Sequence[str], layers: int, window: int | None) -> int | tuple[int | None, ...] | None:
    """``TransformerConfig.window`` for ``layer_types`` and the window of those that slide."""
    if len(kinds) != layers or not set(kinds) <= set(_KINDS) or (window is None and _KINDS[True] in kinds):
        raise ValueError(f"has layer_types {kinds!r} for {layers} layers and a sliding window of {window}")
    windows = tuple(window if kind == _KINDS[True] else None for kind in kinds)
    return windows[0] if len(set(windows)) == 1 else windows


def _read_gpt2(options: Options) -> Options:
    name = options.pop("activation_function", "gelu_new")
    if name not in _GELUS:
        raise ValueError(f"has activation_function {name!r}; supported are {listed(_GELUS)}")
    dropout, of_embeddings = options.pop("resid_pdrop", 0.1), options.pop("embd_pdrop", 0.1)
    if dropout != of_embeddings:
        raise ValueError(f"has embd_pdrop {of_embeddings} and resid_pdrop {dropout}, which must be equal")
    return {"activation": _GELUS[name], "dropout": dropout}


def _write_gpt2(config: TransformerConfig) -> Options:
    name = next((theirs for theirs, ours in _GELUS.items() if ours == config.activation), "gelu_new")
    return {"activation_function": name, "resid_pdrop": config.dropout, "embd_pdrop": config.dropout}


_GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}


def _read_gpt_oss(options: Options) -> Options:
    layers = options["num_hidden_layers"]
    if not (options.get("rope_parameters") or options.get("rope_scaling")):
        options["rope_scaling"] = dict(_GPT_OSS_ROPE)
    options.setdefault("rope_theta", 150_000.0)
    window, kinds = options.pop("sliding_window", 128), options.pop("layer_types", None)
    kinds = _kinds_of(layer % 2 == 0 for layer in range(layers)) if kinds is None else kinds
    return read_rotary(options) | {"window": _windows_of(kinds, layers, window)}


def _write_gpt_oss(config: TransformerConfig) -> Options:
    # Without this key the scaling would be the family's default.
    none = {"rope_scaling": {"rope_type": "default"}} if config.rotary_scaling is None else {}
    return {
        **write_rotary(config),
        **none,
        "sliding_window": next((window for window in config.windows if window is not None), 128),
        "layer_types": _kinds_of(window is not None for window in config.windows),
    }


_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read_deepseek(options: Options) -> Options:
    heads = options["num_attention_heads"]
    if (count := options.pop("num_key_value_heads", heads)) != heads:
        raise ValueError(f"has num_key_value_heads {count!r}; latent attention has as many as num_attention_heads")
    return {"prediction_layers": options.pop("num_nextn_predict_layers", None) or 0}


def _write_deepseek(config: TransformerConfig) -> Options:
    return {"num_key_value_heads": config.num_heads, "num_nextn_predict_layers": config.prediction_layers}


def first_layers(dense: Sequence[int] | None) -> int:
    """The number of layers without experts, which must be the first ones."""
    if sorted(dense or ()) != list(range(len(dense or ()))):
        raise ValueError("has layers without experts behind layers with experts, which is not supported")
    return len(dense or ())


GPT2 = Rule(_read_gpt2, _write_gpt2)
QWEN_WINDOWS = Rule(_read_qwen, _write_qwen)
GPT_OSS = Rule(_read_gpt_oss, _write_gpt_oss)
DEEPSEEK = Rule(_read_deepseek, _write_deepseek)
