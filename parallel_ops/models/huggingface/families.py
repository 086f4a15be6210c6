"""Hugging Face's names of configuration keys and tensors for each supported family, as tables."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.huggingface.rotary import Options, listed, read_rotary, write_rotary


@dataclass(frozen=True)
class TensorMapping:
    """Where a parameter is stored in the files.

    Attributes:
        name: name of the tensor, with {} for the number of the layer.
        transposed: whether it is stored ``[in, out]``.
        part, parts: the parameter is block ``part`` of ``parts`` equal blocks of rows. Of weights of experts, which
            have a tensor for each, ``name`` has a second {} for the expert, and ``parts`` names, separated by spaces,
            of the blocks of rows; unless they are ``stacked``.
        stacked: whether a parameter of experts is one tensor ``[n, ...]`` for all experts of a layer.
        interleaved: whether the file has gate, up, gate, up where a stacked parameter has gates and then ups.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    stacked: bool = False
    interleaved: bool = False


class TensorSlice(NamedTuple):
    """A piece of a parameter, and where it is stored.

    Attributes:
        stored: the tensor in the files. place: the slices of the parameter that it is, one a dimension.
    """

    stored: TensorMapping
    place: tuple[slice, ...]

    def file_shape(self, whole: Sequence[int]) -> list[int]:
        """The shape of the tensor in the files, of a parameter of the shape ``whole``."""
        if self.stored.stacked:
            matrix = whole[1:]
            return [whole[0], *(matrix[::-1] if self.stored.transposed else matrix)]
        rows, *columns = [part.stop - part.start for part in self.place[-2:]]
        shape = [rows * self.stored.parts, *columns]
        return shape[::-1] if self.stored.transposed else shape


@dataclass(frozen=True)
class Family:
    """A model family of transformers.

    Attributes:
        architecture: class of the causal language model in transformers.
        names: the key of config.json for each field of ``TransformerConfig``.
        defaults: values of keys that config.json may lack; other keys are required.
        fixed: keys with a single supported value, which is also their default.
        always: fields of ``TransformerConfig`` that config.json does not contain.
        read, write: conversion of all other keys: ``read`` removes them from config.json and returns fields.
        tensors: where parameters are stored; parameters that a configuration lacks are not in the files.
        prefix: prefix of names, absent in files of the model without its head.
        constants: regular expression of names, without the prefix, of tensors in old files that can be computed.
        copies: the parameters that the layers which predict further tokens share, by their names in these layers.
    """

    architecture: str
    names: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    always: Mapping[str, Any]
    read: Callable[[Options], Options]
    write: Callable[[TransformerConfig], Options]
    tensors: Mapping[str, TensorMapping]
    prefix: str
    constants: str
    copies: Mapping[str, str] = field(default_factory=dict)

    def copies_in(self, config: TransformerConfig) -> dict[str, str]:
        """The parameters that files have a second time, by the names of their copies."""
        own = {"head.weight": "tokens.weight"} if config.tied_embeddings else {}
        return {
            f"{self.prefix}layers.{number}.{name}": own.get(parameter, parameter)
            for number in range(config.num_layers, config.all_layers)
            for name, parameter in self.copies.items()
        }

    def pieces(self, parameter: str, shape: Sequence[int]) -> list[TensorSlice]:
        """The pieces of ``parameter``, of the whole ``shape``, and where each is stored.

        Raises:
            ValueError: the family has no such parameter.
        """
        stored = self._stored(parameter)
        if len(shape) == 3 and stored.stacked:  # an expert at a time: all of a layer are large
            matrix = tuple(slice(0, size) for size in shape[1:])
            return [TensorSlice(stored, (slice(expert, expert + 1), *matrix)) for expert in range(shape[0])]
        if len(shape) < 3:
            return [TensorSlice(stored, tuple(slice(0, size) for size in shape))]
        each, found = shape[1] // stored.parts, []
        for expert in range(shape[0]):
            for part, name in enumerate(stored.name.split(" ")):
                rows = slice(part * each, (part + 1) * each)
                place = (slice(expert, expert + 1), rows, slice(0, shape[2]))
                found.append(TensorSlice(TensorMapping(name.format(expert), stored.transposed), place))
        return found

    def _stored(self, parameter: str) -> TensorMapping:
        layer = re.match(r"layers\.(\d+)\.", parameter)
        found = self.tensors.get(parameter if layer is None else "layers.{}." + parameter[layer.end() :])
        if found is None:
            raise ValueError(f"{self.architecture} has no place for {parameter}")
        if layer is None:
            return found
        return replace(found, name=" ".join(name.replace("{}", layer[1], 1) for name in found.name.split(" ")))


def _read_mistral(options: Options) -> Options:
    return read_rotary(options) | {"window": options.pop("sliding_window", 4096)}


def _write_mistral(config: TransformerConfig) -> Options:
    return write_rotary(config) | {"sliding_window": config.windows[0]}


def _read_qwen(options: Options) -> Options:
    layers, window = options["num_hidden_layers"], options.pop("sliding_window", 4096)
    if not options.pop("use_sliding_window", False):
        window = None
    first = options.pop("max_window_layers", 28)
    kinds = options.pop("layer_types", None)
    if kinds is None:
        kinds = kinds_of(window is not None and layer >= first for layer in range(layers))
    return read_rotary(options) | {"window": windows_of(kinds, layers, window)}


def _write_qwen(config: TransformerConfig) -> Options:
    sliding = [window is not None for window in config.windows]
    return write_rotary(config) | {
        "use_sliding_window": any(sliding),
        "sliding_window": next((window for window in config.windows if window is not None), None),
        "max_window_layers": sliding.index(True) if any(sliding) else config.num_layers,
        "layer_types": kinds_of(sliding),
    }


def kinds_of(sliding: Iterable[bool]) -> list[str]:
    """The ``layer_types`` of layers, by whether their window slides."""
    return [_KINDS[slides] for slides in sliding]


def windows_of(kinds: Sequence[str], layers: int, window: int | None) -> int | tuple[int | None, ...] | None:
    """``TransformerConfig.window`` for ``layer_types`` and the window of those that slide."""
    if len(kinds) != layers or not set(kinds) <= set(_KINDS) or (window is None and _KINDS[True] in kinds):
        raise ValueError(f"has layer_types {kinds!r} for {layers} layers and a sliding window of {window}")
    windows = tuple(window if kind == _KINDS[True] else None for kind in kinds)
    return windows[0] if len(set(windows)) == 1 else windows


_KINDS = ("full_attention", "sliding_attention")


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

LLAMA_NAMES = {
    "vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "tied_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
LLAMA_ALWAYS = {
    "activation": "swiglu", "norm": "rms_norm", "positions": "rotary", "bias": False, "qkv_bias": False,
}  # fmt: skip
_LLAMA_LAYER = {
    "norm_attention": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "norm_mlp": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
LLAMA_TENSORS = {
    "tokens.weight": TensorMapping("model.embed_tokens.weight"),
    "norm.weight": TensorMapping("model.norm.weight"),
    "head.weight": TensorMapping("lm_head.weight"),
    **{
        f"layers.{{}}.{ours}.{kind}": TensorMapping(f"model.layers.{{}}.{theirs}.{kind}")
        for ours, theirs in _LLAMA_LAYER.items()
        for kind in ("weight", "bias")
    },
}
LLAMA = Family(
    architecture="LlamaForCausalLM",
    names=LLAMA_NAMES,
    defaults=LLAMA_DEFAULTS,
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    always=LLAMA_ALWAYS,
    read=read_rotary,
    write=write_rotary,
    tensors=LLAMA_TENSORS,
    prefix="model.",
    constants=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)

_GPT2_LAYER = {
    "norm_attention": ("ln_1", False),
    "attention.out": ("attn.c_proj", True),
    "norm_mlp": ("ln_2", False),
    "mlp.up": ("mlp.c_fc", True),
    "mlp.down": ("mlp.c_proj", True),
}
_GPT2_TENSORS = {
    "tokens.weight": TensorMapping("transformer.wte.weight"),
    "positions.weight": TensorMapping("transformer.wpe.weight"),
    "norm.weight": TensorMapping("transformer.ln_f.weight"),
    "norm.bias": TensorMapping("transformer.ln_f.bias"),
    "head.weight": TensorMapping("lm_head.weight"),
    **{
        f"layers.{{}}.{ours}.{kind}": TensorMapping(
            f"transformer.h.{{}}.{theirs}.{kind}", transposed and kind == "weight"
        )
        for ours, (theirs, transposed) in _GPT2_LAYER.items()
        for kind in ("weight", "bias")
    },
    **{
        f"layers.{{}}.attention.{ours}.{kind}": TensorMapping(
            f"transformer.h.{{}}.attn.c_attn.{kind}", kind == "weight", i, 3
        )
        for i, ours in enumerate("qkv")
        for kind in ("weight", "bias")
    },
}

# Of several families that have a configuration, the first is written.
DENSE = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        names={
            "vocab_size": "vocab_size",
            "seq_length": "n_positions",
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_heads": "n_head",
            "ffn_hidden_size": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "attention_dropout": "attn_pdrop",
            "tied_embeddings": "tie_word_embeddings",
            "init_std": "initializer_range",
        },
        defaults={
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "attn_pdrop": 0.1,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        always={},  # the defaults of TransformerConfig
        read=_read_gpt2,
        write=_write_gpt2,
        tensors=_GPT2_TENSORS,
        prefix="transformer.",
        constants=r"h\.\d+\.attn\.(masked_)?bias",
    ),
    "llama": LLAMA,
    "mistral": replace(
        LLAMA,
        architecture="MistralForCausalLM",
        defaults=LLAMA_DEFAULTS | {"num_key_value_heads": 8},
        fixed={"hidden_act": "silu"},
        read=_read_mistral,
        write=_write_mistral,
    ),
    "qwen2": replace(
        LLAMA,
        architecture="Qwen2ForCausalLM",
        defaults=LLAMA_DEFAULTS | {"num_key_value_heads": 32},
        fixed={"hidden_act": "silu"},
        always=LLAMA_ALWAYS | {"qkv_bias": True},
        read=_read_qwen,
        write=_write_qwen,
    ),
    "qwen3": replace(
        LLAMA,
        architecture="Qwen3ForCausalLM",
        defaults=LLAMA_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
        fixed={"hidden_act": "silu", "attention_bias": False},
        always=LLAMA_ALWAYS | {"qk_norm": True},
        read=_read_qwen,
        write=_write_qwen,
    ),
}
