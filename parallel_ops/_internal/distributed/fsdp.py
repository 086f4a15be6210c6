"""What a pipeline needs of FSDP2 and ``replicate`` beyond their public interface, in torch 2.11 to 2.15.

Their hooks reduce gradients as a backward leaves a module. A pipeline runs many backwards, and weight gradients after
them, and reduces once: it disables the hooks' reduction (public), and calls the hook of a module when its gradients are
complete. torch's own pipeline runtime does the same (``_PipelineStageBase.perform_reduce_grad``).
"""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.nn import Module


def accumulate(module: Module) -> None:
    """Adds the gradients of a module to those of earlier micro-batches in the dtype in which they are reduced.

    The hook does so too, but before the weight gradients that are computed after the backward. Since 2.15 the gradients
    of autograd are of that dtype themselves, and nothing is to be done.
    """
    for group in _groups(module):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "to_accumulated_grad_if_needed") and hasattr(parameter, "_unsharded_param"):
                if parameter.unsharded_accumulated_grad is not None and parameter._unsharded_param.grad is not None:
                    parameter.unsharded_accumulated_grad += parameter._unsharded_param.grad
                    parameter._unsharded_param.grad = None
                parameter.to_accumulated_grad_if_needed()


def reduce(module: Module, *, replicas: bool) -> None:
    """Reduces the gradients of a module over its ranks; on GPUs while computation goes on.

    Args:
        replicas: sum over replicas of shards too, once in a step.
    """
    for group in _groups(module):
        if isinstance(group.mesh_info, DDPMeshInfo):
            _complete(group)
    accumulate(module)  # a reduction takes gradients of one dtype
    for group in _groups(module):
        before = group.reduce_grads, group.all_reduce_grads
        group.reduce_grads, group.all_reduce_grads = True, replicas
        group.post_backward()
        group.reduce_grads, group.all_reduce_grads = before
        group._training_state = type(group._training_state).IDLE


def _complete(group: Any) -> None:
    """Gives parameters without a gradient one of zeros.

    What is to be summed over replicas is added up in one buffer, before 2.15 without names: reductions of a step must
    have the same parameters. Of the last micro-batch, I may have run, and been reduced, before W.
    """
    for parameter in group.fsdp_params:
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is None or not unsharded.requires_grad:
            continue
        if parameter.unsharded_accumulated_grad is None and unsharded.grad is None:
            unsharded.grad = torch.zeros_like(unsharded, dtype=unsharded.grad_dtype)


def finish(root: Module) -> None:
    """Ends the backwards of a step: waits for reductions, and shards parameters again."""
    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    state: Any = root._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for group in _of_state(each):
            group.reshard()
    state._state_ctx.manual_backward_finalization_active = False  # of 2.15, which else wants a backward before
    state._root_post_backward_final_callback()


def _groups(module: Module) -> list[Any]:
    return _of_state(module._get_fsdp_state())  # type: ignore[operator]


def _of_state(state: Any) -> list[Any]:
    """2.12 and later have several groups of parameters for a module, before there was one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
