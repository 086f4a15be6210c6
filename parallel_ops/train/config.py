"""The settings of a training run: one TOML file, with a class in ``config_sections`` for each section.

All keys are checked, also against each other, before anything starts: an unknown key is an error with the nearest
known one, and sizes must divide. ``"none"`` unsets an optional key. ``config_file`` reads files; ``json_schema``
returns their schema.
"""

import json
from collections.abc import Iterable
from dataclasses import MISSING, fields, replace
from functools import cached_property
from typing import Any

from pydantic import ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from parallel_ops.models import TransformerConfig, config_from_pretrained
from parallel_ops.models.config import REPLACEABLE
from parallel_ops.models.lora import chosen, linear_names
from parallel_ops.planner.export import find_target
from parallel_ops.planner.feasibility import SPLIT_BACKWARD, pipeline_problems
from parallel_ops.planner.plan import V_SHAPED, Plan, parse_fields
from parallel_ops.train.config_sections import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    LoggingSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    PrecisionSettings,
    RecomputeSettings,
    RunSettings,
    Section,
)
from parallel_ops.train.float8_sizes import size_problem
from parallel_ops.train.planner_model import planner_model

# The key of ``[parallel]`` that a reason against a pipeline is about.
_KEYS = {"too few layers": "pp", "micro-batches": "global_batch", "schedule without pp": "schedule"}
# Why compiled blocks and float8 do not go with a schedule.
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
        """Moves dtype and recomputation of a plan to their sections."""
        if not isinstance(given, dict) or isinstance(given.get("parallel"), Section):
            return given
        parallel = given.get("parallel", {})
        if isinstance(parallel, str):
            try:
                parallel = parse_fields(parallel, "parallel")
            except ValueError as error:
                raise _error(("parallel",), str(error)) from None
        if not isinstance(parallel, dict):
            return given
        out = {**given, "parallel": dict(parallel)}
        for name, section, key in (("dtype", "precision", "dtype"), ("recompute", "recompute", "kind")):
            if name not in parallel:
                continue
            value, own = out["parallel"].pop(name), out.get(section, {})
            own = own if isinstance(own, dict) else own.model_dump(exclude_unset=True)
            if own.get(key, value) != value:
                raise _error((section, key), f"is {own[key]!r}, but parallel.{name} is {value!r}")
            out[section] = {**own, key: value}
        return out

    @model_validator(mode="after")
    def _fits_together(self) -> "Settings":
        for section, checked in (("parallel", "plan"), ("model", "config")):
            try:
                getattr(self, checked)
            except (ValueError, TypeError, OSError) as error:
                raise _error((section,), str(error)) from None
        for place, message in self._problems():
            raise _error(place, message)
        return self

    def _problems(self) -> Iterable[tuple[tuple[str, ...], str]]:
        plan, optimizer = self.plan, self.optimizer
        if not self.data.paths and not self.data.sources:
            yield ("data", "paths"), "is missing"
        if self.data.paths and self.data.sources:
            yield ("data", "sources"), "must be left out with data.paths: give one of them"
        if self.data.growing and self.data.sources:
            yield ("data", "growing"), "needs data.paths: a mixture by weight has sources of a known size"
        if self.data.growing and self.evaluation.share:
            yield ("evaluation", "share"), "must be 0 with data.growing, whose end is not known: give evaluation.paths"
        for name, (values, has) in find_target("parallel_ops").limits.items():
            if (value := getattr(plan, name)) not in values:
                yield ("parallel", name), f"must be {' or '.join(map(str, values))}, got {value}: {has}"
        if plan.offload != "none" and not plan.zero:
            yield ("parallel", "offload"), "needs zero of 1 or more: FSDP2 offloads shards"
        if plan.offload != "none" and plan.dp_shard * plan.cp == 1:
            yield ("parallel", "offload"), "needs dp_shard * cp of 2 or more: FSDP2 offloads shards"
        yield from self._size_problems()
        yield from self._expert_problems()
        yield from self._pipeline_problems()
        if (optimizer.schedule == "wsd") != (optimizer.decay > 0):
            wanted = "at least 1 for the schedule wsd" if not optimizer.decay else "0 but for the schedule wsd"
            yield ("optimizer", "decay"), f"must be {wanted}, got {optimizer.decay}"
        if optimizer.warmup + optimizer.decay > self.schedule_steps:
            decay = f" plus optimizer.decay {optimizer.decay}" if optimizer.decay else ""
            key = "run.steps" if optimizer.schedule_steps is None else "optimizer.schedule_steps"
            yield (
                ("optimizer", "warmup"),
                f"{optimizer.warmup}{decay} is more than {key} {self.schedule_steps}: lower it, or raise {key}",
            )
        yield from self._fp8_problems()
        yield from self._evaluation_problems()
        yield from self._lora_problems()
        if self.checkpoint.interval and self.checkpoint.dir is None:
            yield ("checkpoint", "dir"), "is needed with checkpoint.interval"

    def _lora_problems(self) -> Iterable[tuple[tuple[str, ...], str]]:
        if self.lora is None:
            return
        if self.plan.cp > 1 and self.lora.dropout:
            yield (
                ("lora", "dropout"),
                f"needs parallel.cp of 1, got {self.plan.cp}: masks would differ from one rank's",
            )
        if self.precision.fp8 != "none":
            yield ("precision", "fp8"), 'must be "none" with lora: adapters are in 16 bits'
        if self.model.freeze:
            yield ("model", "freeze"), "must be left out with lora, which freezes all parameters but the adapters"
        try:
            chosen(self.config, linear_names(self.config), self.lora.targets)
        except ValueError as error:
            yield ("lora", "targets"), str(error)

    def _fp8_problems(self) -> Iterable[tuple[tuple[str, ...], str]]:
        own, plan, layers = self.precision, self.plan, self.config.num_layers
        if own.fp8 == "none":
            if own.fp8_emulation:
                yield ("precision", "fp8_emulation"), 'needs precision.fp8 = "current"'
            return
        if own.dtype != "bf16":
            yield ("precision", "fp8"), f'needs precision.dtype = "bf16", got {own.dtype!r}'
        if plan.pp > 1 and plan.schedule in SPLIT_BACKWARD:
            yield (
                ("precision", "fp8"),
                f"needs the schedule 1f1b, interleaved or gpipe, got {plan.schedule!r}: {_APART}",
            )
        if 2 * own.fp8_bf16_layers >= layers:
            yield (
                ("precision", "fp8_bf16_layers"),
                f"is {own.fp8_bf16_layers}, at the start and at the end, which leaves none of the {layers} layers in "
                "float8; lower it",
            )
        elif problem := size_problem(self.config, plan.tp, own.fp8_bf16_layers):
            yield ("precision", "fp8"), problem

    def _evaluation_problems(self) -> Iterable[tuple[tuple[str, ...], str]]:
        own, keep_best = self.evaluation, self.checkpoint.keep_best
        if own.paths and own.share:
            yield ("evaluation", "share"), "must be 0 with evaluation.paths: give one of them"
        if not self.evaluates:
            if own.interval or own.sequences:
                key = "interval" if own.interval else "sequences"
                yield ("evaluation", key), "needs data to evaluate on: evaluation.paths or evaluation.share"
            if keep_best:
                yield ("checkpoint", "keep_best"), "needs an evaluation: evaluation.paths or evaluation.share"
        if keep_best and self.checkpoint.dir is None:
            yield ("checkpoint", "dir"), "is needed with checkpoint.keep_best"

    def _size_problems(self) -> Iterable[tuple[tuple[str, ...], str]]:
        config, plan, length = self.config, self.plan, self.seq_length
        kv_heads = config.resolved_num_kv_heads
        for name, size in (("num_heads", config.num_heads), ("ffn_hidden_size", config.resolved_ffn_hidden_size)):
            if size % plan.tp:
                yield ("model", name), f"is {size}, which tp={plan.tp} must divide"
        if kv_heads % plan.tp and plan.tp % kv_heads:
            yield ("model", "num_kv_heads"), f"is {kv_heads}, which tp={plan.tp} must divide, or be a multiple of"
        if length > config.seq_length:
            longer = "; model.seq_length sets more" if config.positions == "rotary" else ""
            yield (
                ("data", "seq_length"),
                f"is {length}, but the model's sequences have at most {config.seq_length}{longer}",
            )
        for name, rows in (("vocab_size", config.vocab_size), ("seq_length", config.seq_length)):
            has_table = name == "vocab_size" or config.positions == "learned"
            if has_table and (plan.tp - 1) * -(-rows // plan.tp) >= rows:
                yield ("model", name), f"is {rows}, of which one of the tp={plan.tp} ranks would have no row"
        if plan.tp > 1 and plan.sequence_parallel and self._row_length % (plan.tp * plan.cp):
            yield ("data", "seq_length"), f"is {length}, which tp * cp ({plan.tp * plan.cp}) must divide"
        if plan.cp_kind == "all-to-all" and plan.cp > 1 and kv_heads % (plan.tp * plan.cp):
            yield ("model", "num_kv_heads"), f"is {kv_heads}, which tp * cp ({plan.tp * plan.cp}) must divide"

    @property
    def _row_length(self) -> int:
        """Tokens of a row of a micro-batch, which cp and sequence parallelism split."""
        return self.seq_length * (self.plan.micro_batch if self.data.document_mask else 1)

    def _expert_problems(self) -> Iterable[tuple[tuple[str, ...], str]]:
        experts, plan = self.config.experts, self.plan
        if experts is None:
            if plan.ep > 1:
                yield ("parallel", "ep"), f"must be 1 for a model without experts, got {plan.ep}"
            if plan.recompute == "experts":
                yield ("recompute", "kind"), "must not be 'experts' for a model without experts"
            return
        if experts.num_experts % plan.ep:
            yield ("parallel", "ep"), f"must divide the model's {experts.num_experts} experts, got {plan.ep}"
        if plan.ep > 1 and plan.dp_shard * plan.cp == 1 and plan.ep != plan.tp:
            yield ("parallel", "ep"), f"must be tp ({plan.tp}) where dp_shard and cp are 1, got {plan.ep}"
        if experts.capacity_factor is not None and plan.ep > 1 and self._row_length % plan.cp:
            yield (
                ("data", "seq_length"),
                f"is {self.seq_length}, which cp={plan.cp} must divide with capacity_factor and ep: experts have one "
                "capacity on all ranks",
            )
        if plan.ep > 1 and plan.dp_replicate > 1 and not (plan.zero and plan.dp_shard * plan.cp > 1):
            need = "zero of 1 or more, and dp_shard * cp of 2 or more"
            yield ("parallel", "ep"), f"with dp_replicate needs {need}: replicas of experts are shards"

    def _pipeline_problems(self) -> Iterable[tuple[tuple[str, ...], str]]:
        plan = self.plan
        if plan.pp == 1 and self.logging.trace is not None:
            yield ("logging", "trace"), "needs parallel.pp of 2 or more: it draws the pipeline"
        model = planner_model(self.config, self.seq_length)
        for found in pipeline_problems(model, plan, plan.recompute):
            yield ("parallel", _KEYS.get(found.kind, "schedule")), found.reason
        if plan.pp > 1 and self.run.compile and plan.schedule in SPLIT_BACKWARD:
            other = "or take the schedule 1f1b, interleaved or gpipe"
            yield ("run", "compile"), f"must be false with schedule {plan.schedule!r}, {other}: {_APART}"

    @cached_property
    def plan(self) -> Plan:
        """The plan, with dtype and recomputation."""
        parallel = dict(self.parallel)
        if "virtual_stages" not in self.parallel.model_fields_set and parallel["schedule"] in (
            *V_SHAPED,
            "interleaved",
        ):
            parallel["virtual_stages"] = 2
        if parallel["tp"] > 1 and not parallel["expert_tp"] and self._has_experts():
            parallel["expert_tp"] = 1
        parallel["input_grad_first"] = parallel["input_grad_first"] and self.splits_backward
        return Plan(**parallel, dtype=self.precision.dtype, recompute=self.recompute.kind)

    @property
    def splits_backward(self) -> bool:
        """Pipelines send the gradient of an input first; compiled blocks and float8 compute both gradients at once."""
        return not self.run.compile and self.precision.fp8 == "none"

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


def _error(place: tuple[str, ...], message: str) -> ValidationError:
    """A pydantic error of one key."""
    problem = PydanticCustomError("parallel_ops", "{message}", {"message": message})
    return ValidationError.from_exception_data("Settings", [InitErrorDetails(type=problem, loc=place, input=None)])


def json_schema() -> str:
    """The JSON schema of a settings file, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}
    return json.dumps(schema, indent=2)
