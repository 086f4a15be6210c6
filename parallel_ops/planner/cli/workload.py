"""Models with the workload of ``--seq``, ``--documents``, ``--lora`` and ``--workload``, and what that costs."""

from dataclasses import replace

from parallel_ops.planner.cli import inputs
from parallel_ops.planner.compute.documents import describe
from parallel_ops.planner.field_text import parse_fields
from parallel_ops.planner.model import Model
from parallel_ops.planner.model.imbalance import dropped
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import Estimate

# Fields of ``Model`` that --workload takes, and their defaults.
FIELDS = {name: getattr(Model, name) for name in ("prediction_layers", "expert_imbalance", "loss_fraction", "padding")}


def model(name: str, sequence: int | None, documents: str | None, lora: str | None, workload: str | None) -> Model:
    """The model of a name (``inputs.model``) with what the other options say.

    Raises:
        ValueError, TypeError: an option is wrong, or the model cannot have it.
    """
    found = inputs.adapters(inputs.documents(inputs.model(name, sequence), documents), lora)
    return found if workload is None else with_fields(found, workload)


def with_fields(found: Model, text: str) -> Model:
    """``found`` with the fields of ``text``: ``prediction_layers=1,expert_imbalance=1.3``.

    Raises:
        ValueError: a field is unknown (with the nearest names), is given twice, or no such number.
    """
    return replace(found, **parse_fields(text, "--workload", FIELDS))


def sentences(found: Estimate) -> list[str]:
    """What documents, padding, masks, multi-token prediction and uneven experts cost a plan; empty without them."""
    shape, plan = found.model, found.plan
    lines = [describe(shape, plan.cp, plan.dp)]
    if (counted := (1 - shape.padding) * shape.loss_fraction) < 1:
        head = shape.head_flops / shape.forward_flops
        lines.append(
            f"Loss: {counted:.1%} of the computed tokens count in it, {shape.padding:.1%} are padding. The output "
            f"embedding computes all: {(1 - counted) * head:.1%} of the FLOPs are logits that nothing is learned from."
        )
    if layers := shape.prediction_layers:
        whole, alone = shape.forward_flops, replace(shape, prediction_layers=0)
        lines.append(
            f"Multi-token prediction: {layers} layer{'s' if layers > 1 else ''} more on the last stage, with a loss "
            f"each: {(shape.parameters - alone.parameters) / 1e9:,.1f}B parameters, "
            f"{1 - alone.forward_flops / whole:.1%} of the FLOPs."
        )
    if shape.expert_imbalance > 1 or plan.capacity_factor not in (0, 1):
        lines.append(
            f"Experts: the fullest has {shape.expert_imbalance:g} of the mean tokens, so {_experts(shape, plan)}."
        )
    return [line for line in lines if line]


def _experts(shape: Model, plan: Plan) -> str:
    if not (capacity := plan.capacity_factor):
        return f"the fullest of {plan.ep} ranks, which the others wait for, has {shape.expert_load(plan.ep, 0.0):.2f}"
    lost = dropped(shape.expert_imbalance, shape.experts, capacity)
    return (
        f"a capacity of {capacity:g} drops {lost:.1%} of the routed tokens, and {1 - (1 - lost) / capacity:.1%} of the "
        f"computed rows are padding"
    )
