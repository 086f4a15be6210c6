"""Saves a trainer's state in checkpoints, and resumes from them."""

import contextlib
import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from parallel_ops._internal.files import digest_of
from parallel_ops._internal.module_names import some_of
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.models.config import REPLACEABLE
from parallel_ops.models.lora import adapted_linears
from parallel_ops.train.checkpoint import checkpoints
from parallel_ops.train.checkpoint.checkpoints import CheckpointError, Checkpoints, Description, of_all
from parallel_ops.train.launch.consistency import comparison_of_world
from parallel_ops.train.launch.watchdog import longest
from parallel_ops.train.step.reductions import of_first_rank

if TYPE_CHECKING:
    from parallel_ops.train.run_state import RunState

# Key of the adapters in the description of a model.
LORA = "lora"
# Fields of a model's configuration that may differ from its checkpoint's.
_FREE = ("dropout", "attention_dropout", "init_std")
# Digests in the description of data, and what it means if they differ.
_DIGESTS = {"digest": "other tokens, or another order of files", "mask": "another mask of the loss"}
# Fields that a new phase may change.
IN_A_PHASE = (*REPLACEABLE, "vocab_size")
_ADVICE = "--resume PATH --new-phase, or Trainer.begin_phase, begins a new phase from its weights"


def state_dict(trainer: "RunState") -> dict[str, Any]:
    """Model, optimizer and progress of the run, by names that do not depend on the plan; of adapters, these alone."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=_options(trainer))
    progress = {"step": trainer.global_step, "samples_seen": trainer.samples_seen, "scale": trainer.scale.state_dict()}
    progress["dtype"] = trainer.settings.precision.dtype
    return {"model": model, "optimizer": optimizer, "progress": progress}


def load_state_dict(trainer: "RunState", state: dict[str, Any]) -> None:
    """Loads a ``state_dict``, which may come from other ranks."""
    groups = trainer.optimizer.param_groups
    own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        options=_options(trainer),
    )  # fmt: skip
    # Hyperparameters are those of the settings.
    for group, values in zip(trainer.optimizer.param_groups, own, strict=True):
        group.update(values)
    progress = state["progress"]
    trainer.global_step, trainer.samples_seen = progress["step"], progress["samples_seen"]
    trainer.evaluation_loss = None
    # The scale of another precision says nothing of this one's.
    if progress.get("dtype") in (None, trainer.settings.precision.dtype):
        trainer.scale.load_state_dict(progress["scale"])


def _options(trainer: "RunState") -> StateDictOptions:
    """With adapters the base comes from ``model.dir``, or from its seed, unless an earlier phase has trained it."""
    adapters = trainer.settings.lora is not None and not trainer.own_base
    return StateDictOptions(ignore_frozen_params=adapters, strict=not adapters)


def checkpointer(trainer: "RunState") -> Checkpoints | None:
    """The checkpoints in ``checkpoint.dir``, if it is set; all ranks call it."""
    own = trainer.settings.checkpoint
    if own.dir is None:
        return None
    return Checkpoints(
        own.dir, keep=own.keep, keep_best=own.keep_best, asynchronous=own.asynchronous, group=trainer.writers
    )


def save(trainer: "RunState", store: Checkpoints) -> None:
    """Saves a checkpoint, or starts to; all ranks call it."""
    trainer.activity(f"saving step {trainer.global_step}", slow=True)
    state = state_dict(trainer)
    progress = state.pop("progress")
    del state["optimizer"]["param_groups"]  # settings, and lists of names that differ between pipeline stages
    rest = {"scale": progress["scale"], "plan": trainer.settings.plan.text, "origin": trainer.origin}
    loss = trainer.evaluation_loss
    # For ``export`` and ``inspect``, which have no settings file.
    rest["settings"] = trainer.settings.model_dump(mode="json", exclude_unset=True)
    rest["optimizer"] = trainer.settings.optimizer.kind
    # With what matters to training alone, such as auxiliary losses.
    rest["model"] = _plain(trainer.model.config) if isinstance(trainer.model, Transformer) else None
    rest["dtype"] = trainer.settings.precision.dtype
    rest["config_json"] = getattr(trainer.model, "loaded_options", {})
    if (lora := trainer.settings.lora) is not None:
        digest = _base_digest(trainer) if trainer.rank == 0 else None
        rest["adapters"] = {"dropout": lora.dropout, "base": base_of(trainer), "digest": digest}
        rest["adapters"]["own_base"] = trainer.own_base
    rest["wandb_run"] = trainer.wandb_run
    rest["evaluation_loss"] = loss if loss is not None and math.isfinite(loss) else None
    # Rank 0 writes the description; the others need not read data for a digest.
    data = _data_of(trainer) if trainer.rank == 0 else {}
    store.save(state, Description(progress["step"], progress["samples_seen"], model_of(trainer), data, rest))
    trainer.saved_step = trainer.global_step


def save_and_wait(trainer: "RunState") -> None:
    """Saves a checkpoint in ``checkpoint.dir`` and waits until it is written."""
    store = checkpointer(trainer)
    if store is None:
        raise ValueError("Trainer: checkpoint.dir is not set")
    with contextlib.closing(store):
        # Later ones, as of a run before, would be kept in the place of this one.
        store.begin(trainer.global_step)
        save(trainer, store)
        store.wait()


def common_source(trainer: "RunState", folder: Path, activity: str) -> Path:
    """The newest checkpoint in a folder, which all ranks have found."""
    trainer.activity(activity, slow=True)
    with comparison_of_world(longest(trainer.settings.run.timeout)) as compare:
        source = checkpoints.newest(folder)
        compare({"checkpoint": source.name, "its data": changes_of_data(trainer, source)})
    return source


def resume(trainer: "RunState", folder: Path) -> Path:
    """Resumes from a checkpoint, or from the newest in a folder; see ``Trainer.resume``."""
    source = checkpoints.newest(folder)
    saved = described_as(source, model_of(trainer))
    own, before = trainer.settings.optimizer.kind, saved.rest.get("optimizer", "adamw")
    if own != before:
        raise CheckpointError(
            f"{source} has the state of {before}, but optimizer.kind is {own!r}: set it to {before!r}, or begin from "
            "the weights, by `parallel-ops export` and model.dir"
        )
    trainer.own_base = has_base(saved)
    base = None if trainer.own_base else saved.rest.get("adapters", {}).get("digest")
    if base is not None and (here := of_first_rank(lambda: _base_digest(trainer))) != base:
        raise CheckpointError(
            f"{source} has adapters of another base model, {saved.rest['adapters'].get('base') or base}: they are of "
            f"no use on {trainer.settings.model.dir or here}"
        )
    state = state_dict(trainer)
    del state["progress"]
    groups = state["optimizer"].pop("param_groups")
    metadata = checkpoints.open_checked(source, trainer.writers)
    lacking = [
        name for name, own in state["optimizer"]["state"].items()
        if any(f"optimizer.state.{name}.{key}" not in metadata.state_dict_metadata for key in own)
    ]  # fmt: skip
    if lacking := of_all(lacking, trainer.writers):
        raise CheckpointError(
            f"{source} has no state of the optimizer for {some_of(lacking)}, which its run has not trained; {_ADVICE}"
        )
    checkpoints.load(state, source, trainer.writers, metadata)
    state["optimizer"]["param_groups"] = groups
    samples_seen = 0
    if not changes_of_data(trainer, source):
        samples_seen = saved.samples_seen
        trainer.samples.restore(saved.data)
    progress = {"step": saved.step, "samples_seen": samples_seen, "scale": saved.rest["scale"]}
    load_state_dict(trainer, {**state, "progress": {**progress, "dtype": saved.rest.get("dtype")}})
    own_folder = trainer.settings.checkpoint.dir
    if own_folder is not None and own_folder.resolve() == source.resolve().parent:  # else it is another run
        trainer.wandb_run = saved.rest.get("wandb_run")
    return source


def base_of(trainer: "RunState") -> str | None:
    """The folder with the weights that adapters are of; ``None`` where they are those of the seed."""
    folder = trainer.settings.model.dir
    return None if folder is None else str(folder)


def has_base(saved: Description) -> bool:
    """True for a checkpoint of adapters that has the weights of their base, too."""
    adapters = saved.rest.get("adapters")
    return isinstance(adapters, dict) and adapters.get("own_base") is True


def described_as(source: Path, model: dict[str, Any]) -> Description:
    """The description of a checkpoint of ``model``.

    Raises:
        CheckpointError: It is of another model.
    """
    saved = checkpoints.describe(source)
    for name, value in {LORA: None, **model}.items():
        if name not in _FREE and saved.model.get(name) != value:
            advice = f"; {_ADVICE}" if name in (*IN_A_PHASE, LORA) else ""
            raise CheckpointError(
                f"{source} is of a model with {name} {saved.model.get(name)!r}, not {value!r}{advice}"
            )
    return saved


def changes_of_data(trainer: "RunState", source: Path) -> list[str]:
    """The differences between a trainer's data and a checkpoint's; empty if the next sample follows the last."""
    saved, own = dict(checkpoints.describe(source).data), _data_of(trainer)
    if problem := trainer.samples.problem(saved):
        return [problem]
    for name in (name for name in trainer.samples.extended if name in saved):
        del saved[name], own[name]
    digests = {name: (saved.pop(name, None), own.pop(name, None)) for name in _DIGESTS}
    found = [f"{name} {saved.get(name)} -> {own.get(name)}" for name in own | saved if saved.get(name) != own.get(name)]
    # Checkpoints from before have no digest; with ``prompt_loss`` there is none of the mask.
    differing = [name for name, (before, now) in digests.items() if before and now and before != now]
    return found or [_DIGESTS[name] for name in differing]


def shape_of(config: TransformerConfig) -> dict[str, Any]:
    """The description of a model in a checkpoint."""
    if config.experts is not None:
        config = dataclasses.replace(config, experts=config.experts.untrained())
    return _plain(config)


def _plain(config: TransformerConfig) -> dict[str, Any]:
    """A configuration in JSON's types."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def _base_digest(trainer: "RunState") -> str:
    """A digest of the model that adapters are added to."""
    folder = trainer.settings.model.dir
    if folder is None:
        return f"run.seed {trainer.settings.run.seed}"
    files = sorted(folder.glob("*.safetensors"))
    return _digest_once(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@functools.lru_cache
def _digest_once(files: tuple[tuple[Path, int, int], ...]) -> str:
    return digest_of(file for file, *_ in files)


def model_of(trainer: "RunState") -> dict[str, Any]:
    """The description of a trainer's model in its checkpoints."""
    if not isinstance(trainer.model, Transformer):
        return {"class": type(trainer.model).__name__.removeprefix("FSDP")}
    described = shape_of(trainer.model.config)
    if (lora := trainer.settings.lora) is not None:
        described[LORA] = {"rank": lora.rank, "alpha": lora.alpha, "linears": adapted_linears(trainer.model)}
    return described


def _data_of(trainer: "RunState") -> dict[str, Any]:
    samples, data = trainer.samples, trainer.settings.data
    # Left out at the default, so that checkpoints from before these keys have the same data.
    more: dict[str, Any] = {} if data.packing == "concatenate" else {"packing": data.packing}
    return {
        **more,
        **samples.described(),
        "seq_length": samples.seq_length,
        "seed": samples.seed,
        "document_mask": samples.document_mask,
        "shuffle": samples.shuffle,
    }
