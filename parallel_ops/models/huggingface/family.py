"""A model family of Hugging Face: its keys of config.json, and where its files have parameters. See ``families``."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.huggingface.rotary import Options


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


def in_layers(
    names: Mapping[str, str], kinds: Sequence[str] = ("weight",), layers: str = "model.layers"
) -> dict[str, TensorMapping]:
    """Weights, or what ``kinds`` names, of modules of a layer, which are stored as they are here."""
    return {
        f"layers.{{}}.{ours}.{kind}": TensorMapping(f"{layers}.{{}}.{theirs}.{kind}")
        for ours, theirs in names.items()
        for kind in kinds
    }


def experts_at(mlp: str, gate: str, up: str, down: str) -> dict[str, TensorMapping]:
    """Tensors of a layer with experts, whose MLP has this name in the files."""
    names = {kind: f"model.layers.{{}}.{mlp}.experts.{{}}.{kind}.weight" for kind in (gate, up, down)}
    return {
        "layers.{}.mlp.router.weight": TensorMapping(f"model.layers.{{}}.{mlp}.gate.weight"),
        "layers.{}.mlp.experts.gate_up": TensorMapping(f"{names[gate]} {names[up]}", parts=2),
        "layers.{}.mlp.experts.down": TensorMapping(names[down]),
    }


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


REQUIRED = object()


class Key(NamedTuple):
    """A key of config.json, and its value where that is missing, unless it must be there.

    Attributes:
        read, write: conversion of values, where they differ.
    """

    name: str
    default: Any = REQUIRED
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Part:
    """A field of ``TransformerConfig`` that is a configuration of its own.

    Attributes:
        kind: its class. keys: the key of config.json for each of its fields. always: fields that config.json does not
            contain.
    """

    kind: type
    keys: Mapping[str, Key]
    always: Mapping[str, Any] = field(default_factory=dict)

    def read(self, options: Options) -> Any:
        given = {name: key.read(options.get(key.name, key.default)) for name, key in self.keys.items()}
        return self.kind(**self.always, **given)

    def write(self, part: Any) -> Options:
        return {key.name: key.write(getattr(part, name)) for name, key in self.keys.items()}


class Rule(NamedTuple):
    """Keys of config.json with a meaning of their own: ``read`` removes them and returns fields of the model."""

    read: Callable[[Options], Options]
    write: Callable[[TransformerConfig], Options]


@dataclass(frozen=True)
class Family:
    """A model family of transformers.

    Attributes:
        architecture: class of the causal language model in transformers.
        keys: the key of config.json for each field of ``TransformerConfig``.
        fixed: keys with a single supported value, which is also their default.
        always: fields of ``TransformerConfig`` that config.json does not contain.
        parts: fields that are configurations of their own, ``experts`` and ``latent``; models of the family have all.
        rules: all other keys.
        aliases: other names of keys. ignored: keys that change no logits in this family.
        tensors: where parameters are stored; parameters that a configuration lacks are not in the files.
        prefix: prefix of names, absent in files of the model without its head.
        constants: regular expression of names, without the prefix, of tensors in old files that can be computed.
        copies: the parameters that the layers which predict further tokens share, by their names in these layers.
    """

    architecture: str
    keys: Mapping[str, Key]
    fixed: Mapping[str, Any]
    always: Mapping[str, Any]
    rules: Sequence[Rule]
    tensors: Mapping[str, TensorMapping]
    prefix: str
    constants: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    copies: Mapping[str, str] = field(default_factory=dict)

    def read(self, options: Options) -> TransformerConfig:
        """The configuration in the options of a config.json; removes those that it reads."""
        for other, key in self.aliases.items():
            if (value := options.pop(other, None)) is not None and options.setdefault(key, value) != value:
                raise ValueError(f"has {key} {options[key]} and {other} {value}, which must be equal")
        given = {name: value for rule in self.rules for name, value in rule.read(options).items()}
        given |= {name: part.read(options) for name, part in self.parts.items()}
        given |= {ours: options[key.name] for ours, key in self.keys.items()}
        used = [*self.keys.values(), *(key for part in self.parts.values() for key in part.keys.values())]
        for name in (*(key.name for key in used), *self.ignored):
            options.pop(name, None)
        return TransformerConfig(**self.always, **given)

    def write(self, config: TransformerConfig, resolved: TransformerConfig) -> Options:
        """The options of a config.json. ``resolved``: the configuration with its defaults, of which plain keys are."""
        options = {"architectures": [self.architecture], **self.fixed}
        for name, part in self.parts.items():
            if (own := getattr(config, name)) is None:
                raise ValueError(f"has no {name}")
            options |= part.write(own)
        options |= {key.name: getattr(resolved, ours) for ours, key in self.keys.items()}
        for rule in self.rules:
            options |= rule.write(config)
        return options

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
