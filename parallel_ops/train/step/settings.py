"""The sections ``[optimizer]`` and ``[precision]``."""

from typing import Annotated, Literal

from pydantic import Field

from parallel_ops.ops.float8_recipes import Float8Recipe, Precision
from parallel_ops.train.settings.section import Count, Positive, Section


class GroupSettings(Section):
    """Parameters with a learning rate or weight decay of their own.

    Attributes:
        match: Pattern of names, such as ``"layers.*.norm*"``; a parameter is in the first group that matches it.
        lr_ratio: Learning rate relative to the others'; 0 keeps the parameters as they are.
        weight_decay: ``"none"`` for that of the section, or none for biases and norms.
    """

    match: Annotated[str, Field(min_length=1)]
    lr_ratio: Annotated[float, Field(ge=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class OptimizerSettings(Section):
    """AdamW or Muon, and the learning rate.

    Attributes:
        kind: ``"adamw"``, fused; ``"muon"`` for the matrices of the layers' linears and experts, with AdamW for the
            others; see ``train.step.muon``.
        lr: Peak learning rate.
        betas, eps: Coefficients of AdamW. momentum: Of Muon.
        weight_decay: Weight decay of matrices; biases and norms have none.
        groups: Parameters with a rate or weight decay of their own.
        grad_clip: Maximum norm of all gradients together; ``"none"`` disables clipping.
        schedule: Learning rate after the warmup: ``"constant"``; ``"cosine"`` or ``"linear"`` decay over all remaining
            steps; ``"wsd"``, constant with linear decay over the last ``decay`` steps.
        warmup: Steps of linear warmup.
        decay: Decay steps of ``"wsd"``.
        min_lr_ratio: Learning rate of the last step relative to ``lr``, where the schedule decays.
        schedule_steps: Steps that the schedule spans; ``"none"`` for ``run.steps``. A run of fewer steps, such as one
            with ``--steps``, takes the first of them; one of more keeps the last rate.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 3e-4
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    groups: Annotated[tuple[GroupSettings, ...], Field(strict=False)] = ()
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup: Count = 0
    decay: Count = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    schedule_steps: Positive | None = None


class PrecisionSettings(Section):
    """Precision of the computation. Optimizer state and gradient reduction are fp32.

    Attributes:
        dtype: Dtype of activations and of parameters in use.
        linears: Of the matmuls of the layers' linears: ``"bf16"`` for ``dtype``, or, with ``dtype="bf16"``, float8
            scaled by row, by block or as MXFP8; see ``ops.float8_recipes``.
        experts: Likewise of the layers' experts; by default that of ``linears``.
        fp8_bf16_layers: As many layers at the start, and at the end, whose linears and experts stay in bf16.
        fp8_emulation: Quantize alike but multiply in fp32, on any device: slower than bf16, for tests.
        initial_scale, growth_interval: Initial loss scale of fp16, and the finite steps after which it doubles.
    """

    dtype: Literal["bf16", "fp32", "fp16"] = "bf16"
    linears: Precision = "bf16"
    experts: Precision | None = None
    fp8_bf16_layers: Count = 1
    fp8_emulation: bool = False
    initial_scale: Annotated[float, Field(gt=0)] = 65536.0
    growth_interval: Positive = 2000

    @property
    def float8(self) -> dict[str, Float8Recipe]:
        """The recipes in use, by key."""
        both: dict[str, Precision] = {"linears": self.linears, "experts": self.experts or self.linears}
        return {key: recipe for key, recipe in both.items() if recipe != "bf16"}
