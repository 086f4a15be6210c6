"""The sections of a file of settings, each a class: its keys, their types and defaults, and what each means."""

import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, field_validator, model_validator

from parallel_ops.models import TransformerConfig
from parallel_ops.models.config import Llama3Scaling
from parallel_ops.planner.plan import Plan
from parallel_ops.tensor_parallel.linear.overlap_plan import Overlap

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Folder = Annotated[Path, Field(strict=False)]


class Section(BaseModel):
    """One section of the file: frozen, no other keys, no value turned into one of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_is_no_value(cls, given: Any) -> Any:
        """TOML has no null."""
        if not isinstance(given, dict):
            return given
        optional = {name for name, field in cls.model_fields.items() if _optional(field.annotation)}
        return {name: None if value == "none" and name in optional else value for name, value in given.items()}


def _optional(annotation: Any) -> bool:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and type(None) in typing.get_args(annotation)


class RunSettings(Section):
    """How long, on what.

    Attributes:
        steps: optimizer steps in all, those before a resume included. seed: of weights, order of the data and dropout.
        device: ``"auto"`` is CUDA where there is a GPU. compile: each block by ``torch.compile``.
        on_nan: what a loss or gradient norm that is not finite does: end the run, or leave the step out.
        timeout: seconds after which a rank that does not go on ends the run, with an error that names it; six times as
            long for the start, the first step, reading data and saving. ``"none"`` for no limit, as for a debugger that
            stops a process.
    """

    steps: Positive = 1000
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    on_nan: Literal["stop", "skip"] = "stop"
    timeout: Annotated[float, Field(ge=1, le=86400)] | None = 300.0


def _scaling(given: Any) -> Any:
    """A table as what it is."""
    try:
        return Llama3Scaling(**given) if isinstance(given, dict) else given
    except TypeError as error:
        raise ValueError(str(error).replace(".__init__()", "")) from None


def _model_fields() -> dict[str, Any]:
    """The fields of ``TransformerConfig``, each optional here, for a folder has them too."""
    hints = typing.get_type_hints(TransformerConfig)
    hints["rotary_scaling"] = Annotated[Llama3Scaling, BeforeValidator(_scaling)]
    return {f.name: (hints[f.name] | None, None) for f in fields(TransformerConfig)}


class _ModelSettings(Section):
    """The model: a Hugging Face folder, whose weights are loaded, or the fields of ``TransformerConfig``.

    Attributes:
        folder: of a model of a family that ``Transformer.from_pretrained`` knows. A checkpoint goes before its weights.
        overlap: see ``all_gather_linear``.
    """

    folder: Folder | None = None
    overlap: Overlap = "auto"

    @field_validator("window", mode="before", check_fields=False)
    @classmethod
    def _windows(cls, given: Any) -> Any:
        """TOML has lists, and no null."""
        return tuple(None if window == "none" else window for window in given) if isinstance(given, list) else given

    @property
    def shape(self) -> dict[str, Any]:
        """The fields of ``TransformerConfig`` that are given."""
        return {name: getattr(self, name) for name in self.model_fields_set if name not in _ModelSettings.model_fields}


if TYPE_CHECKING:
    ModelSettings = _ModelSettings
else:
    ModelSettings = create_model(
        "ModelSettings", __base__=_ModelSettings, __doc__=_ModelSettings.__doc__, **_model_fields()
    )


class DataSettings(Section):
    """What is read; see ``train.tokens`` and ``train.samples``.

    Attributes:
        paths: token files, folders of them, or folders of Hugging Face datasets.
        column: of a dataset, the one that has the tokens of a document.
        dtype: of raw tokens, as NumPy names it. end: the token that ends a document where nothing else says so.
        seq_length: tokens of a sequence; that of the model by default.
        apart: no token sees one of another document. shuffle: sequences are taken in an order drawn from seed and
            epoch, not as they lie in the packed documents.
    """

    paths: Annotated[tuple[Folder, ...], Field(strict=False, min_length=1)]
    column: str = "input_ids"
    dtype: Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"] = "uint16"
    end: Count | None = None
    seq_length: Positive | None = None
    apart: bool = False
    shuffle: bool = True


class OptimizerSettings(Section):
    """AdamW and its learning rate.

    Attributes:
        lr: the highest learning rate. betas, eps: of AdamW. weight_decay: of matrices; biases and norms have none.
        clip: largest norm of all gradients together; ``"none"`` for no limit.
        schedule: after ``warmup`` steps, in which the rate grows evenly, it stays (``"constant"``), falls by a cosine
            or a line to ``floor`` of ``lr`` at the last step, or stays and falls by a line in the last ``decay`` steps
            (``"wsd"``).
    """

    lr: Annotated[float, Field(gt=0)] = 3e-4
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup: Count = 0
    decay: Count = 0
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1


class PrecisionSettings(Section):
    """What parameters are used in; the optimizer's, and sums of gradients, are fp32.

    Attributes:
        dtype: of parameters as they are used and of activations.
        initial_scale, growth_interval: of the dynamic loss scale of fp16, and the good steps until it doubles.
    """

    dtype: Literal["bf16", "fp32", "fp16"] = "bf16"
    initial_scale: Annotated[float, Field(gt=0)] = 65536.0
    growth_interval: Positive = 2000


class RecomputeSettings(Section):
    """What the forward does not keep; see ``train.recompute``.

    Attributes:
        kind: of what. every: of the blocks, the first of every so many.
    """

    kind: Literal["none", "selective", "full"] = "none"
    every: Positive = 1


class CheckpointSettings(Section):
    """What is saved.

    Attributes:
        folder: for checkpoints, one folder a step; ``"none"`` for none. every: steps between two; 0 for the last step
            alone. keep: how many stay.
        asynchronous: the run goes on while a checkpoint is written.
    """

    folder: Folder | None = None
    every: Count = 0
    keep: Positive = 2
    asynchronous: bool = True


class LoggingSettings(Section):
    """What a person sees.

    Attributes:
        every: steps between two progress lines. jsonl: a file with one object a step. tensorboard: a folder.
        picture: a file for loss and throughput, at the end.
    """

    every: Positive = 1
    jsonl: Folder | None = None
    tensorboard: Folder | None = None
    picture: Folder | None = None


def _parallel_fields() -> dict[str, Any]:
    """The fields of ``Plan``, but for those that other sections have."""
    hints = typing.get_type_hints(Plan)
    found = {f.name: (hints[f.name], f.default) for f in fields(Plan) if f.name not in ("dtype", "recompute")}
    # The trainer's loss is one op with the output embedding.
    return found | {
        "fused_loss": (bool, True),
        "layers_per_chunk": (Annotated[tuple[int, ...], Field(strict=False)], ()),
    }


class _ParallelSettings(Section):
    """The planner's ``Plan``, in a table of its fields or as a text, ``"dp=2,tp=2,zero=3"``."""


if TYPE_CHECKING:
    ParallelSettings = _ParallelSettings
else:
    ParallelSettings = create_model(
        "ParallelSettings", __base__=_ParallelSettings, __doc__=_ParallelSettings.__doc__, **_parallel_fields()
    )
