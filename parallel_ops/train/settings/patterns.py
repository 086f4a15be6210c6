"""Parameters by patterns of their names, such as ``layers.*.attention.*`` (``fnmatch``; ``*`` crosses dots)."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from parallel_ops.models import Transformer
from parallel_ops.models.config import plain_name
from parallel_ops.models.lora import add_adapters

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter's name matches one of the patterns."""
    return any(fnmatchcase(plain_name(name), pattern) for pattern in patterns)


def check(settings: "Settings", names: Sequence[str]) -> None:
    """Checks the patterns of settings against the names of all parameters of a model.

    Raises:
        ValueError: A pattern matches none, or all are frozen; names the key.
    """
    given = [(f"optimizer.groups.{n}.match", group.match) for n, group in enumerate(settings.optimizer.groups)]
    given += [("model.freeze", pattern) for pattern in settings.model.freeze]
    for key, pattern in given:
        if not any(matches(name, [pattern]) for name in names):
            some = ", ".join(dict.fromkeys([names[0], names[len(names) // 2], names[-1]]))
            raise ValueError(f"{key}: {pattern!r} matches no parameter; their names are like {some}")
    if settings.model.freeze and all(matches(name, settings.model.freeze) for name in names):
        raise ValueError("model.freeze: all parameters are frozen, so there is nothing to train")


def names_of(settings: "Settings") -> list[str]:
    """The names of all parameters of ``settings.model``, on any plan."""
    model = Transformer(settings.config, device="meta")
    if settings.lora is not None:
        add_adapters(model, settings.lora.options)
    return [plain_name(name) for name, _ in model.named_parameters()]


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters that match."""
    for name, parameter in model.named_parameters():
        if matches(name, patterns):
            parameter.requires_grad_(False)
