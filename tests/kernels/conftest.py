from collections.abc import Iterator

import pytest

from parallel_ops.triton_kernels import experimental


@pytest.fixture(autouse=True)
def _all_kernels() -> Iterator[None]:
    """Kernels that are off until a GPU has run them are tested as well."""
    with experimental.enabled(*experimental.FEATURES):
        yield
