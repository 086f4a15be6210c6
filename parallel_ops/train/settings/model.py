"""The sections ``[model]`` and ``[lora]``."""

import typing
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model, field_validator

from parallel_ops.models import TransformerConfig
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.models.latent import LatentAttentionConfig
from parallel_ops.models.lora_config import Lora
from parallel_ops.models.rotary_scaling import RotaryScaling
from parallel_ops.tensor_parallel.linear.call import Overlap
from parallel_ops.train.settings.section import Folder, Positive, Section


def _table_of(*kinds: type) -> BeforeValidator:
    """Converts a TOML table to a dataclass: of several, the one of its key ``kind`` (``"yarn"`` for ``YarnScaling``),
    or the first that has most of its keys."""
    names = {kind.__name__.removesuffix("Scaling").lower(): kind for kind in kinds}

    def convert(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = max(kinds, key=lambda kind: len(given.keys() & {field.name for field in fields(kind)}))
        if len(kinds) > 1 and "kind" in given:
            if (name := given["kind"]) not in names:
                raise ValueError(f"kind must be one of {', '.join(map(repr, names))}, got {name!r}")
            kind = names[name]
            given = {key: value for key, value in given.items() if key != "kind"}
        try:
            return kind(**given)
        except TypeError as error:
            raise ValueError(str(error).replace(".__init__()", "")) from None

    return BeforeValidator(convert)


def _model_fields() -> dict[str, Any]:
    """The fields of ``TransformerConfig``, each optional: a Hugging Face folder defines them too."""
    hints = typing.get_type_hints(TransformerConfig)
    for name, kind in (
        ("rotary_scaling", RotaryScaling),
        ("latent", LatentAttentionConfig),
        ("experts", ExpertsConfig),
    ):
        hints[name] = Annotated[kind, _table_of(*(typing.get_args(kind) or [kind]))]
    return {f.name: (hints[f.name] | None, None) for f in fields(TransformerConfig)}


class _ModelSettings(Section):
    """The model: a Hugging Face folder, whose weights are loaded, or the fields of ``TransformerConfig``.

    Attributes:
        dir: Folder of a model family that ``Transformer.from_pretrained`` supports. A checkpoint replaces its weights.
            Beside it may stand what changes no weight: ``seq_length`` and ``rotary_scaling``, say.
        overlap: Overlap of communication and matmuls in the linears, see ``all_gather_linear``, and of experts, see
            ``ParallelMoE``.
        grad_reduce: How the linears add partial sums of the tensor-parallel ranks, see ``all_gather_linear``: "fp32",
            in rank order in fp32, or "backend", by the collectives of the group's backend.
        aux_loss_over: Replaces that of ``experts``, for a ``dir`` too; see ``ExpertsConfig``.
        freeze: Patterns of names of parameters that are not trained, such as ``"tokens.*"`` or ``"layers.0.*"``.
    """

    dir: Folder | None = None
    overlap: Overlap = "auto"
    grad_reduce: Literal["fp32", "backend"] = "fp32"
    aux_loss_over: Literal["layer", "model"] | None = None
    freeze: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()

    @field_validator("window", mode="before", check_fields=False)
    @classmethod
    def _windows(cls, given: Any) -> Any:
        """TOML has lists instead of tuples, and no null."""
        return tuple(None if window == "none" else window for window in given) if isinstance(given, list) else given

    @property
    def shape(self) -> dict[str, Any]:
        """The fields of ``TransformerConfig`` that the file sets."""
        return {name: getattr(self, name) for name in self.model_fields_set if name not in _ModelSettings.model_fields}


if TYPE_CHECKING:
    ModelSettings = _ModelSettings
else:
    ModelSettings = create_model(
        "ModelSettings", __base__=_ModelSettings, __doc__=_ModelSettings.__doc__, **_model_fields()
    )


class LoraSettings(Section):
    """Fine-tuning of low-rank adapters; all other parameters are frozen. See ``models.lora``.

    Attributes:
        rank: Features between the two matrices of an adapter. alpha: Adapters are scaled by ``alpha / rank``.
        dropout: Probability for elements of the input of adapters.
        targets: Patterns of linears, by their names here, such as ``"layers.*.attention.*"``, or by Hugging Face's,
            such as ``"q_proj"``; by default all linears of the layers.
    """

    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)] = (
        "layers.*",
    )

    @property
    def options(self) -> Lora:
        """The options as the model takes them."""
        return Lora(**dict(self))
