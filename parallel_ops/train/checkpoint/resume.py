"""A trainer's state: what a checkpoint has of it, and how it goes on from one."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.train.checkpoint import checkpoints
from parallel_ops.train.checkpoint.checkpoints import CheckpointError, Checkpoints, Description

if TYPE_CHECKING:
    from parallel_ops.train.run_state import RunState

# Of a model's configuration, what may differ from that of its checkpoint.
_FREE = ("dropout", "attention_dropout", "init_std")


def state_dict(trainer: "RunState") -> dict[str, Any]:
    """Model and optimizer, by names that do not depend on the plan, and how far the run is."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    progress = {"step": trainer.global_step, "samples_seen": trainer.samples_seen, "scale": trainer.scale.state_dict()}
    return {"model": model, "optimizer": optimizer, "progress": progress}


def load_state_dict(trainer: "RunState", state: dict[str, Any]) -> None:
    """What ``state_dict`` gave, on these ranks or on others."""
    groups = trainer.optimizer.param_groups
    own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    # The settings say how it goes on.
    for group, values in zip(trainer.optimizer.param_groups, own, strict=True):
        group.update(values)
    progress = state["progress"]
    trainer.global_step, trainer.samples_seen = progress["step"], progress["samples_seen"]
    trainer.scale.load_state_dict(progress["scale"])


def save(trainer: "RunState", store: Checkpoints) -> None:
    """Saves a trainer; all ranks call it."""
    state = state_dict(trainer)
    progress = state.pop("progress")
    rest = {"scale": progress["scale"], "plan": trainer.settings.plan.text, "origin": trainer.origin}
    store.save(
        state,
        Description(progress["step"], progress["samples_seen"], _model_of(trainer), _data_of(trainer), rest),
    )


def resume(trainer: "RunState", folder: Path) -> Path:
    """Goes on from a checkpoint, or from the newest in a folder; see ``Trainer.resume``."""
    source = checkpoints.newest(folder)
    said = described_as(source, _model_of(trainer))
    state = state_dict(trainer)
    del state["progress"]
    checkpoints.load(state, source, trainer.writers)
    samples_seen = said.samples_seen if said.data == _data_of(trainer) else 0
    load_state_dict(
        trainer, {**state, "progress": {"step": said.step, "samples_seen": samples_seen, "scale": said.rest["scale"]}}
    )
    return source


def described_as(source: Path, model: dict[str, Any]) -> Description:
    """What a checkpoint says of itself, which is to be of this model.

    Raises:
        CheckpointError: it is of another.
    """
    said = checkpoints.describe(source)
    for name, value in model.items():
        if name not in _FREE and said.model.get(name) != value:
            raise CheckpointError(f"{source} is of a model with {name} {said.model.get(name)!r}, not {value!r}")
    return said


def changes_of_data(trainer: "RunState", source: Path) -> list[str]:
    """In what a trainer's data differ from those of a checkpoint; nothing where it goes on with the next sample."""
    said, own = checkpoints.describe(source).data, _data_of(trainer)
    return [f"{name} {said.get(name)} -> {own.get(name)}" for name in own | said if said.get(name) != own.get(name)]


def shape_of(config: TransformerConfig) -> dict[str, Any]:
    """A model as a checkpoint describes it."""
    described: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return described


def _model_of(trainer: "RunState") -> dict[str, Any]:
    if not isinstance(trainer.model, Transformer):
        return {"class": type(trainer.model).__name__.removeprefix("FSDP")}
    return shape_of(trainer.model.config)


def _data_of(trainer: "RunState") -> dict[str, Any]:
    samples = trainer.samples
    return {
        "tokens": len(samples.stream),
        "documents": samples.stream.documents,
        "seq_length": samples.seq_length,
        "seed": samples.seed,
        "document_mask": samples.document_mask,
        "shuffle": samples.shuffle,
    }
