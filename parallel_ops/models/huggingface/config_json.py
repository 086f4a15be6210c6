"""Conversion of a config.json to a ``TransformerConfig``, and back.

Every key is read, or has the one supported value, or cannot change the logits. Any other key is an error.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.huggingface.expert_families import FAMILIES, deepseek
from parallel_ops.models.huggingface.families import Family
from parallel_ops.models.huggingface.rotary import Options, listed

_REQUIRED = object()
# A configuration makes lists of this length before the tensors of the layers are counted.
_MOST_LAYERS = 100_000

# Keys that do not change the logits: options of running, saving and generation, and of other heads.
# fmt: off
_NEUTRAL = {
    "_name_or_path", "_num_labels", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "finetuning_task", "gradient_checkpointing", "id2label", "keys_to_ignore_at_inference",
    "label2id", "max_length", "model_type", "n_ctx", "num_labels", "output_past", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "reorder_and_upcast_attn", "return_dict", "sep_token_id", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
}
# fmt: on
_ABOUT_THE_FILES = {"_name_or_path", "architectures", "dtype", "model_type", "torch_dtype", "transformers_version"}


def family_of(options: Mapping[str, Any]) -> Family:
    """The family of a config.json; raises ValueError if it is not supported."""
    name = str(options.get("model_type"))
    if name not in FAMILIES:
        raise ValueError(f"has model_type {name!r}; supported are {listed(FAMILIES)}")
    if name == "deepseek_v3" and options.get("q_lora_rank", True) is None:
        return deepseek(compressed=False)
    return FAMILIES[name]


def scale_block(options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale in tensors of 8 bits; ``None`` for a folder without.

    Raises:
        ValueError: another quantization than that of DeepSeek-V3.
    """
    given = options.get("quantization_config")
    if given is None:
        return None
    if isinstance(given, dict) and given.get("quant_method") == "mxfp4":
        raise ValueError(
            "has weights quantized by mxfp4, which are not supported; save them in bfloat16 first, with transformers: "
            "GptOssForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True), "
            "dtype='bfloat16').save_pretrained(other, save_original_format=False)"
        )
    block = given.get("weight_block_size") if isinstance(given, dict) and given.get("quant_method") == "fp8" else None
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ValueError(f"has quantization_config {given!r}; supported is fp8 with a weight_block_size")
    return block[0], block[1]


def config_of(options: Mapping[str, Any]) -> TransformerConfig:
    """The configuration in a config.json.

    Raises:
        ValueError: an unknown family, a missing key, or an unsupported option.
    """
    family, rest = family_of(options), dict(options)
    scale_block(options)
    rest.pop("quantization_config", None)
    for key in family.names.values():
        if rest.setdefault(key, family.defaults.get(key, _REQUIRED)) is _REQUIRED:
            raise ValueError(f"lacks {key}")
    for key, value in family.fixed.items():
        if (got := rest.pop(key, value)) != value:
            raise ValueError(f"has {key} {got!r}; supported is {value!r}")
    if isinstance(layers := rest[family.names["num_layers"]], int) and layers > _MOST_LAYERS:
        raise ValueError(f"has {family.names['num_layers']} {layers}; supported are at most {_MOST_LAYERS}")
    try:
        given = family.read(rest) | {ours: rest.pop(theirs) for ours, theirs in family.names.items()}
        config = TransformerConfig(**family.always, **given)
    except TypeError as error:
        raise ValueError(f"has a value of a wrong type: {error}") from error
    unknown = {key for key, value in rest.items() if key not in _NEUTRAL and value is not None and value is not False}
    if unknown:
        raise ValueError(f"has {listed(unknown)}, which is not supported; remove it if it does not change the logits")
    return config


def options_of(config: TransformerConfig, loaded: Mapping[str, Any]) -> Options:
    """A config.json with the same configuration, except for dropout, which not every family has.

    Args:
        loaded: the config.json that the model was loaded from; empty if none. Its family is tried first, and its keys
            that do not change the logits, such as the ids of special tokens, are copied.

    Raises:
        ValueError: no family has this configuration.
    """
    want, reasons = _resolved(config), []
    for name in sorted(FAMILIES, key=lambda name: name != loaded.get("model_type")):
        family = FAMILIES[name]
        options = {"model_type": name, "architectures": [family.architecture], **family.fixed}
        try:
            options |= family.write(config)
            options |= {theirs: getattr(want, ours) for ours, theirs in family.names.items()}
            differing = differences(config_of(options), config)
        except ValueError as error:
            differing = [str(error)]
        if not differing:
            return {key: loaded[key] for key in loaded if key in _NEUTRAL - _ABOUT_THE_FILES} | options
        reasons.append(f"{name}: {', '.join(differing)}")
    raise ValueError(f"no Hugging Face family has this configuration ({'; '.join(reasons)})")


def differences(first: TransformerConfig, second: TransformerConfig) -> list[str]:
    """The fields in which two models differ, except dropout on the residual stream; defaults are resolved first."""
    a, b = _resolved(first), _resolved(second)
    return [field.name for field in fields(a) if getattr(a, field.name) != getattr(b, field.name)]


def _resolved(config: TransformerConfig) -> TransformerConfig:
    """The configuration with defaults resolved and without dropout on the residual stream."""
    windows = config.windows
    return replace(
        config,
        num_kv_heads=None if config.latent else config.resolved_num_kv_heads,
        head_dim=None if config.latent else config.resolved_head_dim,
        ffn_hidden_size=config.resolved_ffn_hidden_size,
        attention_bias=config.resolved_attention_bias,
        qkv_bias=config.resolved_qkv_bias,
        window=windows[0] if len(set(windows)) == 1 else windows,
        rotary_base=config.rotary_base if config.positions == "rotary" else 10_000.0,
        dropout=0.0,
        experts=None if config.experts is None else config.experts.untrained(),
    )
