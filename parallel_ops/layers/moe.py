"""A mixture of experts in the place of an MLP, its experts shared by the ranks of a mesh.

y = sum over the chosen experts e of w_e down_e(silu(gate_e x) * (up_e x)) + shared(x)

The weights are applied with the activation, so what the experts return is not kept for the backward. Experts with
biases return down_e(...) + b_e, all of which the weights multiply: there they are applied to the results.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from parallel_ops._internal.distributed.compat import in_backward, suspended_modes
from parallel_ops._internal.distributed.groups import GradReduce, group_rank
from parallel_ops.comm import gather_from_group, reduce_from_group, scatter_to_group, shard_sizes
from parallel_ops.expert_parallel import AuxiliaryLosses, Dispatch
from parallel_ops.layers.experts import Experts
from parallel_ops.layers.initialization import InitFn
from parallel_ops.layers.linear_base import add_residual
from parallel_ops.layers.mlp import ParallelMLP
from parallel_ops.layers.parameters import ShardedModule, check_input, check_mesh, propagates_errors
from parallel_ops.layers.replicated import Router
from parallel_ops.tensor_parallel.linear.call import Overlap


class ParallelMoE(ShardedModule):
    """A router, experts with SwiGLU, and optionally an MLP that every token uses.

    Args:
        hidden_size: width of input and output.
        ffn_hidden_size: width of an expert after its activation.
        num_experts: experts of the layer; a multiple of the ranks of ``ep_mesh``.
        top_k: experts of each token.
        tp_mesh: the tensor-parallel ranks; ``None`` for one. Each sends its own tokens to the experts: without
            ``sequence_parallel``, a part of those that all have, and the results are gathered.
        ep_mesh: the ranks that share the experts, ``ParallelMesh(ep=...)["ep"]``; ``None`` for one, or where every
            rank has all experts.
        shared_experts: width of the MLP that every token uses, in experts.
        router_bias: the router's logits have a bias. bias: the linears of the experts have biases, those of the shared
            MLP have none.
        swiglu_alpha, swiglu_limit, swiglu_up_offset: see ``Experts``; the shared MLP has plain SwiGLU.
        capacity_factor: rows of an expert at most in training, relative to equal loads; further tokens are dropped.
            ``None`` for no limit.
        cp_group: the ranks that share each sequence besides, whose load counts for the auxiliary losses.
        sequence_parallel: input and output are sharded by tokens over ``mesh``.
        overlap: of the shared MLP's linears; see ``ParallelMLP``. A number is also that of the groups of this rank's
            experts whose matmuls hide each other's messages (the next smaller divisor of its experts). Otherwise they
            are one group, whose messages the shared MLP alone hides.
        grad_reduce: of the shared MLP's linears; see ``ParallelMLP``. Experts and router always have the exact sum.
        init_method, output_init_method: fill tiles of ``gate`` and ``up``, of the router too, and of ``down``, in
            place; ``None`` for what ``nn.Linear`` does.
        device, dtype: of the parameters; ``None`` for torch's defaults.
        routing: further options of ``Router``.

    Attributes:
        load: int64 ``[num_experts]``, how many of this rank's tokens chose each expert in training since the last
            ``reset_counts``; ``None`` before the first. dropped: int64, how many choices a capacity has dropped.
        checked_capacity: the capacity factor of a layer that has none, while its ranks must not exchange numbers of
            rows that the host reads; ``dropped`` tells whether the results hold.

    Raises:
        TypeError, ValueError: sizes that do not fit.

    Examples:
        >>> import torch
        >>> from parallel_ops.layers import ParallelMoE
        >>> experts = ParallelMoE(64, 128, num_experts=8, top_k=2, tp_mesh=None)
        >>> y = experts(torch.randn(16, 2, 64))
        >>> y.shape
        torch.Size([16, 2, 64])
    """

    load: Tensor | None
    dropped: Tensor | None
    checked_capacity: float | None = None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        tp_mesh: DeviceMesh | None,
        ep_mesh: DeviceMesh | None = None,
        shared_experts: int = 0,
        router_bias: bool = False,
        bias: bool = False,
        swiglu_alpha: float = 1.0,
        swiglu_limit: float | None = None,
        swiglu_up_offset: float = 0.0,
        capacity_factor: float | None = None,
        cp_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        overlap: Overlap = "auto",
        grad_reduce: GradReduce = "fp32",
        init_method: InitFn | None = None,
        output_init_method: InitFn | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing: Any,
    ) -> None:
        super().__init__(tp_mesh)
        ep_mesh = check_mesh("ParallelMoE", ep_mesh)
        self.sequence_parallel, self.capacity_factor = sequence_parallel and self.ranks > 1, capacity_factor
        self.cp_group, self.overlap = cp_group, overlap
        self.expert_group = None if ep_mesh is None else ep_mesh.get_group()
        where: dict[str, Any] = {"init_method": init_method, "device": device, "dtype": dtype}
        self.router = Router(
            hidden_size,
            num_experts,
            top_k,
            tp_mesh=self.mesh,
            bias=router_bias,
            sequence_parallel=self.ranks > 1,
            **where,
            **routing,
        )
        where["output_init_method"] = output_init_method
        self.experts = Experts(
            hidden_size, ffn_hidden_size, num_experts, ep_mesh=self.mesh if ep_mesh is None else ep_mesh,
            bias=bias, swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit, swiglu_up_offset=swiglu_up_offset,
            copies=ep_mesh is None, **where,
        )  # fmt: skip
        self.shared = None
        if shared_experts:
            self.shared = ParallelMLP(
                hidden_size, shared_experts * ffn_hidden_size, tp_mesh=self.mesh, activation="swiglu", bias=False,
                sequence_parallel=self.sequence_parallel, overlap=overlap, grad_reduce=grad_reduce, **where,
            )  # fmt: skip
        self.reset_counts()

    def reset_counts(self) -> None:
        """Counts load and dropped choices anew."""
        self.load = self.dropped = None

    @propagates_errors
    def forward(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        dropout: float = 0.0,
        row_positions: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        losses: AuxiliaryLosses | None = None,
    ) -> Tensor:
        """``[s, ..., hidden_size]`` to the same shape; see ``RowParallelLinear.forward`` for the other arguments.

        Args:
            losses: the auxiliary losses of this forward; ``None`` for none.

        Raises:
            TypeError, ValueError: x of another shape, dtype or device than the weights need.

        Sharding: x and the result replicated, or both S(0) with ``sequence_parallel``.
        """
        check_input("ParallelMoE", x, self.router.weight)
        flat, split = x.flatten(0, -2), None
        if self.ranks > 1 and not self.sequence_parallel:
            split = shard_sizes(flat.shape[0], self.ranks)
            flat = scatter_to_group(flat, self.group, sizes=split)
        routing = self.router(flat)
        # The rank with the most tokens sets the capacity, which must be the same on all.
        rows = max(split) if split else flat.shape[0] if sizes is None else max(sizes) * x.shape[1:-1].numel()
        experts, capacity = self.router.num_experts, self._capacity(rows)
        # The bias of an expert's result counts with the token's weight too.
        early, late = (None, routing.weights) if self.experts.down_bias is not None else (routing.weights, None)
        dispatched = Dispatch(
            flat, routing.experts, routing.load, experts, group=self.expert_group, weights=early, capacity=capacity,
            chunks=self._chunks(), multiple=self.experts.multiple,
        )  # fmt: skip
        shared = None if self.shared is None else self.shared(x, sizes=sizes)  # while the rows are under way
        y = dispatched.combine(self._run_experts(dispatched), late)
        self._count(routing.load, capacity)
        if losses is not None and self.training:
            y = losses.attach(y, routing, self._load_of_all(routing.load))
        y = y if split is None else gather_from_group(y, self.group, sizes=split)
        y = y.view(x.shape).to(x.dtype)
        if shared is not None:
            y = y + shared
        if residual is None:
            return y
        first = 0
        if self.sequence_parallel:
            lengths = [x.shape[0]] * self.ranks if sizes is None else list(sizes)
            first = sum(lengths[: group_rank(self.group)])
        return add_residual(
            y, None, residual, dropout, training=self.training, first=first, row_positions=row_positions
        )

    def _run_experts(self, dispatched: Dispatch) -> list[Tensor]:
        given, y = (dispatched.in_flight, dispatched), []
        if isinstance(self.experts, FSDPModule) and is_in_torch_dispatch_mode():
            # Selective recomputation must see the matmuls, but not what FSDP2 does before and after them: it keeps
            # results of communication, and a forward communicates more than its recomputation.
            with suspended_modes() as modes:
                y = self.experts(*given, modes=modes)
        else:
            y = self.experts(*given)
        return y

    def _chunks(self) -> int:
        """Groups of this rank's experts whose matmuls hide each other's messages."""
        if self.expert_group is None or not isinstance(self.overlap, int) or self.experts.deferred is not None:
            return 1
        held = self.router.num_experts // self.expert_group.size()
        return max(n for n in range(1, min(self.overlap, held) + 1) if held % n == 0)

    def _capacity(self, tokens: int) -> int | None:
        if not self.training:  # what a token becomes would depend on the other rows of its micro-batch
            return None
        factor = self.capacity_factor
        if factor is None and self.expert_group is not None:
            factor = self.checked_capacity
        if factor is None:
            return None
        return -int(-factor * tokens * self.router.top_k // self.router.num_experts)

    def _load_of_all(self, load: Tensor) -> Tensor:
        """The load over all ranks that share the micro-batch."""
        return reduce_from_group(reduce_from_group(load, self.group), self.cp_group)

    @torch.no_grad()
    def _count(self, load: Tensor, capacity: int | None) -> None:
        compiled = torch.compiler.is_compiling()
        if self.training and (compiled or not in_backward()):  # otherwise this is a recomputation
            load = _of_forward(load) if compiled else load
            self.load = load.long() if self.load is None else self.load + load
            if capacity is not None:
                dropped = (load.long() - capacity).clamp(min=0).sum()
                self.dropped = dropped if self.dropped is None else self.dropped + dropped


@torch.library.custom_op("parallel_ops::load_of_forward", mutates_args=())
def _of_forward(load: Tensor) -> Tensor:
    """The load, in a recomputation zeros: compiled code is that of the forward, so it asks when it runs."""
    return torch.zeros_like(load) if in_backward() else load.clone()


_of_forward.register_fake(torch.empty_like)
