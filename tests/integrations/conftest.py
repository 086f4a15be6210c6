import pytest
import torch


@pytest.fixture(scope="module")
def megatron_on_cpu():
    """Megatron-core as written, on the CPU, for all tests of a module: leaving takes a third of a second, in which
    every name of every module is looked at."""
    from parallel_ops.integrations import megatron

    with torch.compiler.set_stance("force_eager"), megatron.on_cpu():
        yield
