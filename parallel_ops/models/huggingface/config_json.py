"""Conversion of a config.json to a ``TransformerConfig``, and back.

Every key is read, or has the one supported value, or is of a kind that cannot change the logits. Of the others a name
that may change them is an error, and an unknown one a warning.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from parallel_ops.models.config import MOST_LAYERS, TransformerConfig
from parallel_ops.models.huggingface.families import DEEPSEEK_PLAIN, FAMILIES
from parallel_ops.models.huggingface.family import REQUIRED, Family
from parallel_ops.models.huggingface.rotary import Options, listed
from parallel_ops.models.rotary_scaling import DynamicScaling

# Kinds of keys that do not change the logits.
_NEUTRAL_KINDS = (
    r"_.*|\w*version|unsloth_\w+|auto_map|is_\w+_config|transformers\.js\w*|architectures|model_type",  # the files
    r"(torch_)?dtype|use_cache|torchscript|use_bfloat16|tf_legacy_loss|chunk_size_feed_forward|pretraining_tp",
    r"attn_implementation|use_flash_\w+|reorder_and_upcast_attn|gradient_checkpointing\w*|n_ctx|max_sequence_length",
    r"return_dict\w*|output_(past|attentions|hidden_states|scores|logits)|keys_to_ignore_at_inference",
    r"\w+_token(_id)?|tokenizer_class|chat_template|prefix|model_max_length",  # text
    r"do_sample|temperature|top_[kp]|min_p|typical_p|num_(beams|beam_groups|return_sequences)|early_stopping",
    r"\w+_penalty|penalty_alpha|(max|min)_(new_tokens|length)|(encoder_)?no_repeat_ngram_size|bad_words_ids",
    r"forced_\w+|(begin_)?suppress_tokens|remove_invalid_values",  # generation
    r"(num_|_num_)labels|id2label|label2id|problem_type|summary_\w+|classifier_\w+|finetuning_task",  # other heads
    r"task_specific_params",
)
_NEUTRAL = re.compile("|".join(_NEUTRAL_KINDS))
# Of these, what says how the files were made is not copied from one folder into another.
_ABOUT_THE_FILES = re.compile(
    r"_.*|\w*version|unsloth_\w+|auto_map|architectures|(torch_)?dtype|model_type|torchscript"
)
# Parts of names of keys that do, in one family or another.
_CHANGING = re.compile(
    "scal|cap|logit|rope|rotary|theta|expert|rout|norm|bias|window|attn|attention|activation|act_|layer|block|head|kv"
    "|size|dim|rank|multiplier|quant|mlp|embed|position|residual|alpha|beta|sparse|mask|causal|tie|clip|lora|mtp|nextn"
    "|num_|eps|factor|dropout|decoder|soft"
)


def family_of(options: Mapping[str, Any]) -> Family:
    """The family of a config.json; raises ValueError if it is not supported."""
    name = str(options.get("model_type"))
    if name not in FAMILIES:
        raise ValueError(f"has model_type {name!r}; supported are {listed(FAMILIES)}")
    if name == "deepseek_v3" and options.get("q_lora_rank", True) is None:
        return DEEPSEEK_PLAIN
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
    for name, default, *_ in family.keys.values():
        if rest.setdefault(name, default) is REQUIRED:
            raise ValueError(f"lacks {name}")
    for key, value in family.fixed.items():
        got = rest.pop(key, value)
        if got != value and not (got is None and value is False):
            raise ValueError(f"has {key} {got!r}; supported is {value!r}")
    name = family.keys["num_layers"].name
    if isinstance(layers := rest[name], int) and layers > MOST_LAYERS:
        raise ValueError(f"has {name} {layers}; supported are at most {MOST_LAYERS}")
    try:
        config = family.read(rest)
    except TypeError as error:
        raise ValueError(f"has a value of a wrong type: {error}") from error
    unknown = {key for key, value in rest.items() if value is not None and value is not False}
    unknown = {key for key in unknown if not _NEUTRAL.fullmatch(key)}
    if changing := {key for key in unknown if _CHANGING.search(key)}:
        raise ValueError(f"has {listed(changing)}, which is not supported; remove it if it does not change the logits")
    if unknown:
        warnings.warn(
            f"config.json has {listed(unknown)}, which is not known and taken to change no logits", stacklevel=3
        )
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
        try:
            options = {"model_type": name, **family.write(config, want)}
            differing = differences(config_of(options), config)
        except ValueError as error:
            differing = [str(error)]
        if not differing:
            return {key: loaded[key] for key in loaded if _is_copied(key)} | options
        reasons.append(f"{name}: {', '.join(differing)}")
    raise ValueError(f"no Hugging Face family has this configuration ({'; '.join(reasons)})")


def _is_copied(key: str) -> bool:
    return _NEUTRAL.fullmatch(key) is not None and _ABOUT_THE_FILES.fullmatch(key) is None


def differences(first: TransformerConfig, second: TransformerConfig) -> list[str]:
    """The fields in which two models differ, except dropout on the residual stream; defaults are resolved first."""
    a, b = _resolved(first), _resolved(second)
    return [field.name for field in fields(a) if getattr(a, field.name) != getattr(b, field.name)]


def _resolved(config: TransformerConfig) -> TransformerConfig:
    """The configuration with defaults resolved and without dropout on the residual stream."""
    windows, scaling = config.windows, config.rotary_scaling
    return replace(
        config,
        seq_length=scaling.original_length if isinstance(scaling, DynamicScaling) else config.seq_length,
        num_kv_heads=None if config.latent else config.resolved_num_kv_heads,
        head_dim=None if config.latent else config.resolved_head_dim,
        ffn_hidden_size=config.resolved_ffn_hidden_size,
        attention_bias=config.resolved_attention_bias,
        qkv_bias=config.resolved_qkv_bias,
        window=windows[0] if len(set(windows)) == 1 else windows,
        rotary_base=config.rotary_base if config.positions == "rotary" else 10_000.0,
        dropout=0.0,
        experts=None if config.experts is None else config.experts.untrained(),
        prediction_weight=TransformerConfig.prediction_weight,
    )
