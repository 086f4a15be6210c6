"""The sections ``[parallel]`` and ``[recompute]``."""

import typing
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from parallel_ops.context_parallel.layouts import LayoutChoice
from parallel_ops.ops.float8_recipes import RECIPES
from parallel_ops.planner.field_text import parse_fields
from parallel_ops.planner.plan import PLAN_FIELDS, Plan
from parallel_ops.train.settings.section import Count, Positive, Section, key_error

# Fields of ``Plan`` that other sections have.
_ELSEWHERE = ("dtype", "recompute", "capacity_factor")


def _parallel_fields() -> dict[str, Any]:
    """The fields of ``Plan`` without those of other sections."""
    hints = typing.get_type_hints(Plan)
    found = {f.name: (hints[f.name], f.default) for f in fields(Plan) if f.name not in _ELSEWHERE}
    # The trainer always fuses the loss with the output embedding.
    return found | {
        "fused_loss": (bool, True),
        "layers_per_chunk": (Annotated[tuple[int, ...], Field(strict=False)], ()),
    }


class _ParallelSettings(Section):
    """The planner's ``Plan``: a table of its fields, or a string such as ``"dp=2,tp=2,zero=3"``.

    Attributes:
        cp_layout: Which tokens a rank has, as in ``ring_attention``; the planner has no such field, nor the next.
        cp_groups: ``"by_length"``: documents are shared out over dp x cp anew for each micro-batch, long ones to many
            ranks, short ones to one; see ``context_parallel.group_size``.
    """

    cp_layout: LayoutChoice = "zigzag"
    cp_groups: Literal["fixed", "by_length"] = "fixed"

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


class RecomputeSettings(Section):
    """Activation recomputation and offload; see ``train.recompute`` and ``train.offload``.

    Attributes:
        kind: What is recomputed. every: Recompute every n-th block.
        offload: What is in host memory between forward and backward: ``"inputs"`` of blocks, or ``"all"`` that they
            save. offload_in_flight: Blocks on their way to the host at a time, and back. offload_least_bytes: Smaller
            tensors stay.
    """

    kind: Literal["none", "selective", "full", "experts"] = "none"
    every: Positive = 1
    offload: Literal["none", "inputs", "all"] = "none"
    offload_in_flight: Positive = 2
    offload_least_bytes: Count = 1 << 20


def with_plan_in_sections(given: Any) -> Any:
    """The content of a settings file with dtype and recomputation of its plan in their sections."""
    if not isinstance(given, dict) or isinstance(given.get("parallel"), Section):
        return given
    parallel = given.get("parallel", {})
    if isinstance(parallel, str):
        try:
            parallel = parse_fields(parallel, "parallel", PLAN_FIELDS)
        except ValueError as error:
            raise key_error("parallel", str(error)) from None
    if not isinstance(parallel, dict):
        return given
    out = {**given, "parallel": dict(parallel)}
    for name, section, key in (("dtype", "precision", "dtype"), ("recompute", "recompute", "kind")):
        if name not in parallel:
            continue
        value, own = out["parallel"].pop(name), out.get(section, {})
        own = own if isinstance(own, dict) else own.model_dump(exclude_unset=True)
        wanted = {key: value}
        if name == "dtype" and isinstance(value, str) and value in RECIPES:  # a plan's float8 is that of matmuls
            wanted = {"dtype": "bf16", "linears": value}
        for place, part in wanted.items():
            if own.get(place, part) != part:
                raise key_error(f"{section}.{place}", f"is {own[place]!r}, but parallel.{name} is {value!r}")
        out[section] = {**own, **wanted}
    return out
