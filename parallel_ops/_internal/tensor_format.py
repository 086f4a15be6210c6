"""Orders of the dimensions of attention tensors: ``"sbhd"`` is ``[s, b, h, d]``, and so on."""

from typing import Literal, get_args

from torch import Tensor

TensorFormat = Literal["sbhd", "bshd", "bhsd"]
FORMATS: tuple[str, ...] = get_args(TensorFormat)


def check_format(op: str, tensor_format: str) -> None:
    if tensor_format not in FORMATS:
        raise ValueError(f"{op}: tensor_format must be one of {', '.join(FORMATS)}, got {tensor_format!r}")


def described(tensor_format: str) -> str:
    """The dimensions with the argument that says so, for errors."""
    return f"[{', '.join(tensor_format)}] (tensor_format={tensor_format!r})"


def to_sbhd(t: Tensor, tensor_format: str) -> Tensor:
    """``t`` as ``[s, b, h, d]``, a view."""
    return t if tensor_format == "sbhd" else t.permute([tensor_format.index(axis) for axis in "sbhd"])


def from_sbhd(t: Tensor, tensor_format: str) -> Tensor:
    """``t`` of ``[s, b, h, d]`` in ``tensor_format``, a view."""
    return t if tensor_format == "sbhd" else t.permute(["sbhd".index(axis) for axis in tensor_format])
