"""Calls that ``backend="auto"`` gives to another library's kernels, each row with the source that speaks for it.

A kernel that is faster somewhere is not right everywhere: a beta of flash-attn-4 returned wrong gradients without an
error (TransformerEngine#3216). So ``auto`` takes flash-attn-4, and torch's flash attention for windows and documents
(the kernel of ``torch.nn.attention.varlen.varlen_attn``), only for the calls below, forward and backward; by name they
can be asked for wherever ``backends.refusal`` knows no reason against it. Rows are tried in their order.
"""

from typing import NamedTuple

BLACKWELL = (100, 103)  # B200, GB200; B300, GB300
FULL, CAUSAL, WINDOW, DOCUMENTS = "full", "causal", "window", "documents"


class Allowed(NamedTuple):
    """Calls of one backend.

    Attributes:
        since: first version of the library, as ``fa4.installed`` gives it; empty for torch's own kernels.
        dims: pairs (d, d_v). masks: all that a call has must be among them.
        deterministic: whether the source shows the same bits on every run.
    """

    backend: str
    since: tuple[int, ...]
    capabilities: tuple[int, ...]
    dims: tuple[tuple[int, int], ...]
    masks: tuple[str, ...]
    deterministic: bool
    source: str


ALLOWED = (
    Allowed(
        "fa4", (4, 0, 0, 30), BLACKWELL, ((64, 64), (128, 128)), (FULL, CAUSAL, WINDOW, DOCUMENTS), True,
        "arXiv:2603.05451: 1,605 TFLOP/s forward on a B200, 1.1 to 1.3 times cuDNN 9.13, deterministic backward; "
        "flash-attention#2046: all windows; LlamaFactory#10639: documents, from 4.0.0b30",
    ),
    Allowed(
        "fa4", (4, 0, 0, 30), BLACKWELL, ((192, 128),), (FULL, CAUSAL, DOCUMENTS), True,
        "flash-attention#2270: grouped heads, causal and full, documents, 10,000 deterministic runs; 1,556 TFLOP/s "
        "forward and 1,073 backward on a B200. Windows are left out there",
    ),
    Allowed(
        "fa4", (4, 0, 0, 30), (90,), ((128, 128),), (CAUSAL, DOCUMENTS), False,
        "flash-attention#2878: causal documents on an H200, 0.089 s forward and 0.246 s backward for 32 heads of "
        "86,000 tokens: 680 and 615 TFLOP/s; this package's kernels have 455 and 284 on an H100 (docs/performance.md)",
    ),
    Allowed(
        "flash", (), (80,), ((64, 64), (128, 128)), (CAUSAL, WINDOW, DOCUMENTS), False,
        "arXiv:2307.08691, section 4.1: on an A100 1.3 to 1.5 times FlashAttention in Triton, forward and backward",
    ),
)  # fmt: skip


def allowed(
    capability: int, dims: tuple[int, int], masks: set[str], *, deterministic: bool, version: tuple[int, ...] | None
) -> list[str]:
    """The backends that may take a call of 16 bits, best first.

    Args:
        version: that of flash-attn-4; ``None`` if it is not installed.
    """
    return [
        row.backend
        for row in ALLOWED
        if capability in row.capabilities and dims in row.dims and masks <= set(row.masks)
        if row.deterministic or not deterministic
        if not row.since or (version is not None and version >= row.since)
    ]
