"""The collectives that Megatron's linears start, and those in their place."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig

from parallel_ops.integrations.megatron import ParallelOpsSpecProvider
from support.integrations.megatron import leave_groups, on_cpu
from support.numerics.layer_reductions import Calls, calls_of_steps


def row_calls(rank: int, sequence_parallel: bool) -> tuple[Calls, Calls]:
    """Of Megatron's own ``RowParallelLinear`` and that of a spec with ``grad_reduce="backend"``."""
    return _calls(tensor_parallel.RowParallelLinear, sequence_parallel), _calls(
        ParallelOpsSpecProvider(grad_reduce="backend").row_parallel_linear(), sequence_parallel
    )


def column_calls(rank: int, sequence_parallel: bool) -> tuple[Calls, Calls]:
    """The same of ``ColumnParallelLinear``."""
    return _calls(tensor_parallel.ColumnParallelLinear, sequence_parallel), _calls(
        ParallelOpsSpecProvider(grad_reduce="backend").column_parallel_linear(), sequence_parallel
    )


def _calls(kind: Any, sequence_parallel: bool) -> Calls:
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    try:
        with on_cpu():
            config = ModelParallelConfig(
                tensor_model_parallel_size=size, sequence_parallel=sequence_parallel, use_cpu_initialization=True
            )
            row = issubclass(kind, tensor_parallel.RowParallelLinear)
            own = {"input_is_parallel": True} if row else {"gather_output": False}
            linear = kind(
                16, 24, config=config, init_method=torch.nn.init.ones_, bias=False, skip_bias_add=False, **own
            )
            return calls_of_steps(linear, torch.ones(4, 2, 16 // size if row else 16))
    finally:
        leave_groups()
