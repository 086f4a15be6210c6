from collections.abc import Iterator

import pytest

from parallel_ops.triton_kernels import experimental


@pytest.fixture(autouse=True)
def _all_kernels() -> Iterator[None]:
    """Kernels that are off until a GPU has run them are tested as well."""
    before = [name for name in experimental.FEATURES if experimental.is_enabled(name)]
    experimental.enable_experimental(*experimental.FEATURES)
    yield
    experimental.enable_experimental(*before)
