"""Formats of matmuls: the values of ``Plan.dtype``.

Low-precision formats apply to the linears of layers; attention, the output embedding and stored tensors stay in 16
bits. Operands are converted before each matmul. Bytes of a conversion are counted per element: 2 to read, 1 to write.

    fp8             one scale a tensor: read for the maximum, read, written (5); the gradient of weights needs
                    transposed copies (2). Transformer Engine's current scaling
    fp8_rowwise     one scale a row: as fp8, and the transposed operands are converted anew (5). torchao
    fp8_blockwise   one scale a block of 128 (arXiv:2412.19437, section 3.3.2): read once, written both ways (4)
    mxfp8           one scale a block of 32, which Blackwell's tensor cores apply: likewise
    nvfp4           4 bits, one scale a block of 16, and one a tensor: read for the maximum, read, written both ways (5)
"""

from typing import NamedTuple


class Format(NamedTuple):
    """A low-precision format.

    Attributes:
        peak: field of ``GPU`` with its peak.
        rate: share of the peak that its matmuls reach, relative to ``Efficiency.fp8``.
        width: bytes of an operand.
        forward, backward, transposed: bytes that conversions move for an element of input and weight, of the output's
            gradient, and for the gradient of weights.
    """

    peak: str
    rate: float
    width: float
    forward: float
    backward: float
    transposed: float


# Rates. fp8_rowwise: assumed, between bf16 and fp8, as in torchtitan's runs of June 2025 (asyncTP_llama3_h100_2025-06).
# fp8_blockwise: Hopper adds its blocks outside of the tensor cores, DeepGEMM reaches 1.5e15 of an H800's 1.98e15.
# nvfp4: assumed; Megatron-Bridge's recipes are 1.4 to 1.5 times as fast as with mxfp8.
FORMATS = {
    "fp8": Format("fp8", 1.0, 1, 5, 5, 2),
    "fp8_rowwise": Format("fp8", 0.75, 1, 5, 5, 5),
    "fp8_blockwise": Format("fp8", 0.9, 1, 4, 4, 0),
    "mxfp8": Format("fp8", 1.0, 1, 4, 4, 0),
    "nvfp4": Format("fp4", 0.8, 0.5, 5, 5, 0),
}
# Bytes of a weight that is not trained. NF4 has an 8-bit scale for 64 weights, and an fp32 one for 256 of these scales
# (arXiv:2305.14314, section 3).
FROZEN_BYTES = {"16bit": 2.0, "nf4": 0.5 + 1 / 64 + 4 / (64 * 256)}
DTYPES = ("fp32", "fp16", "bf16", *FORMATS)


def stored(dtype: str) -> str:
    """The dtype of attention, the output embedding and stored tensors."""
    return "bf16" if dtype in FORMATS else dtype


def peak_name(dtype: str) -> str:
    """The field of ``GPU`` with the peak of matmuls in ``dtype``."""
    return FORMATS[dtype].peak if dtype in FORMATS else dtype
