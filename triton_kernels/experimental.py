"""Kernels that no GPU has been tested with yet: off until they are enabled.

    expert_kernels   the kernels of ``route``, ``sort_by_expert``, ``permute`` and ``unpermute``; PyTorch's own ops
                     compute them otherwise
    sum_partials     the sum of what ranks computed, in one kernel instead of an addition a rank

Their compiled machine code is executed in the tests, on a CPU. ``docs/gpu/status.md`` says of every path what has run
where.
"""

import contextlib
from collections.abc import Iterator

FEATURES = ("expert_kernels", "sum_partials")
_enabled: set[str] = set()


def enable_experimental(*features: str) -> None:
    """Switches features of ``FEATURES`` on, and all others off; without arguments all are off.

    Raises:
        ValueError: An unknown feature.

    Examples:
        >>> from parallel_ops import enable_experimental
        >>> enable_experimental("expert_kernels")
        >>> enable_experimental()  # off again
    """
    if unknown := [name for name in features if name not in FEATURES]:
        raise ValueError(f"enable_experimental: unknown feature {unknown[0]!r}; there are {', '.join(FEATURES)}")
    _enabled.clear()
    _enabled.update(features)


@contextlib.contextmanager
def enabled(*features: str) -> Iterator[None]:
    """Enables features as ``enable_experimental`` does; those of before are back afterwards."""
    before = tuple(_enabled)
    enable_experimental(*features)
    try:
        yield
    finally:
        enable_experimental(*before)


def is_enabled(feature: str) -> bool:
    return feature in _enabled
