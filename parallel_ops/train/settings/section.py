"""The base of all sections of a settings file, and the types of their keys."""

import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from parallel_ops._internal.files import expanded, one_path

Positive = Annotated[int, Field(ge=1)]


Count = Annotated[int, Field(ge=0)]


def _as(convert: Callable[[str | Path], Path]) -> BeforeValidator:
    """A path as users write it; see ``_internal.files``."""

    def converted(given: Any) -> Any:
        if not isinstance(given, (str, Path)):
            return given
        try:
            return convert(given)
        except ValueError as error:
            raise PydanticCustomError("parallel_ops", "{message}", {"message": str(error)}) from None

    return BeforeValidator(converted)


# A file or folder, and one that may be a pattern of several.
Folder = Annotated[Path, _as(one_path), Field(strict=False)]


Pattern = Annotated[Path, _as(expanded), Field(strict=False)]


class Section(BaseModel):
    """A section of the file: frozen, without further keys, without conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_is_no_value(cls, given: Any) -> Any:
        """TOML has no null."""
        if not isinstance(given, dict):
            return given
        optional = {name for name, field in cls.model_fields.items() if _optional(field.annotation)}
        # A list that may be left out is left out.
        lists = {name for name, field in cls.model_fields.items() if field.default == ()}
        return {
            name: None if value == "none" and name in optional else value
            for name, value in given.items()
            if value != "none" or name not in lists
        }


def _optional(annotation: Any) -> bool:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and type(None) in typing.get_args(annotation)


def key_error(key: str, message: str) -> ValidationError:
    """A pydantic error of one key, ``section.key``, or of a section."""
    problem = PydanticCustomError("parallel_ops", "{message}", {"message": message})
    found = InitErrorDetails(type=problem, loc=tuple(key.split(".")), input=None)
    return ValidationError.from_exception_data("Settings", [found])
