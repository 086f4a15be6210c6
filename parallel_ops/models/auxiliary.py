"""The auxiliary losses of a transformer with experts."""

import torch
from torch import Tensor

from parallel_ops.comm import reduce_from_group
from parallel_ops.expert_parallel import AuxiliaryLosses, StageExpertLoad
from parallel_ops.models.structure import TransformerStructure


def auxiliary_losses(
    model: TransformerStructure, scale: Tensor | float | None, loads: StageExpertLoad | None = None
) -> AuxiliaryLosses | None:
    """The auxiliary losses of the layers with experts in a forward; ``None`` if there are none.

    Args:
        scale, loads: see ``Transformer.forward``.

    Raises:
        ValueError: there is none, but the model has stages.
    """
    experts = model.config.experts
    if experts is None or not (experts.aux_loss or experts.z_loss) or not model.training:
        return None
    if scale is None and model.stages is not None and torch.is_grad_enabled():
        raise ValueError("Transformer: aux_scale must be given for a model with stages and auxiliary losses")
    over_model = experts.loss_over_model
    if over_model and loads is None and model.stages is not None and torch.is_grad_enabled():
        raise ValueError("Transformer: aux_loads must be given for stages and an auxiliary loss over the whole model")
    return AuxiliaryLosses(
        experts.aux_loss, experts.z_loss, over_model=over_model, scale=scale,
        ranks=model.context.ranks, elsewhere=loads,
    )  # fmt: skip


def with_auxiliary(model: TransformerStructure, loss: Tensor, losses: AuxiliaryLosses) -> Tensor:
    """The loss with the auxiliary ones, whose gradients the layers compute."""
    assert model.config.experts is not None
    if not torch.is_grad_enabled():
        return loss
    value = losses.value(model.config.experts.top_k).to(loss)
    for group in (model.group, model.context.group):
        value = reduce_from_group(value, group)
    return losses.follow(loss) + value
