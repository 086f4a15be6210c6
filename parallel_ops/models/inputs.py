"""Checks of the inputs of a transformer."""

from torch import Tensor

from parallel_ops.models.structure import TransformerStructure


def check_inputs(
    model: TransformerStructure,
    tokens: Tensor,
    targets: Tensor | None,
    positions: Tensor | None,
    stage: int | None,
    hidden_states: Tensor | None,
) -> None:
    """Raises ValueError unless the arguments of ``Transformer.forward`` fit the model and each other."""
    _check_stage(model, tokens, stage, hidden_states)
    if model.tokens is None and stage is None:
        return
    shape, longest = list(tokens.shape), model.config.seq_length
    # With positions a row may hold several sequences.
    if tokens.dim() != 2 or not 1 <= shape[0] <= (longest if positions is None else shape[0]):
        raise ValueError(f"Transformer: tokens must have shape [s, b] with s from 1 to {longest}, got {shape}")
    if model.sequence_parallel and any(length % model.ranks for length in model.context.lengths(shape[0])):
        shares = f" in each of {model.context.ranks} shares" if model.context.ranks > 1 else ""
        raise ValueError(
            f"Transformer: tokens must have a length that the {model.ranks} ranks can split evenly{shares}, got "
            f"{shape[0]}"
        )
    if targets is not None and list(targets.shape) != shape:
        raise ValueError(f"Transformer: targets must have shape {shape}, got {list(targets.shape)}")
    if positions is not None and list(positions.shape) not in (shape, shape[:1]):
        raise ValueError(f"Transformer: positions must have shape {shape[:1]} or {shape}, got {list(positions.shape)}")


def _check_stage(model: TransformerStructure, tokens: Tensor, stage: int | None, hidden_states: Tensor | None) -> None:
    if model.stages is None:
        if stage is not None or hidden_states is not None:
            raise ValueError("Transformer: stage and hidden_states must be None for a model without stages")
        return
    if stage not in (own := model.stages.on(model.pp_rank)):
        raise ValueError(
            f"Transformer: stage must be one of {own}, those of pipeline rank {model.pp_rank}, got {stage}"
        )
    if (hidden_states is None) != (stage == 0):
        raise ValueError(f"Transformer: hidden_states must be None for stage 0 alone, got stage {stage}")
    if (
        hidden_states is not None
        and tokens.dim() == 2
        and tuple(hidden_states.shape) != model.stream_shape(*tokens.shape)
    ):
        expected = list(model.stream_shape(*tokens.shape))
        raise ValueError(f"Transformer: hidden_states must have shape {expected}, got {list(hidden_states.shape)}")
