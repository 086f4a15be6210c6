import os

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run; no deadline, since machines are shared and first calls compile.
settings.register_profile(
    "parallel_ops",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("parallel_ops")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Interpreted kernels need their own run, since Triton decides at import; either run names what it left out."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if interpreted != bool(item.get_closest_marker("interpret")):
            reason = (
                "only interpreted kernels run under TRITON_INTERPRET=1" if interpreted else "needs TRITON_INTERPRET=1"
            )
            item.add_marker(pytest.mark.skip(reason=reason))
