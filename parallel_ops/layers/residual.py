"""The sum of a layer's result and the residual stream."""

from torch import Tensor

from parallel_ops.ops import bias_dropout_add


def add_residual(
    y: Tensor, bias: Tensor | None, residual: Tensor, dropout: float, *, training: bool, first: int = 0,
    row_positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``dropout(y + bias) + residual``, whose masks are drawn by global element index.

    Args:
        y, residual: ``[s_r, ...]``, this rank's rows, of which ``first`` is the first among those of its group.
        row_positions: int64, the positions of the rows of the group; ``None`` for 0, 1, ...
    """
    positions = (
        row_positions[first : first + y.shape[0]] if dropout and training and row_positions is not None else None
    )
    offset = first * y.shape[1:].numel() if positions is None else 0
    return bias_dropout_add(y, bias, residual, dropout, training=training, index_offset=offset, row_positions=positions)
