"""The sections of a settings file. Each is a class with its keys, their types, defaults and meaning."""

import types
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError

from parallel_ops._internal.files import expanded, one_path
from parallel_ops.models import TransformerConfig
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.models.latent import LatentAttentionConfig
from parallel_ops.models.lora_config import Lora
from parallel_ops.models.rotary_scaling import RotaryScaling
from parallel_ops.planner.plan import Plan
from parallel_ops.tensor_parallel.linear.call import Overlap, Reduction

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


class RunSettings(Section):
    """Length, device and failure handling of a run.

    Attributes:
        steps: Optimizer steps in total, including those before a resume.
        seed: Seed of weights, data order and dropout.
        device: ``"auto"`` selects CUDA where there is a GPU.
        compile: Compile each block with ``torch.compile``.
        on_nan: Stop the run, or skip the update, when the loss or the gradient norm is not finite.
        timeout: Seconds after which a stalled rank ends the run with an error that names it. The start, the first step,
            reading data and saving may take six times as long. ``"none"`` disables the limit, as for a debugger that
            suspends a process.
    """

    steps: Positive = 1000
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    on_nan: Literal["stop", "skip"] = "stop"
    timeout: Annotated[float, Field(ge=1, le=86400)] | None = 300.0


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
        overlap: Overlap of communication and products in the linears, see ``all_gather_linear``, and of experts, see
            ``ParallelMoE``.
        reduction: How the linears add partial sums of the tensor-parallel ranks, see ``all_gather_linear``: "exact", in
            rank order in fp32, or "backend", by the collectives of the group's backend.
        aux_loss_over: Replaces that of ``experts``, for a ``dir`` too; see ``ExpertsConfig``.
        freeze: Patterns of names of parameters that are not trained, such as ``"tokens.*"`` or ``"layers.0.*"``.
    """

    dir: Folder | None = None
    overlap: Overlap = "auto"
    reduction: Reduction = "exact"
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


class SourceSettings(Section):
    """A source of a mixture; see ``train.data.mixture``.

    Attributes:
        paths: As ``data.paths``.
        weight: Share of the samples, relative to the weights of the other sources.
    """

    paths: Annotated[tuple[Pattern, ...], Field(strict=False, min_length=1)]
    weight: Annotated[float, Field(gt=0)]


class DataSettings(Section):
    """The training data; see ``train.data.tokens`` and ``train.data.packing``.

    Attributes:
        paths: Token files, folders of them, patterns such as ``"data/*.bin"``, or folders of Hugging Face datasets; or
        sources: several of them by weight, each a table with ``paths`` and ``weight``.
        column: Column of a dataset with the tokens of a document.
        ignore: Columns of datasets that are left out, of those that would otherwise be refused.
        dtype: NumPy dtype of raw tokens.
        eos_id: Last token of each document, for files without an index of documents.
        seq_length: Tokens in a sequence; the model's by default.
        document_mask: Restrict attention to tokens of the same document.
        shuffle: Shuffle the sequences by seed and epoch; otherwise they keep their order in the packed documents.
        packing: ``"concatenate"`` cuts the concatenated documents into sequences; ``"best_fit"`` cuts only documents
            that are longer than a sequence, and fills up sequences with padding.
        prompt_loss: Count all tokens in the loss, those too that a file's mask leaves out, as of prompts.
        growing: Files are added to the folders of ``paths`` while the run goes on; see ``train.data.growing``.
    """

    paths: Annotated[tuple[Pattern, ...], Field(strict=False, min_length=1)] = ()
    sources: Annotated[tuple[SourceSettings, ...], Field(strict=False, min_length=1)] = ()
    column: str = "input_ids"
    ignore: Annotated[tuple[str, ...], Field(strict=False)] = ()
    dtype: Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"] = "uint16"
    eos_id: Count | None = None
    seq_length: Positive | None = None
    document_mask: bool = False
    shuffle: bool = True
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    prompt_loss: bool = False
    growing: bool = False


class EvaluationSettings(Section):
    """Evaluation on data that is not trained on: the mean loss, without dropout; see ``train.step.evaluation``.

    Attributes:
        paths: As ``data.paths``, of the same format; or
        share: the last share of the tokens of ``data.paths``, which is then not trained on.
        interval: Steps between two evaluations; 0 evaluates after the last step only.
        sequences: Sequences that are evaluated, the first of the data; ``"none"`` for all.
    """

    paths: Annotated[tuple[Pattern, ...], Field(strict=False)] = ()
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    interval: Count = 0
    sequences: Positive | None = None


class GroupSettings(Section):
    """Parameters with a learning rate or weight decay of their own.

    Attributes:
        match: Pattern of names, such as ``"layers.*.norm*"``; a parameter is in the first group that matches it.
        lr_ratio: Learning rate relative to the others'; 0 keeps the parameters as they are.
        weight_decay: ``"none"`` for that of the section, or none for biases and norms.
    """

    match: Annotated[str, Field(min_length=1)]
    lr_ratio: Annotated[float, Field(ge=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class OptimizerSettings(Section):
    """AdamW or Muon, and the learning rate.

    Attributes:
        kind: ``"adamw"``, fused; ``"muon"`` for the matrices of the layers' linears and experts, with AdamW for the
            others; see ``train.step.muon``.
        lr: Peak learning rate.
        betas, eps: Coefficients of AdamW. momentum: Of Muon.
        weight_decay: Weight decay of matrices; biases and norms have none.
        groups: Parameters with a rate or weight decay of their own.
        grad_clip: Maximum norm of all gradients together; ``"none"`` disables clipping.
        schedule: Learning rate after the warmup: ``"constant"``; ``"cosine"`` or ``"linear"`` decay over all remaining
            steps; ``"wsd"``, constant with linear decay over the last ``decay`` steps.
        warmup: Steps of linear warmup.
        decay: Decay steps of ``"wsd"``.
        min_lr_ratio: Learning rate of the last step relative to ``lr``, where the schedule decays.
        schedule_steps: Steps that the schedule spans; ``"none"`` for ``run.steps``. A run of fewer steps, such as one
            with ``--steps``, takes the first of them; one of more keeps the last rate.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 3e-4
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    groups: Annotated[tuple[GroupSettings, ...], Field(strict=False)] = ()
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup: Count = 0
    decay: Count = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    schedule_steps: Positive | None = None


class PrecisionSettings(Section):
    """Precision of the computation. Optimizer state and gradient reduction are fp32.

    Attributes:
        dtype: Dtype of activations and of parameters in use.
        fp8: ``"current"`` computes the products of the layers' linears in float8, scaled by the current values of each
            row; with ``dtype="bf16"``, and no schedule of ``pp`` that splits the backward. See ``ops.float8_linear``.
        fp8_bf16_layers: As many layers at the start, and at the end, whose linears stay in bf16.
        fp8_emulation: Quantize alike but multiply in fp32, on any device: slower than bf16, for tests.
        initial_scale, growth_interval: Initial loss scale of fp16, and the finite steps after which it doubles.
    """

    dtype: Literal["bf16", "fp32", "fp16"] = "bf16"
    fp8: Literal["none", "current"] = "none"
    fp8_bf16_layers: Count = 1
    fp8_emulation: bool = False
    initial_scale: Annotated[float, Field(gt=0)] = 65536.0
    growth_interval: Positive = 2000


class RecomputeSettings(Section):
    """Activation recomputation; see ``train.recompute``.

    Attributes:
        kind: What is recomputed. every: Recompute every n-th block.
    """

    kind: Literal["none", "selective", "full", "experts"] = "none"
    every: Positive = 1


class CheckpointSettings(Section):
    """Checkpoints.

    Attributes:
        dir: Folder of the checkpoints; ``"none"`` for no checkpoints.
        interval: Steps between two checkpoints; 0 saves the last step only.
        keep: Number of checkpoints kept.
        keep_best: Save after each evaluation with the lowest loss so far, and keep the best beside the last ``keep``.
        asynchronous: Continue training while a checkpoint is written.
    """

    dir: Folder | None = None
    interval: Count = 0
    keep: Positive = 2
    keep_best: bool = False
    asynchronous: bool = True


class LoggingSettings(Section):
    """Console and file logging.

    Attributes:
        interval: Steps between two progress lines.
        jsonl: File with one JSON object a step. tensorboard: Folder of TensorBoard events.
        wandb: Project of Weights & Biases, whose package must be installed.
        plot: File for a plot of loss, throughput, gradient norm and learning rate, written at the end.
        trace: Folder for a picture of the pipeline as it was measured in the second step, and a trace for Chrome.
        profile: Folder for a trace of some steps by torch's profiler, and on a GPU a snapshot of its memory.
    """

    interval: Positive = 1
    jsonl: Folder | None = None
    tensorboard: Folder | None = None
    plot: Folder | None = None
    trace: Folder | None = None
    wandb: Annotated[str, Field(min_length=1)] | None = None
    profile: Folder | None = None


def _parallel_fields() -> dict[str, Any]:
    """The fields of ``Plan`` without those of other sections."""
    hints = typing.get_type_hints(Plan)
    found = {f.name: (hints[f.name], f.default) for f in fields(Plan) if f.name not in ("dtype", "recompute")}
    # The trainer always fuses the loss with the output embedding.
    return found | {
        "fused_loss": (bool, True),
        "layers_per_chunk": (Annotated[tuple[int, ...], Field(strict=False)], ()),
    }


class _ParallelSettings(Section):
    """The planner's ``Plan``: a table of its fields, or a string such as ``"dp=2,tp=2,zero=3"``."""

    @model_validator(mode="before")
    @classmethod
    def _input_grad_first(cls, given: Any) -> Any:
        """The backward pass of a pipeline stage always sends the gradient of its input first."""
        if not isinstance(given, dict) or given.get("pp", 1) == 1:
            return given
        if given.get("input_grad_first", True) is False:
            message = f"input_grad_first must be true with pp={given['pp']}: the gradient of the input is sent first"
            raise PydanticCustomError("parallel_ops", "{message}", {"message": message})
        return {"input_grad_first": True, **given}


if TYPE_CHECKING:
    ParallelSettings = _ParallelSettings
else:
    ParallelSettings = create_model(
        "ParallelSettings", __base__=_ParallelSettings, __doc__=_ParallelSettings.__doc__, **_parallel_fields()
    )
