import pytest


@pytest.fixture(scope="module")
def megatron_on_cpu():
    """``on_cpu`` for all tests of a module: leaving takes a third of a second, in which every name of every module is
    looked at."""
    from support.integrations.megatron import on_cpu

    with on_cpu():
        yield
