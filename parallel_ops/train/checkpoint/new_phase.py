"""Begins a new phase of training from a checkpoint: other frozen parameters, adapters, sequences or rotary positions.

Weights are kept, the optimizer's state too where a parameter was trained before by the same kind of optimizer, and the
position in the data if these are the same. Steps and learning rate begin anew. Adapters that the new phase does not
have are added to the weights of their linears.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from parallel_ops._internal.distributed.shards import local_box
from parallel_ops._internal.module_names import some_of
from parallel_ops.layers.lora import is_adapter, names_of
from parallel_ops.models.config import plain_name
from parallel_ops.train.checkpoint import checkpoints
from parallel_ops.train.checkpoint.checkpoints import CheckpointError, Description, of_all
from parallel_ops.train.checkpoint.metadata import empty, sizes_of
from parallel_ops.train.checkpoint.resume import IN_A_PHASE, LORA, base_of, changes_of_data, has_base, model_of

if TYPE_CHECKING:
    from parallel_ops.train.run_state import RunState

# Tables of which a model with more or fewer rows keeps the first ones.
_TABLES = ("tokens.weight", "head.weight", "positions.weight")


def changes_of_model(source: Path, model: dict[str, Any]) -> list[str]:
    """The differences between a checkpoint's model and ``model``, as ``vocab_size 100 -> 120``.

    Raises:
        CheckpointError: They are more than a new phase can have.
    """
    saved, changes = checkpoints.describe(source).model, []
    for name, value in model.items():
        before = saved.get(name)
        if before == value or name == LORA:
            continue
        if name not in IN_A_PHASE:
            raise CheckpointError(
                f"{source} is of a model with {name} {before!r}, not {value!r}; a new phase may change "
                f"{', '.join(IN_A_PHASE)}, model.freeze and lora"
            )
        changes.append(f"{name} {before} -> {value}")
    return changes


def begin(trainer: "RunState", source: Path) -> list[str]:
    """Begins a new phase; all ranks call it. See ``Trainer.begin_phase``."""
    saved, own_lora = checkpoints.describe(source), model_of(trainer).get(LORA)
    changes = changes_of_model(source, model_of(trainer))
    old_lora = saved.model.get(LORA)
    only_adapters = old_lora is not None and not has_base(saved)
    if only_adapters and (base := base_of(trainer)) != (before := saved.rest.get("adapters", {}).get("base")):
        changes.append(f"the model of the adapters {before} -> {base}")
    metadata = checkpoints.open_checked(source, trainer.writers)
    stored = sizes_of(metadata)
    merged = [] if old_lora is None or old_lora == own_lora else list(old_lora["linears"])
    scaling = 1.0 if old_lora is None else old_lora["alpha"] / old_lora["rank"]
    found: Any = get_state_dict(trainer.model, trainer.optimizer, options=StateDictOptions())
    model, optimizer = found
    state = optimizer["state"]
    kept = {name: t for name, t in model.items() if stored.get(f"model.{name}") == tuple(t.shape)}
    if old_lora != own_lora:
        kept = {name: t for name, t in kept.items() if not is_adapter(name)}
    tables = [name for name in _TABLES if name in model and name not in kept and f"model.{name}" in stored]
    lacking = [name for name in model if name not in kept and name not in tables and not is_adapter(name)]
    if lacking and not only_adapters:
        raise CheckpointError(f"{source} is of another model: it has no {some_of(lacking)} of the same shape")
    same_kind = saved.rest.get("optimizer", "adamw") == trainer.settings.optimizer.kind
    states = {
        name: own for name, own in state.items()
        if same_kind and name in kept and all(
            stored.get(f"optimizer.state.{name}.{key}") == tuple(t.shape) for key, t in own.items()
        )
    }  # fmt: skip
    # Read whole: of tables, and of adapters to be merged.
    whole = {name: empty(metadata, f"model.{name}") for name in tables}
    for linear in merged:
        weight, *adapter = names_of(linear)
        if weight in model:
            whole |= {name: empty(metadata, f"model.{name}") for name in adapter}
    checkpoints.load({"model": {**kept, **whole}, "optimizer": {"state": states}}, source, trainer.writers, metadata)
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=StateDictOptions()
    )
    parameters = {plain_name(name): p for name, p in trainer.model.named_parameters()}
    for name in tables:
        _copy_rows(parameters[name], whole[name])
    for linear in merged:
        weight, *adapter = names_of(linear)
        if weight in parameters:
            a, b = (whole[name].float() for name in adapter)
            _add(parameters[weight], scaling * (b @ a))
    trainer.own_base = own_lora is not None and (not only_adapters or bool(merged))
    trainer.global_step, trainer.samples_seen, trainer.evaluation_loss = 0, 0, None
    other_data = changes_of_data(trainer, source)
    if not other_data:
        trainer.samples_seen = saved.samples_seen
        trainer.samples.restore(saved.data)
    if saved.rest.get("dtype") == trainer.settings.precision.dtype:
        trainer.scale.load_state_dict(saved.rest["scale"])
    named: dict[str, Iterable[str]] = {
        "kept": kept, "tables": tables, "anew": [name for name in model if is_adapter(name) and name not in kept],
        "states": states, "new states": [name for name in state if name not in states],
    }  # fmt: skip
    everywhere = {name: of_all(some, trainer.writers) for name, some in named.items()}
    return _lines(trainer, saved, everywhere, changes, merged, other_data, only_adapters)


def _lines(
    trainer: "RunState", saved: Description, found: dict[str, list[str]], changes: list[str], merged: list[str],
    other_data: list[str], only_adapters: bool,
) -> list[str]:  # fmt: skip
    """Lines that say what is kept and what begins anew."""
    base = f", the others are those of {base_of(trainer) or 'the seed'}" if only_adapters else ""
    weights = f"{len(found['kept'])} weights{base}"
    lines = [f"kept: {weights}", f"kept: the optimizer's state of {len(found['states'])} parameters"]
    lines += [f"kept: the first rows of {name}" for name in found["tables"]]
    lines += [f"kept: adapters of {some_of(merged)}, added to the weights of these linears"] if merged else []
    lines += [] if other_data else [f"kept: the position in the data, sample {saved.samples_seen:,}"]
    lines += [f"changed: {change}" for change in changes]
    lines += [f"anew: weights of {some_of(found['anew'])}"] if found["anew"] else []
    if found["new states"]:
        lines += [f"anew: the optimizer's state of {some_of(found['new states'])}"]
    lines += [f"anew: the data, from their first sample ({', '.join(other_data)})"] if other_data else []
    return [*lines, f"anew: steps and learning rate; {saved.step:,} steps were taken before"]


def _part(parameter: nn.Parameter) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter, and its place in the whole."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    starts, sizes = local_box(parameter)
    return local, tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


@torch.no_grad()
def _copy_rows(parameter: nn.Parameter, rows: Tensor) -> None:
    """Copies the rows that a table has, too."""
    local, place = _part(parameter)
    given = rows[place]
    local[: len(given)].copy_(given)


@torch.no_grad()
def _add(parameter: nn.Parameter, whole: Tensor) -> None:
    local, place = _part(parameter)
    local.add_(whole[place].to(local))
