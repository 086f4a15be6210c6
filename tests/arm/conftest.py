from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of use with the kernels of an Arm program alone: `make test-arm`."""
    return None if config.getoption("--arm") else True
