"""Settings from a DeepSpeed JSON. A key that is not supported is an error that names it.

The settings file provides ``"auto"`` and missing values; values in both files must be equal. Keys for implementation
details of DeepSpeed (bucket sizes, prefetching, pinning) change no result and are named in a warning. Weight decay
applies to matrices only, as usual with DeepSpeed's parameter groups too.

Keys: DeepSpeed 0.19, ``runtime/constants.py``, ``runtime/zero/config.py``, ``runtime/lr_schedules.py``.
"""

import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from parallel_ops._internal.files import read_json
from parallel_ops.planner.field_text import parse_fields
from parallel_ops.planner.plan import PLAN_FIELDS, Plan
from parallel_ops.train.step.settings import OptimizerSettings

Kind = type | tuple[type, ...]

_NUMBER = (int, float)
# Keys that are copied, if they are there: the section and key of the settings, the type, a change of the value.
_COPIED: dict[str, tuple[str, str, Kind, Callable[[Any], Any]]] = {
    "fp16.initial_scale_power": ("precision", "initial_scale", int, lambda power: 2.0**power),
    "fp16.loss_scale_window": ("precision", "growth_interval", int, int),
    "zero_optimization.stage": ("parallel", "zero", int, int),
    "tensor_parallel.autotp_size": ("parallel", "tp", int, lambda size: size or 1),  # 0 is off
    "optimizer.params.lr": ("optimizer", "lr", _NUMBER, float),
    "optimizer.params.betas": ("optimizer", "betas", list, list),
    "optimizer.params.eps": ("optimizer", "eps", _NUMBER, float),
    "optimizer.params.weight_decay": ("optimizer", "weight_decay", _NUMBER, float),
    "gradient_clipping": ("optimizer", "grad_clip", _NUMBER, lambda norm: norm or "none"),
    "scheduler.params.warmup_max_lr": ("optimizer", "lr", _NUMBER, float),
    "scheduler.params.total_num_steps": ("run", "steps", int, int),
    "steps_per_print": ("logging", "interval", int, int),
}
# Patterns of keys without effect on results; a dot separates table and key.
_HINTS = (
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "zero_allow_untested_optimizer", "disable_allgather",
    "zero_force_ds_cpu_optimizer", "checkpoint.*", "*.auto_cast", "optimizer.params.torch_adam",
    "optimizer.params.fused", "optimizer.legacy_fusion",
    *(f"zero_optimization.{name}" for name in (
        "overlap_comm", "contiguous_gradients", "reduce_scatter", "*bucket_size", "allgather_partitions", "stage3_*",
        "round_robin_gradients", "sub_group_size", "memory_efficient_linear", "load_from_fp32_weights",
        "elastic_checkpoint", "ignore_unused_parameters", "use_all_reduce_for_fetch_params", "offload_*.pin_memory",
        "offload_*.buffer_*", "offload_*.fast_init", "offload_*.pipeline_*", "offload_*.max_in_cpu",
    )),
)  # fmt: skip
# Keys that select features which are not supported, and the values with which they are off.
_OFF = dict.fromkeys(
    """
    prescale_gradients sparse_gradients amp.enabled torch_autocast.enabled fp16.consecutive_hysteresis
    zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_nontrainable_weights
    zero_optimization.zero_quantized_gradients zero_optimization.mics_hierarchical_params_gather
    activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing
    activation_checkpointing.contiguous_memory_optimization
    activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile
    flops_profiler.enabled comms_logger.enabled csv_monitor.enabled wandb.enabled comet.enabled elasticity.enabled
    data_efficiency.enabled curriculum_learning.enabled progressive_layer_drop.enabled eigenvalue.enabled
    autotuning.enabled optimizer.params.amsgrad
    """.split(),  # noqa: SIM905
    (False,),
)
_FIXED: dict[str, tuple[Any, ...]] = {
    **_OFF,
    "gradient_predivide_factor": (1,),
    "communication_data_type": (None, "fp32"),
    "data_types.grad_accum_dtype": (None, "fp32"),
    "fp16.loss_scale": (0,),
    # DeepSpeed's defaults, which count where the keys are missing too, let a scale fall one overflow later, and not
    # below 1.
    "fp16.hysteresis": (1, 2),
    "fp16.min_loss_scale": (0, 1),
    "zero_optimization.offload_optimizer.ratio": (1,),
    "zero_optimization.zero_hpz_partition_size": (1,),
    "activation_checkpointing.number_checkpoints": (None,),
    "compression_training": (None, {}),
    "optimizer.params.bias_correction": (True,),
    "optimizer.params.adam_w_mode": (True,),
}


def with_deepspeed(data: Mapping[str, Any], path: Path, ranks: int | None = None) -> dict[str, Any]:
    """The content of a settings file, merged with a DeepSpeed JSON.

    Args:
        ranks: Ranks of the run, for batch sizes that depend on them; ``None`` for those of the plan in ``data``.

    Raises:
        OSError: From the file system. ValueError: The file is not JSON, or a key contradicts the settings or is not
        supported; the message names it.
    """
    reader = _Reader(data, read_json(path), str(path))
    reader.read(ranks)
    return reader.settings


class _Reader:
    """Moves supported keys to the settings and checks the remaining ones."""

    def __init__(self, data: Mapping[str, Any], given: dict[str, Any], name: str) -> None:
        self.name = name
        parallel = data.get("parallel", {})
        self.settings: dict[str, Any] = dict(data)
        if isinstance(parallel, str):
            parallel = parse_fields(parallel, "parallel", PLAN_FIELDS)
        self.settings["parallel"] = dict(parallel)
        self.given = dict(_flat(given))
        self.left = {key: value for key, value in self.given.items() if value != "auto"}

    def read(self, ranks: int | None) -> None:
        self._precision()
        for source, (section, key, kind, change) in _COPIED.items():
            if (value := self.take(source, kind)) is not None:
                self.put(section, key, change(value), source)
        self._zero()
        self._parallel(ranks)
        self._optimizer()
        self._scheduler()
        self._logging()
        hints = []
        for key, value in self.left.items():
            fixed = _FIXED.get(key)
            if fixed is not None:
                if value not in fixed:
                    raise self._error(key, f"cannot be {value!r}, only {' or '.join(map(repr, fixed))}")
            elif any(fnmatchcase(key, pattern) for pattern in _HINTS):
                hints.append(key)
            elif not self._off(key):
                raise self._error(key, f"is not supported, got {value!r}")
        if hints:
            warnings.warn(f"{self.name}: without effect here: {', '.join(sorted(hints))}", stacklevel=2)

    def _off(self, key: str) -> bool:
        """True for a key of a table whose ``enabled`` is false."""
        switch = f"{key.partition('.')[0]}.enabled"
        return key != switch and self.left.get(switch) is False

    def _error(self, key: str, message: str) -> ValueError:
        return ValueError(f"{self.name}: {key} {message}")

    def take(self, key: str, kind: Kind) -> Any:
        """Removes and returns a value; ``None`` if it is missing."""
        value = self.left.pop(key, None)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise self._error(key, f"must be {getattr(kind, '__name__', 'a number')}, got {value!r}")
        return value

    def put(self, section: str, key: str, value: Any, source: str) -> None:
        """Sets a key of the settings, unless it has another value."""
        own = self.settings.get(section, {})
        if key in own and own[key] != value:
            raise self._error(source, f"says {value!r}, but {section}.{key} is {own[key]!r}")
        self.settings[section] = {**own, key: value}

    def _precision(self) -> None:
        bf16, fp16 = (self.take(f"{name}.enabled", bool) for name in ("bf16", "fp16"))
        if bf16 and fp16:
            raise self._error("fp16.enabled", "and bf16.enabled are both true")
        if bf16 is not None or fp16 is not None:
            self.put("precision", "dtype", "bf16" if bf16 else "fp16" if fp16 else "fp32", "bf16.enabled, fp16.enabled")
        # "auto" leaves it to the settings.
        if not fp16 and (fp16 is False or self.settings.get("precision", {}).get("dtype") != "fp16"):
            self.left = {key: value for key, value in self.left.items() if not key.startswith("fp16.")}

    def _zero(self) -> None:
        optimizer, parameters = (f"zero_optimization.{name}.device" for name in ("offload_optimizer", "offload_param"))
        found = {key: self.take(key, str) for key in (optimizer, parameters)}
        for key, place in found.items():
            if place not in (None, "none", "cpu"):
                raise self._error(key, f"cannot be {place!r}: only the CPU is supported")
        if found[parameters] == "cpu" and found[optimizer] != "cpu":
            raise self._error("zero_optimization.offload_param", "needs offload_optimizer: both are offloaded together")
        if found[optimizer] is not None:
            self.put("parallel", "offload", "optimizer" if found[optimizer] == "cpu" else "none", optimizer)

    def _parallel(self, ranks: int | None) -> None:
        context = self.take("sequence_parallel_size", int)
        if context is not None:
            self.put("parallel", "cp", context, "sequence_parallel_size")
            if context > 1:
                self.put("parallel", "cp_kind", "all_to_all", "sequence_parallel_size")
        parallel = self.settings["parallel"]
        sizes = {name: parallel.get(name, 1) for name in ("dp", "tp", "cp")}
        if ranks is not None and "dp" not in parallel:
            if ranks % (sizes["tp"] * sizes["cp"]):
                raise self._error("train_batch_size", f"is for {ranks} ranks, which tp * cp does not divide")
            sizes["dp"] = ranks // (sizes["tp"] * sizes["cp"])
            self.put("parallel", "dp", sizes["dp"], "the number of processes")
        shard = self.take("zero_optimization.mics_shard_size", int)
        if shard is not None and shard > 0:
            if sizes["dp"] % shard:
                raise self._error(
                    "zero_optimization.mics_shard_size", f"is {shard}, which does not divide dp={sizes['dp']}"
                )
            self.put("parallel", "dp_replicate", sizes["dp"] // shard, "zero_optimization.mics_shard_size")
        self._batches(sizes["dp"])

    def _batches(self, dp: int) -> None:
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        whole, micro, accumulation = (self.take(key, int) for key in keys)
        for key, value in zip(keys, (whole, micro, accumulation), strict=True):
            if value is not None and value < 1:
                raise self._error(key, f"must be at least 1, got {value}")
        parallel = self.settings["parallel"]
        if micro is None and whole is not None and accumulation is not None:
            micro = whole // (accumulation * dp)
        elif micro is None:
            micro = parallel.get("micro_batch", Plan().micro_batch)
        if accumulation is not None:
            if whole not in (None, micro * accumulation * dp):
                raise self._error(
                    keys[0],
                    f"is {whole}, not {micro} of {keys[1]} x {accumulation} of {keys[2]} x {dp} data-parallel ranks",
                )
            whole = micro * accumulation * dp
        elif whole is None and "global_batch" not in parallel:
            whole = micro * dp
        self.put("parallel", "micro_batch", micro, keys[1])
        if whole is not None:
            self.put("parallel", "global_batch", whole, keys[0])

    def _optimizer(self) -> None:
        kind = self.take("optimizer.type", str)
        if kind is not None and kind.lower() not in ("adam", "adamw"):
            raise self._error("optimizer.type", f"cannot be {kind!r}: the optimizer is AdamW")

    def _scheduler(self) -> None:
        kind = self.take("scheduler.type", str)
        if kind is None:
            return
        schedules = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
        if kind not in schedules:
            raise self._error("scheduler.type", f"cannot be {kind!r}: there are {', '.join(schedules)}")
        prefix = "scheduler.params."
        # DeepSpeed's defaults count where a key is missing. This rate, unlike that of WarmupLR, is not the optimizer's.
        if kind == "WarmupDecayLR" and f"{prefix}warmup_max_lr" not in self.given:
            self.put("optimizer", "lr", 0.001, f"{prefix}warmup_max_lr, by default,")
        warmup = self.take(f"{prefix}warmup_num_steps", int)
        if self.given.get(f"{prefix}warmup_num_steps") == "auto":
            warmup = self.settings.get("optimizer", {}).get("warmup", OptimizerSettings().warmup)
        warmup = 1000 if warmup is None else warmup
        self.put("optimizer", "schedule", schedules[kind], "scheduler.type")
        self.put("optimizer", "warmup", warmup, f"{prefix}warmup_num_steps")
        shape = self.take(f"{prefix}warmup_type", str)
        if warmup > 1 and (shape or "log") != "linear":
            raise self._error(
                f"{prefix}warmup_type", f"cannot be {shape or 'log (the default)'}: the rate grows evenly"
            )
        for key in ("warmup_min_lr", "warmup_min_ratio"):
            if self.take(f"{prefix}{key}", _NUMBER):
                raise self._error(f"{prefix}{key}", "cannot be above 0: the rate grows from 0")
        ratio = self.take(f"{prefix}cos_min_ratio", _NUMBER)
        if kind != "WarmupLR" and self.given.get(f"{prefix}cos_min_ratio") != "auto":
            lowest = 0.0 if kind == "WarmupDecayLR" else 0.0001 if ratio is None else ratio
            self.put(
                "optimizer", "min_lr_ratio", lowest, "scheduler.type" if ratio is None else f"{prefix}cos_min_ratio"
            )

    def _logging(self) -> None:
        if self.take("tensorboard.enabled", bool):
            folder, job = self.take("tensorboard.output_path", str), self.take("tensorboard.job_name", str)
            self.put("logging", "tensorboard", str(Path(folder or "runs", job or "")), "tensorboard.output_path")
        else:
            self.left = {key: value for key, value in self.left.items() if not key.startswith("tensorboard.")}


def _flat(given: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Keys with their tables, ``zero_optimization.stage``."""
    found: list[tuple[str, Any]] = []
    for key, value in given.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" not in _FIXED:
            found += _flat(value, f"{prefix}{key}.")
        elif not (isinstance(value, dict) and not value):
            found.append((f"{prefix}{key}", value))
    return found
