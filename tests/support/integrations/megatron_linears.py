"""The collectives that Megatron's linears start, and those in their place."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig

from parallel_ops.integrations.megatron import ParallelOpsSpecProvider
from support.integrations.megatron import model_parallel, on_cpu
from support.numerics.layer_reductions import Calls, calls_of_steps


def calls_of_linears(rank: int, kind: str, sequence_parallel: bool) -> list[Calls]:
    """Of Megatron's own linear, ``kind`` "row" or "column", and that of a spec with ``grad_reduce="backend"``."""
    ours = ParallelOpsSpecProvider(grad_reduce="backend")
    if kind == "row":
        both = tensor_parallel.RowParallelLinear, ours.row_parallel_linear()
    else:
        both = tensor_parallel.ColumnParallelLinear, ours.column_parallel_linear()
    return [_calls(each, sequence_parallel) for each in both]


def _calls(kind: Any, sequence_parallel: bool) -> Calls:
    size = dist.get_world_size()
    with model_parallel(size), on_cpu():
        config = ModelParallelConfig(
            tensor_model_parallel_size=size, sequence_parallel=sequence_parallel, use_cpu_initialization=True
        )
        row = issubclass(kind, tensor_parallel.RowParallelLinear)
        own = {"input_is_parallel": True} if row else {"gather_output": False}
        linear = kind(16, 24, config=config, init_method=torch.nn.init.ones_, bias=False, skip_bias_add=False, **own)
        return calls_of_steps(linear, torch.ones(4, 2, 16 // size if row else 16))
