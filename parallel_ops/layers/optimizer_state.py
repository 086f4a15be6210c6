"""The state of an optimizer as parts of a whole, so that a checkpoint of it loads into another number of ranks.

An optimizer holds plain tensors in the shapes of its parameters: of a sharded parameter, one rank's part. Saved as it
is, such a tensor would pass for the whole. Here every state tensor in the shape of a sharded parameter (Adam's moments,
a momentum, an fp32 master copy) gets the parameter's place in the whole, as in the model's ``state_dict``:

    state = {"model": model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)}
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)

    state = {"model": model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)}
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)          on any number of ranks, in place
    model.load_state_dict(state["model"])
    load_optimizer_state_dict(model, optimizer, state["optimizer"])

The dictionaries are laid out as those of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, which
knows nothing of the parts and, where the optimizer has not stepped yet, takes a step with it to have something to load
into. Here a copy of the optimizer takes that step, on a copy of the parameter.
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel_ops.comm._group import group_size
from parallel_ops.layers._sharding import ShardedModule, Sharding, as_part, as_whole

StateDict = dict[str, Any]


def optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> StateDict:
    """The state of ``optimizer``, by the names of ``model``'s parameters.

    Args:
        model: the layers whose parameters ``optimizer`` steps; not wrapped, where names should fit other models.
        optimizer: any whose state tensors are single numbers or have the shape of their parameter. On a single rank
            the others are saved too, as they are.

    Returns:
        ``state``: for each parameter's name its state, where tensors of the parameter's shape are as in
        ``model.state_dict()``: DTensors that share the optimizer's memory if the parameter is sharded, plain tensors if
        not. ``param_groups``: the hyperparameters, with names under ``params``. ``not_stepped``: names of parameters
        that have no state yet; theirs is the state after a step without a gradient, to be loaded into.

    Raises:
        TypeError: arguments that are not a module and an optimizer.
        ValueError: a parameter that is not the model's, or is also sharded by something else; on several ranks, a state
            tensor of another shape (Adafactor's rows, say).
        RuntimeError: a parameter has no state yet and the optimizer cannot step it alone.

    Nothing is communicated, and neither the optimizer nor its parameters change. Pipeline stages have groups of their
    own parameters: save each stage under a key of its own.
    """
    layout = _Layout("optimizer_state_dict", model, optimizer)
    numbered = optimizer.state_dict()
    state: StateDict = {}
    not_stepped: list[str] = []
    for group, packed in zip(optimizer.param_groups, numbered["param_groups"], strict=True):
        for parameter, number in zip(group["params"], packed["params"], strict=True):
            name = layout.names[parameter]
            own = numbered["state"].get(number)
            if not own:
                own = layout.first_state(parameter, group)
                not_stepped += [name] if own else []
            if own:
                state[name] = {key: layout.to_whole(parameter, key, value) for key, value in own.items()}
        packed["params"] = layout.names_in(group)
    return {"state": state, "param_groups": numbered["param_groups"], "not_stepped": not_stepped}


def load_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: StateDict) -> None:
    """Gives ``optimizer`` the state and the hyperparameters that ``optimizer_state_dict`` returned.

    Args:
        model, optimizer: as of ``optimizer_state_dict``; the optimizer may have stepped or not.
        state_dict: from the same model on as many ranks, or filled by ``torch.distributed.checkpoint`` from one on any
            number; or with whole tensors, of which each rank takes its part. Parameters may come in another order, but
            not in other groups. DTensors and parts are taken over, not copied, as ``Optimizer.load_state_dict`` does.

    State tensors get the dtype that this optimizer keeps them in.

    Raises:
        TypeError: arguments that are not a module, an optimizer and a dictionary.
        ValueError: names that are missing or too many, other groups, missing state, a tensor of another shape; all
            before anything is loaded.
    """
    layout = _Layout("load_optimizer_state_dict", model, optimizer)
    groups = _matching_groups(layout, optimizer, state_dict)
    dropped, given = set(state_dict.get("not_stepped", ())), state_dict["state"]
    numbered = optimizer.state_dict()
    state: StateDict = {}
    dtypes: list[tuple[nn.Parameter, str, Tensor, torch.dtype]] = []
    for group, packed, saved in zip(optimizer.param_groups, numbered["param_groups"], groups, strict=True):
        for parameter, number in zip(group["params"], packed["params"], strict=True):
            name = layout.names[parameter]
            if name in dropped:
                continue
            expected = numbered["state"].get(number) or layout.first_state(parameter, saved)
            own = layout.to_parts(parameter, given.get(name, {}), expected)
            if own:
                state[number] = own
            for key, value in own.items():
                if isinstance(value, Tensor) and key != "step":
                    like = expected.get(key)
                    dtypes.append((parameter, key, value, like.dtype if isinstance(like, Tensor) else value.dtype))
    numbers = [packed["params"] for packed in numbered["param_groups"]]
    groups = [{**saved, "params": own} for saved, own in zip(groups, numbers, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # Torch gives every tensor the parameter's dtype, which would round an fp32 master copy to bf16.
    for parameter, key, value, dtype in dtypes:
        loaded = optimizer.state[parameter].get(key)
        if isinstance(loaded, Tensor) and loaded.dtype is not dtype:
            optimizer.state[parameter][key] = value.to(loaded.device, dtype)


class _Layout:
    """How the parameters of an optimizer are called, and how they lie over the ranks."""

    def __init__(self, caller: str, model: nn.Module, optimizer: Optimizer) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{caller}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.caller, self.optimizer = caller, optimizer
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.parts: dict[nn.Parameter, tuple[Sharding, ProcessGroup | None]] = {
            child.get_parameter(name): (sharding, child.group)
            for child in model.modules()
            if isinstance(child, ShardedModule)
            for name, sharding in child.shardings.items()
        }
        self.several_ranks = any(group_size(group) > 1 for _, group in self.parts.values())
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in self.names:
                    raise ValueError(
                        f"{caller}: optimizer must step model's parameters only; group {number} has one of shape "
                        f"{list(parameter.shape)} that is not in model"
                    )
                if self.several_ranks and parameter in self.parts and isinstance(parameter.data, DTensor):
                    raise ValueError(
                        f"{caller}: parameter {self.names[parameter]!r} is a part of a whole and must be a plain "
                        "tensor, but something else has sharded it again as a DTensor"
                    )

    def names_in(self, group: StateDict) -> list[str]:
        return [self.names[parameter] for parameter in group["params"]]

    @functools.cached_property
    def _twin(self) -> Optimizer:
        """An optimizer of the same settings: without hooks, and without the counter of a learning-rate scheduler."""
        twin = copy.copy(self.optimizer)
        for key, value in vars(self.optimizer).items():  # what a subclass adds, copy leaves out
            if key != "step":
                vars(twin).setdefault(key, value)
        return twin

    def first_state(self, parameter: nn.Parameter, group: StateDict) -> StateDict:
        """The state after a step without a gradient; none of a frozen parameter."""
        if not parameter.requires_grad:
            return {}
        stepped = nn.Parameter(parameter.detach().clone())
        stepped.grad = torch.zeros_like(stepped)
        hyperparameters = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        twin = self._twin
        twin.state, twin.param_groups = defaultdict(dict), [{**hyperparameters, "params": [stepped]}]
        try:
            twin.step()
        except Exception as error:
            raise RuntimeError(
                f"{self.caller}: {type(self.optimizer).__name__} cannot make the state of parameter "
                f"{self.names[parameter]!r}, which has none yet; step it once before"
            ) from error
        return dict(twin.state_dict()["state"].get(0, {}))

    def to_whole(self, parameter: nn.Parameter, key: str, value: Any) -> Any:
        """What is saved of a state value."""
        if isinstance(value, Tensor) and value.shape == parameter.shape and parameter in self.parts:
            return as_whole(value, *self.parts[parameter])
        self._check_kind(parameter, key, value)
        return value

    def to_parts(self, parameter: nn.Parameter, given: StateDict, expected: StateDict) -> StateDict:
        """This rank's part of a parameter's state."""
        missing = [key for key in expected if key not in given]
        if missing:
            raise ValueError(
                f"{self.caller}: state_dict must have {', '.join(missing)} of {self.names[parameter]!r}, got "
                f"{', '.join(map(str, given)) or 'nothing of it'}"
            )
        return {key: self._to_part(parameter, key, value, expected.get(key)) for key, value in given.items()}

    def _to_part(self, parameter: nn.Parameter, key: str, value: Any, expected: Any) -> Any:
        if not isinstance(value, Tensor):
            self._check_kind(parameter, key, value)
            return value
        shape = expected.shape if isinstance(expected, Tensor) else None
        whole, part = shape, value
        if parameter in self.parts and value.dim() and shape in (None, parameter.shape):
            sharding, group = self.parts[parameter]
            whole, part = torch.Size(sharding.shape), as_part(value, sharding, group, parameter.shape)
            if not isinstance(value, DTensor) and part.numel() < value.numel():
                part = part.clone()  # lest the whole stays in memory for it
        stray = isinstance(part, DTensor) and not isinstance(parameter, DTensor)
        if stray or shape not in (None, part.shape):
            raise ValueError(
                f"{self.caller}: {key} of {self.names[parameter]!r} must have the layout of model.state_dict(), "
                f"{list(whole or parameter.shape)}, got {_describe(value)}"
            )
        self._check_kind(parameter, key, part)
        return part

    def _check_kind(self, parameter: nn.Parameter, key: str, value: Any) -> None:
        """On one rank anything can be saved; on several, only what is known to be alike on all, or a part."""
        fits = value.numel() == 1 or value.shape == parameter.shape if isinstance(value, Tensor) else not _holds(value)
        if self.several_ranks and not fits:
            raise ValueError(
                f"{self.caller}: {key} of {self.names[parameter]!r} must be a single number or a tensor of the "
                f"parameter's shape {list(parameter.shape)} to be re-sharded, got {_describe(value)}"
            )


def _matching_groups(layout: _Layout, optimizer: Optimizer, state_dict: StateDict) -> list[StateDict]:
    """For each group of the optimizer the saved one of the same parameters."""
    if not isinstance(state_dict, dict):
        raise TypeError(f"{layout.caller}: state_dict must be a dict, got {type(state_dict).__name__}")
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"{layout.caller}: state_dict must be one of optimizer_state_dict, but has no {key!r} among its keys "
                f"{list(state_dict)}"
            )
    own = [layout.names_in(group) for group in optimizer.param_groups]
    saved = list(state_dict["param_groups"])
    known = {name for names in own for name in names}
    listed = {name for group in saved for name in group["params"]}
    faults = (("lacks", known - listed), ("has too much", (listed | set(state_dict["state"])) - known))
    if any(names for _, names in faults):
        raise ValueError(
            f"{layout.caller}: state_dict must be of the optimizer's parameters, but "
            + " and ".join(f"{what}: {_some(names)}" for what, names in faults if names)
        )
    found = []
    for number, names in enumerate(own):
        match = next((i for i, group in enumerate(saved) if set(group["params"]) == set(names)), None)
        if match is None:
            raise ValueError(
                f"{layout.caller}: param_groups of state_dict must be those of the optimizer, but none has just the "
                f"parameters of group {number}: {_some(names)}"
            )
        found.append(saved.pop(match))
    return found


def _holds(value: Any) -> bool:
    """Whether there is a tensor in a container."""
    values: Iterable[Any] = value.values() if isinstance(value, dict) else value if _is_sequence(value) else ()
    return any(isinstance(v, Tensor) or _holds(v) for v in values)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__} with tensors in it"
    placed = f" placed {list(value.placements)}" if isinstance(value, DTensor) else ""
    return f"{list(value.shape)}{placed}"


def _some(names: Iterable[Any]) -> str:
    """The first few names."""
    listed = sorted(map(str, names))
    return ", ".join(map(repr, listed[:3])) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
