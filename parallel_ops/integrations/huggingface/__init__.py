"""Models of Hugging Face's Transformers on the ops: ``apply(model)``.

    from parallel_ops.integrations import huggingface

    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")
    print(huggingface.apply(model))

For the families that docs/huggingface.md lists, from Llama to Cohere, of Transformers 4.50 and later. Training (by your
own loop or by ``Trainer``, with gradient checkpointing, autocast or ``torch.compile``), evaluation, generation and
saving work as before: modules and parameters stay the same objects under the same names; only forwards change.

| in ``ops`` | what is replaced |
|---|---|
| ``norm`` | RMSNorm and LayerNorm: ``rms_norm``, ``layer_norm`` |
| ``activation`` | an MLP's activation and gated product: ``silu_mul``, ``gelu_mul``, ``bias_swiglu``, ``bias_gelu`` |
| ``rotary`` | the rotation of queries and keys: ``rotary_embedding_qk`` |
| ``attention`` | causal core attention on a CPU: ``flash_attention`` |
| ``residual`` | GPT-2's dropouts and the additions after them: ``bias_dropout_add`` |
| ``router`` | the choice of experts and their weights: ``route`` |
| ``experts`` | ``sort_by_expert``, ``permute``, ``grouped_linear``, ``bias_swiglu`` or ``gelu_mul``, ``unpermute`` |
| ``loss`` | output projection and loss: ``vocab_parallel_linear_cross_entropy`` |

**Forwards.** A forward is replaced only if it computes what the op does: once for each class both are tried on random
rows in float64 (30 to 65 ms a model). Any other, of a newer version, of another library or of your own, is kept and
reported.

**Attention.** Only the ``"sdpa"`` implementation, the default, is replaced. It still calls SDPA with a mask (padding,
windows shorter than the text, and under ``torch.compile`` before torch 2.14, where Transformers always makes one), in
the steps of generation, and on GPUs.

**Logits.** A model in training that gets labels makes no logits, which is most of the memory that it saves:
``outputs.loss`` is there, and reading ``outputs.logits``, or the outputs as a tuple, raises an error that names
``skip_logits=False``. ``model(..., skip_logits=False)`` returns logits for one call, and for every call
``apply(model, skip_logits=False)``; the loss is then computed from them, without a copy in float32. In evaluation mode,
without labels, and with ``return_dict=False`` logits are always returned, unless the call has ``skip_logits=True``.

**Experts.** Routers and experts need Transformers 5, which stacks the experts' weights (5.0 returned probabilities as
router logits; there the router is kept). Of stock's implementations ``"grouped_mm"``, the default, and ``"eager"`` are
replaced; any other, chosen before or after, is kept, as is expert parallelism. ``output_router_logits`` works: logits
and ``aux_loss`` are stock's, and the loss contains it.

**Differences.** Norms and rotations round once where Transformers round twice in 16 bits; dropout draws other masks
from the same generators; a batch whose labels are all ignored has loss 0, not NaN; a label outside the vocabulary is a
``ValueError``. Routers keep their weights in float32, and choose the lower index between equal logits. Under autocast
experts compute in its dtype, as ``"eager"`` does and ``"grouped_mm"`` does not.
"""

import importlib.metadata
import importlib.util
from collections.abc import Collection

from torch import nn

if importlib.util.find_spec("transformers") is None:
    raise ImportError(
        "parallel_ops.integrations.huggingface needs transformers, 4.50 or later: pip install transformers"
    )
if tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) < (4, 50):
    raise ImportError(
        "parallel_ops.integrations.huggingface needs transformers 4.50 or later, got "
        f"{importlib.metadata.version('transformers')}: pip install --upgrade transformers"
    )

from parallel_ops.integrations.huggingface._applied import Applied, reasons, replaced_modules, swap
from parallel_ops.integrations.huggingface._plan import OPS, plan
from parallel_ops.integrations.huggingface._steps import Skipped, Swap

__all__ = ["OPS", "Applied", "applied", "apply", "undo"]


def apply(model: nn.Module, *, ops: str | Collection[str] = "all", skip_logits: bool = True) -> Applied:
    """Replaces the forwards of ``model``'s modules by the ops.

    Args:
        model: a model of Transformers that docs/huggingface.md lists, with any head, or a module that contains such
            models, as PEFT's and TRL's do. Adapters may be added before or after, FSDP and DDP after.
        ops: ``"all"``, or one or several of ``OPS``, described at the top of this file.
        skip_logits: whether a model in training that gets labels returns no logits.

    Returns:
        What was replaced, and what was not and why. Needed only for ``undo``.

    Raises:
        TypeError: a model of another family, or a module that contains one. ValueError: an unknown op, a model to which
            ops are applied already, or one in which nothing can be replaced. The model is then unchanged.
    """
    names = OPS if ops == "all" else (ops,) if isinstance(ops, str) else tuple(ops)
    for name in names:
        if name not in OPS:
            raise ValueError(f"apply: ops must be 'all' or some of {', '.join(OPS)}, got {name!r}")
    done = next(iter(replaced_modules(model)), None)
    if done is not None:
        raise ValueError(f"apply: ops are applied to this model already (to {done}); undo(model) first")
    steps = plan(model, names, skip_logits)
    if not any(isinstance(s, Swap) for s in steps):
        why = {s.reason for s in steps if isinstance(s, Skipped)} or {"it has no module for these ops"}
        raise ValueError(f"apply: nothing of this {type(model).__name__} can be replaced: {'; '.join(sorted(why))}")
    return swap(model, steps)


def applied(model: nn.Module) -> Applied | None:
    """What has been replaced in ``model``; ``None`` if nothing has.

    For a model without the result of ``apply``: a copy, one that was loaded from a pickle, one of which only a part was
    replaced. Modules that could be replaced and are not are in ``unreplaced``.
    """
    modules = replaced_modules(model)
    if not modules:
        return None
    try:
        steps = plan(model, OPS, True)
    except TypeError:  # a part of a model, or one beside a model of another family
        steps = []
    return Applied(model, modules, reasons(steps))


def undo(model: nn.Module) -> None:
    """Restores the forward of every module of ``model``, whether it or what it was copied or loaded from was given to
    ``apply``.

    Raises:
        ValueError: nothing of it has been replaced. RuntimeError: something that must be undone first has changed a
            module since ``apply``. Then nothing is undone.
    """
    modules = replaced_modules(model)
    if not modules:
        raise ValueError(f"undo: nothing of this {type(model).__name__} has been replaced")
    Applied(model, modules, {}).undo()
