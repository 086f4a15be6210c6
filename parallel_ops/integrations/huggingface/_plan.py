"""Selects the modules of a model whose forward is replaced, and the reasons for the others."""

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from parallel_ops.integrations.huggingface import _steps, _trial
from parallel_ops.integrations.huggingface._families import contains_base, is_base, is_composite, stock_of
from parallel_ops.integrations.huggingface._fused import described, stock_class
from parallel_ops.integrations.huggingface._steps import LOSS, Skipped, Step

OPS = ("norm", "activation", "rotary", "attention", "residual", "router", "experts", "loss")

# The role of a module by the end of its class's name, the op that it is for, and its steps, which try what its forward
# computes.
_ROLES = {
    "RMSNorm": ("norm", _steps.norm),
    "LayerNorm": ("norm", _steps.norm),
    "MLP": ("activation", _steps.mlp),
    "SparseMoeBlock": ("experts", _steps.separate_experts),  # before "Block", GPT-2's
    "Block": ("residual", _steps.gpt2_block),
    "TopKRouter": ("router", _steps.router),
    "Experts": ("experts", _steps.experts),
    "Moe": ("experts", _steps.block_of_experts),
    "RotaryEmbedding": ("rotary", _steps.rotary_tables),
}


def plan(model: nn.Module, ops: Collection[str], skip_logits: bool) -> list[Step]:
    """The steps for ``model``, of which replaced modules need none.

    Raises TypeError if it is, or contains, a model of another family.
    """
    _trial.forget()
    models = [(name, m) for name, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    _check(model, models)
    steps: list[Step] = []
    done: set[int] = set()
    for name, part in models:
        if is_base(part) and id(part) not in done:
            tables = (m for m in part.modules() if type(m).__name__.endswith("RotaryEmbedding"))
            layouts = {_steps.table_layout(m) for m in tables}
            for path, module in part.named_modules(prefix=name):
                if id(module) not in done:
                    done.add(id(module))
                    if stock_class(module) is not None:
                        continue
                    steps += _steps_of(path, module, part.config, layouts, ops)
    for name, part in models:
        if is_composite(part):
            steps += _kept(name, part, ops)
        elif hasattr(part, "lm_head") and "loss" in ops and id(part) not in done:
            done.add(id(part))
            stock = stock_of(part)
            if stock is not None and stock_class(part) is None:
                steps += _steps.loss(name, part, stock, skip_logits)
    return steps


def _check(model: nn.Module, models: list[tuple[str, PreTrainedModel]]) -> None:
    """Raises TypeError if one of ``models``, which are parts of ``model``, is of another family."""
    # Beside a text model are those of images; within a base there may be others.
    served = {id(m) for _, part in models if is_composite(part) or is_base(part) for m in part.modules()}
    others = [m for _, m in models if id(m) not in served and (not contains_base(m) or stock_of(m) is None)]
    if others or not models:
        raise TypeError(
            f"apply: model is or contains a {described(others[0] if others else model)}, which is no model of "
            "transformers that docs/huggingface.md lists"
        )


def _kept(name: str, part: PreTrainedModel, ops: Collection[str]) -> Iterator[Step]:
    """What stays as it is of a model of text and images: all but its text model."""
    for child_name, child in part.named_children():
        path = f"{name}.{child_name}".lstrip(".")
        if child_name == "lm_head":
            if "loss" in ops:
                yield Skipped(name or type(part).__name__, LOSS, "of models of text and images the loss is kept")
        elif not contains_base(child):
            yield Skipped(path, "any op", f"of a {type(part).__name__} the text model alone is served")


def _steps_of(
    name: str, module: nn.Module, config: Any, layouts: set[str | None], ops: Collection[str]
) -> Iterator[Step]:
    stock = stock_of(module)
    if stock is None:
        if type(module) is nn.LayerNorm and "norm" in ops:
            yield from _steps.norm(name, module, nn.LayerNorm)
        return
    kind = stock.__name__
    if kind.endswith(("Block", "DecoderLayer")):
        yield from _unknown_children(name, module)
    if kind.endswith("Attention"):
        yield from _steps.attention(name, module, stock, config, layouts, ops)
        return
    for end, (op, steps) in _ROLES.items():
        if kind.endswith(end) and op in ops:
            yield from steps(name, module, stock)
            return


def _unknown_children(name: str, layer: Any) -> Iterator[Step]:
    separate = isinstance(getattr(layer, "experts", None), nn.ModuleList)
    for child_name, child in layer.named_children():
        known = isinstance(child, nn.LayerNorm | nn.Dropout) or child_name == "shared_expert_gate"  # a plain linear
        if stock_of(child) is None and not known and not separate:
            yield Skipped(f"{name}.{child_name}", "any op", f"it is a {described(child)}, which is not known")
