"""AdamW or Muon, the learning rate, and the loss scale of fp16."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel_ops._internal.gradients.gradient_norm import mesh_of
from parallel_ops._internal.gradients.gradient_norm import total_norm as norm_of
from parallel_ops.models.config import plain_name
from parallel_ops.train.settings.patterns import matches
from parallel_ops.train.step.muon import MuonAndAdamW

if TYPE_CHECKING:
    from parallel_ops.train.step.settings import OptimizerSettings, PrecisionSettings

# Below this the gradients themselves are not finite, not their scaled values.
_LEAST_SCALE = 2.0**-14


def optimizer_of(model: nn.Module, settings: "OptimizerSettings") -> torch.optim.AdamW:
    """Fused AdamW over a model's parameters, or with Muon for the matrices of its layers; with its state allocated.

    torch would allocate it in the first step or when a checkpoint is loaded, and count the latter as a step.

    Its groups have ``lr_ratio``, the rate relative to that of the schedule.
    """
    named = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    # Fused, the parameters of a group must be on one mesh, and experts have one of their own.
    by_kind: dict[Any, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        # The biases of experts are matrices.
        is_weight = parameter.dim() > 1 and not name.endswith("bias")
        own = next((group for group in settings.groups if matches(name, [group.match])), None)
        decay = settings.weight_decay if is_weight else 0.0
        decay = decay if own is None or own.weight_decay is None else own.weight_decay
        momentum = settings.momentum if settings.kind == "muon" and is_weight and _is_matrix(name, parameter) else None
        ratio = 1.0 if own is None else own.lr_ratio
        # Gates and ups of experts are one parameter.
        joined = 2 if momentum is not None and name.endswith(".gate_up") else 1
        by_kind.setdefault((decay, ratio, momentum, joined, mesh_of(parameter)), []).append(parameter)
    groups = [
        {"params": some, "weight_decay": decay, "lr_ratio": ratio, "momentum": momentum, "joined": joined}
        for (decay, ratio, momentum, joined, _), some in by_kind.items()
    ]
    # A pipeline stage may have nothing to train, and torch refuses an optimizer without groups.
    groups = groups or [{"params": [], "weight_decay": 0.0, "lr_ratio": 1.0, "momentum": None, "joined": 1}]
    # With a rate of 0 and gradients of 0 parameters stay what they are.
    kind = MuonAndAdamW if settings.kind == "muon" else torch.optim.AdamW
    optimizer = kind(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()
    return optimizer


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """True for weights of linears and experts of the layers; false for embeddings, the output layer and routers."""
    stacked = parameter.dim() == 3 and ".experts." in name
    return (parameter.dim() == 2 or stacked) and name.startswith("layers.") and ".router." not in name


def learning_rate(settings: "OptimizerSettings", steps: int, step: int) -> float:
    """The learning rate of a step, counted from 0: linear warmup to ``lr``, then the schedule.

    Args:
        steps: Steps that the schedule spans; later ones have the last rate.

    ``"wsd"`` is warmup, stable, decay (Hu et al., arXiv:2404.06395).
    """
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    # The last step at the highest rate.
    first = settings.warmup
    if settings.schedule == "wsd":
        first = max(first, steps - 1 - settings.decay)
    if settings.schedule == "constant" or step <= first:
        return settings.lr
    done = min(1.0, (step - first) / (steps - 1 - first)) if steps - 1 > first else 1.0
    left = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)


def hide_hint() -> None:
    """Silences torch's hint that the norm over two mesh dimensions, in ``update``, takes two reductions."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def update(
    optimizer: torch.optim.Optimizer, grad_clip: float | None, scale: Tensor | float = 1.0, *,
    total_norm: Callable[[], Tensor] | None = None, discard: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Clips gradients, updates parameters and frees the gradients. No parameter changes if the norm is not finite.

    Args:
        grad_clip: Maximum norm of all gradients over all ranks; ``None`` disables clipping.
        scale: The loss scale of the gradients.
        total_norm: Returns the norm of all gradients; ``None`` where the optimizer has all parameters, or shards of
            them all.
        discard: A bool of the device; where true the norm becomes infinite, so that nothing changes.

    Returns:
        The norm before clipping, a scalar on the device; the host does not wait for it.
    """
    found = (p.grad for group in optimizer.param_groups for p in group["params"])
    gradients = [grad for grad in found if grad is not None]
    norm = norm_of(gradients) if total_norm is None else total_norm()
    if discard is not None:
        norm = norm.masked_fill(discard, math.inf)
    if grad_clip is not None:
        _scale(gradients, (grad_clip * scale / (norm + 1e-6)).clamp(max=1.0))
    # The interface of torch's GradScaler to fused optimizers.
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    if isinstance(scale, Tensor):
        optimizer.grad_scale = scale.to(norm)  # type: ignore[attr-defined]
    elif scale != 1.0:
        optimizer.grad_scale = torch.full_like(norm, scale)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.zero_grad()
    return norm / scale


@torch.no_grad()
def _scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies gradients in place, as ``torch.nn.utils.clip_grads_with_norm_`` does: each rank its own part of them,
    without a rule of DTensor for each shape and mesh, which takes most of a second to find at the first step."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        by_device.setdefault(own.device, []).append(own)
    for device, some in by_device.items():
        torch._foreach_mul_(some, factor.to(device))


class LossScale:
    """The dynamic loss scale of fp16: halved after a step that overflowed, doubled after many that did not.

    The gradient norm over all ranks tells whether a step overflowed. (torch's ``GradScaler`` reduces its flag only over
    the dimensions that shard the first gradient, so tensor-parallel ranks may disagree.)

    Args:
        growth_interval: Finite steps until the scale doubles; 0 for a constant scale, as for other dtypes.
    """

    def __init__(self, scale: float = 1.0, growth_interval: int = 0) -> None:
        self.scale, self.growth_interval, self.good = scale, growth_interval, 0

    @classmethod
    def of(cls, settings: "PrecisionSettings") -> "LossScale":
        """The scale of ``precision.dtype``."""
        return cls(settings.initial_scale, settings.growth_interval) if settings.dtype == "fp16" else cls()

    def of_gradients(self, cp: int) -> float:
        """The factor of the gradients of a step.

        Each of ``cp`` context-parallel ranks has ``cp`` times its part of a sequence's gradient, and the reduction
        takes the mean. In fp16 that factor would overflow where one process with the whole sequence does not, so the
        loss scale is divided by it.
        """
        return self.scale / cp if self.growth_interval else 1.0

    def update(self, loss: float, norm: float) -> None:
        """Updates the scale after a step. Gradients are expected to overflow now and then; the loss is not, and says
        nothing of the scale where it does."""
        if not self.growth_interval or not math.isfinite(loss):
            return
        self.good = self.good + 1 if math.isfinite(norm) else 0
        if not self.good:
            self.scale /= 2
        elif self.good == self.growth_interval:
            self.scale, self.good = self.scale * 2, 0

    @property
    def is_exhausted(self) -> bool:
        """Whether gradients that overflow now do so at any scale."""
        return self.scale < _LEAST_SCALE

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Loads a ``state_dict``; a constant scale ignores it."""
        if self.growth_interval:
            self.scale, self.good = float(state["scale"]), int(state["good"])
