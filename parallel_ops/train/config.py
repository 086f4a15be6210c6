"""The settings of a training run: one TOML file, with a class for each section in ``settings.py`` of the folder
that reads it, or in ``settings/``.

All keys are checked, also against each other, before anything starts: an unknown key is an error with the nearest
known one, and sizes must divide. ``"none"`` unsets an optional key. ``config_file`` reads files; ``json_schema``
returns their schema.
"""

import json
from dataclasses import MISSING, fields, replace
from functools import cached_property
from typing import Any

from pydantic import model_validator

from parallel_ops.models import TransformerConfig, config_from_pretrained
from parallel_ops.models.config import REPLACEABLE
from parallel_ops.models.lora import chosen, linear_names
from parallel_ops.ops.float8_recipes import RECIPES
from parallel_ops.pipeline_parallel.cut import cut
from parallel_ops.planner.export import find_target
from parallel_ops.planner.export.trainer import sharding_problems
from parallel_ops.planner.feasibility import SPLIT_BACKWARD, pipeline_problems
from parallel_ops.planner.plan import V_SHAPED, Plan
from parallel_ops.train.checkpoint.settings import CheckpointSettings
from parallel_ops.train.data.settings import DataSettings, EvaluationSettings
from parallel_ops.train.launch.settings import RunSettings
from parallel_ops.train.planner_model import planner_model
from parallel_ops.train.report.settings import LoggingSettings
from parallel_ops.train.settings.model import LoraSettings, ModelSettings
from parallel_ops.train.settings.parallel import ParallelSettings, RecomputeSettings, with_plan_in_sections
from parallel_ops.train.settings.section import Section, key_error
from parallel_ops.train.settings.sizes import Problems, expert_problems, float8_problems, size_problems
from parallel_ops.train.step.settings import OptimizerSettings, PrecisionSettings

# The key of ``[parallel]`` that a reason against a pipeline is about.
_KEYS = {"too few layers": "pp", "micro-batches": "global_batch", "schedule without pp": "schedule"}
# Why compiled blocks do not go with a schedule.
_APART = "it computes weight gradients apart, in 16 bits and eagerly"


class Settings(Section):
    """The settings of one training run.

    Attributes:
        parallel: The plan without dtype and recomputation, which have their own sections; see ``plan``.

    Raises:
        pydantic.ValidationError: All invalid keys; ``config_file.describe_errors`` formats them.
    """

    run: RunSettings = RunSettings()
    model: ModelSettings
    lora: LoraSettings | None = None
    data: DataSettings
    evaluation: EvaluationSettings = EvaluationSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    parallel: ParallelSettings = ParallelSettings()
    precision: PrecisionSettings = PrecisionSettings()
    recompute: RecomputeSettings = RecomputeSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()

    @model_validator(mode="before")
    @classmethod
    def _one_place_for_each(cls, given: Any) -> Any:
        return with_plan_in_sections(given)

    @model_validator(mode="after")
    def _fits_together(self) -> "Settings":
        for section, checked in (("parallel", "plan"), ("model", "config")):
            try:
                getattr(self, checked)
            except (ValueError, TypeError, OSError) as error:
                raise key_error(section, str(error)) from None
        for key, message in self._problems():
            raise key_error(key, message)
        return self

    def _problems(self) -> Problems:
        plan, optimizer = self.plan, self.optimizer
        yield from self._offload_problems()
        if not self.data.paths and not self.data.sources:
            yield "data.paths", "is missing"
        if self.data.paths and self.data.sources:
            yield "data.sources", "must be left out with data.paths: give one of them"
        if self.data.eos_id is not None and self.data.eos_id >= self.config.vocab_size:
            # No document would end, and a mask of documents would mask nothing.
            yield "data.eos_id", f"must be below the vocabulary's {self.config.vocab_size}, got {self.data.eos_id}"
        if self.data.growing and self.data.sources:
            yield "data.growing", "needs data.paths: a mixture by weight has sources of a known size"
        if self.data.growing and self.evaluation.share:
            yield "evaluation.share", "must be 0 with data.growing, whose end is not known: give evaluation.paths"
        for name, (values, has) in find_target("parallel_ops").limits.items():
            if (value := getattr(plan, name)) not in values:
                yield f"parallel.{name}", f"must be {' or '.join(map(str, values))}, got {value}: {has}"
        yield from ((f"parallel.{key}", reason) for key, reason in sharding_problems(plan))
        row = self.seq_length * (plan.micro_batch if self.data.document_mask else 1)
        yield from size_problems(self.config, plan, self.seq_length, row)
        yield from expert_problems(self.config, plan, self.seq_length, row)
        yield from self._pipeline_problems()
        if (optimizer.schedule == "wsd") != (optimizer.decay > 0):
            wanted = "at least 1 for the schedule wsd" if not optimizer.decay else "0 but for the schedule wsd"
            yield "optimizer.decay", f"must be {wanted}, got {optimizer.decay}"
        if optimizer.warmup + optimizer.decay > self.schedule_steps:
            decay = f" plus optimizer.decay {optimizer.decay}" if optimizer.decay else ""
            key = "run.steps" if optimizer.schedule_steps is None else "optimizer.schedule_steps"
            yield (
                "optimizer.warmup",
                f"{optimizer.warmup}{decay} is more than {key} {self.schedule_steps}: lower it, or raise {key}",
            )
        if self.parallel.cp_layout in ("balanced", "auto") and plan.cp > 1 and self.run.compile:
            yield (
                "run.compile",
                "must be false with parallel.cp_layout balanced or auto: each batch has another layout to compile",
            )
        yield from self._group_problems()
        yield from self._fp8_problems()
        yield from self._evaluation_problems()
        yield from self._lora_problems()
        if self.checkpoint.interval and self.checkpoint.dir is None:
            yield "checkpoint.dir", "is needed with checkpoint.interval"

    def _group_problems(self) -> Problems:
        plan = self.plan
        if self.parallel.cp_layout == "auto" and plan.pp > 1:
            yield "parallel.cp_layout", "must not be auto with pp: micro-batches would differ in a rank's tokens"
        if self.parallel.cp_groups == "fixed":
            return
        for wrong, need in (
            (not self.data.document_mask, "data.document_mask: documents are what is shared out"),
            (plan.dp * plan.cp % 2 != 0, f"an even dp * cp, got {plan.dp * plan.cp}"),
            (plan.pp > 1, "parallel.pp of 1: stages would differ in their numbers of tokens"),
            (plan.tp > 1 and plan.sequence_parallel, "sequence_parallel of false: tp need not divide tokens"),
            (plan.cp_kind != "ring", "parallel.cp_kind of ring: heads need not divide by all sizes of groups"),
            (self.config.experts is not None, "a model without experts: their loads are summed over cp"),
            (self.run.compile, "run.compile of false: each batch has other groups to compile"),
        ):
            if wrong:
                yield "parallel.cp_groups", f"by_length needs {need}"

    def _lora_problems(self) -> Problems:
        if self.lora is None:
            return
        if self.plan.cp > 1 and self.lora.dropout:
            yield "lora.dropout", f"needs parallel.cp of 1, got {self.plan.cp}: masks would differ from one rank's"
        for key in self.precision.float8:
            yield f"precision.{key}", 'must be "bf16" with lora: adapters are in 16 bits'
        if self.model.freeze:
            yield "model.freeze", "must be left out with lora, which freezes all parameters but the adapters"
        try:
            chosen(self.config, linear_names(self.config), self.lora.options)
        except ValueError as error:
            yield "lora.targets", str(error)

    def _fp8_problems(self) -> Problems:
        own, plan, layers = self.precision, self.plan, self.config.num_layers
        if own.experts is not None and self.config.experts is None:
            yield "precision.experts", "must be left out for a model without experts"
        if not own.float8:
            if own.fp8_emulation:
                yield "precision.fp8_emulation", f"needs precision.linears {', '.join(RECIPES)}, got 'bf16'"
            return
        if own.dtype != "bf16":
            yield f"precision.{next(iter(own.float8))}", f'needs precision.dtype = "bf16", got {own.dtype!r}'
        if 2 * own.fp8_bf16_layers >= layers:
            yield (
                "precision.fp8_bf16_layers",
                f"is {own.fp8_bf16_layers}, at the start and at the end, which leaves none of the {layers} layers in "
                "float8; lower it",
            )
        else:
            multiples = {key: RECIPES[recipe].multiple for key, recipe in own.float8.items()}
            yield from float8_problems(self.config, plan.tp, multiples, own.fp8_bf16_layers)

    def _evaluation_problems(self) -> Problems:
        own, keep_best = self.evaluation, self.checkpoint.keep_best
        if own.paths and own.share:
            yield "evaluation.share", "must be 0 with evaluation.paths: give one of them"
        if not self.evaluates:
            if own.interval or own.sequences:
                key = "interval" if own.interval else "sequences"
                yield f"evaluation.{key}", "needs data to evaluate on: evaluation.paths or evaluation.share"
            if keep_best:
                yield "checkpoint.keep_best", "needs an evaluation: evaluation.paths or evaluation.share"
        if keep_best and self.checkpoint.dir is None:
            yield "checkpoint.dir", "is needed with checkpoint.keep_best"

    def _offload_problems(self) -> Problems:
        if self.recompute.offload == "all" and self.recompute.kind == "selective":
            other = "'inputs', or recompute.kind none, full or experts"
            yield "recompute.offload", f"must be {other}: selective recomputation keeps its results itself"
        if self.recompute.offload != "none" and self.run.compile:
            yield "run.compile", "must be false with recompute.offload: compiled blocks choose what they save"

    def _pipeline_problems(self) -> Problems:
        plan = self.plan
        if plan.pp == 1 and self.logging.trace is not None:
            yield "logging.trace", "needs parallel.pp of 2 or more: it draws the pipeline"
        model = planner_model(self.config, self.seq_length)
        for found in pipeline_problems(model, plan, plan.recompute):
            yield f"parallel.{_KEYS.get(found.kind, 'schedule')}", found.reason
        if plan.pp > 1 and plan.layers_per_chunk:
            try:
                cut(self.config.num_layers, plan)
            except ValueError as error:
                yield "parallel", str(error)
        if plan.pp > 1 and self.run.compile and plan.schedule in SPLIT_BACKWARD:
            other = "or take the schedule 1f1b, interleaved or gpipe"
            yield "run.compile", f"must be false with schedule {plan.schedule!r}, {other}: {_APART}"

    @cached_property
    def plan(self) -> Plan:
        """The plan, with dtype and recomputation."""
        parallel = dict(self.parallel)
        del parallel["cp_layout"], parallel["cp_groups"]
        several = parallel["schedule"] in (*V_SHAPED, "interleaved")
        if several and "virtual_stages" not in self.parallel.model_fields_set:
            parallel["virtual_stages"] = 2
        if parallel["tp"] > 1 and not parallel["expert_tp"] and self._has_experts():
            parallel["expert_tp"] = 1
        parallel["input_grad_first"] = parallel["input_grad_first"] and self.splits_backward
        return Plan(**parallel, dtype=self.precision.dtype, recompute=self.recompute.kind)

    @property
    def splits_backward(self) -> bool:
        """Pipelines send the gradient of an input first; compiled and captured blocks compute both at once."""
        captured = self.run.cuda_graph == "layers" and dict(self.parallel)["schedule"] not in SPLIT_BACKWARD
        return not self.run.compile and not captured

    @cached_property
    def config(self) -> TransformerConfig:
        """The configuration of the model."""
        config, over = self._given_config(), self.model.aux_loss_over
        if over is None:
            return config
        if config.experts is None:
            raise ValueError("aux_loss_over must be left out for a model without experts")
        return replace(config, experts=replace(config.experts, aux_loss_over=over))

    def _has_experts(self) -> bool:
        try:
            return self.config.experts is not None
        except (ValueError, TypeError, OSError):  # of the model, which says so itself
            return False

    def _given_config(self) -> TransformerConfig:
        model, shape = self.model, self.model.shape
        if needed := [
            f.name for f in fields(TransformerConfig) if f.default is not None and shape.get(f.name, 0) is None
        ]:
            raise ValueError(f"model.{needed[0]} must not be 'none': give a value, or leave it out")
        if model.dir is None:
            if missing := [f.name for f in fields(TransformerConfig) if f.default is MISSING and f.name not in shape]:
                raise ValueError(f"model needs {', '.join(missing)}, or dir")
            return TransformerConfig(**shape)
        if fixed := sorted(shape.keys() - set(REPLACEABLE)):
            raise ValueError(f"model.dir has the shape of the model: leave out {', '.join(fixed)}")
        config = replace(config_from_pretrained(model.dir), **shape)
        if config.positions == "learned" and "seq_length" in shape:
            raise ValueError("model.dir has a table of learned positions: leave out seq_length")
        return config

    @property
    def evaluates(self) -> bool:
        """There is data to evaluate on."""
        return bool(self.evaluation.paths) or self.evaluation.share > 0

    @property
    def schedule_steps(self) -> int:
        """Steps that the schedule of the learning rate spans."""
        return self.optimizer.schedule_steps or self.run.steps

    @property
    def seq_length(self) -> int:
        """Tokens in a sequence."""
        return self.data.seq_length or self.config.seq_length


def json_schema() -> str:
    """The JSON schema of a settings file, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}
    return json.dumps(schema, indent=2)
