"""The experts of a layer, sharded over a mesh."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from parallel_ops._internal.distributed.compat import resumed_modes
from parallel_ops._internal.gradients.weight_gradients import DeferredWeightGradients, ParameterGrad
from parallel_ops.comm import ParallelMesh
from parallel_ops.expert_parallel import Dispatch
from parallel_ops.layers.initialization import InitFn, init_sharded_, uniform
from parallel_ops.layers.lora import LoraAdapter, expert_adapters
from parallel_ops.layers.parameters import ShardedModule, empty_parameter, ensure_divisible, to_local
from parallel_ops.ops import bias_swiglu, float8_grouped_linear, grouped_linear
from parallel_ops.ops.float8_recipes import RECIPES, Precision


class Experts(ShardedModule):
    """The experts of a layer as grouped matmuls: ``down(silu(gate x) * (up x))`` with each expert's own parameters.

    Args:
        hidden_size: width of input and output. ffn_hidden_size: width after the activation.
        num_experts: over all ranks.
        ep_mesh: the ranks that share the experts (``ep``), each with ``num_experts / P`` whole ones; ``None`` for one.
        bias: whether the linears have biases.
        swiglu_alpha, swiglu_limit, swiglu_up_offset: ``alpha``, ``limit`` and ``up_offset`` of ``bias_swiglu``.
        copies: the ranks of ``mesh`` have all experts each, and their own tokens: gradients are summed over them.
        init_method, output_init_method: fill tiles of ``gate_up``, and of ``down``, in place; ``None`` for what
            ``nn.Linear`` does.
        device, dtype: of the parameters; ``None`` for torch's defaults.

    Attributes:
        gate_up: ``[num_experts, 2 * ffn_hidden_size, hidden_size]``, gates first. down: ``[num_experts, hidden_size,
            ffn_hidden_size]``. gate_up_bias, down_bias: the same without the last dimension, or ``None``. DTensors S(0)
            over ``mesh``; replicated with ``copies``.
        deferred: a queue that computes weight gradients later, as that of ``ParallelLinear``.
        precision, emulated: of the matmuls, as those of ``ParallelLinear``.
        lora: low-rank adapters of ``"gate_up"`` and ``"down"``, by these names; see ``add_lora``.
        recompute: keep the rows alone for the backward, and compute what lies between them and the result again.

    Raises:
        ValueError: the ranks do not divide ``num_experts``.
    """

    precision: Precision = "bf16"
    emulated: bool = False

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        *,
        ep_mesh: DeviceMesh | None = None,
        bias: bool = False,
        swiglu_alpha: float = 1.0,
        swiglu_limit: float | None = None,
        swiglu_up_offset: float = 0.0,
        copies: bool = False,
        init_method: InitFn | None = None,
        output_init_method: InitFn | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(ep_mesh)
        self.copies = copies and self.ranks > 1
        self.num_experts, self.ffn_hidden_size, self.hidden_size = num_experts, ffn_hidden_size, hidden_size
        ensure_divisible("Experts", "num_experts", num_experts, 1 if copies else self.ranks)
        self.init_method, self.output_init_method = init_method, output_init_method
        placement = Replicate() if copies else Shard(0)
        shapes = (num_experts, 2 * ffn_hidden_size, hidden_size), (num_experts, hidden_size, ffn_hidden_size)
        self.gate_up, self.down = (empty_parameter(shape, placement, self.mesh, device, dtype) for shape in shapes)
        self.gate_up_bias, self.down_bias = (
            empty_parameter(shape[:2], placement, self.mesh, device, dtype) if bias else None for shape in shapes
        )
        self._swiglu: dict[str, Any] = {
            "alpha": swiglu_alpha, "limit": swiglu_limit, "up_offset": swiglu_up_offset
        }  # fmt: skip
        self.deferred: DeferredWeightGradients | None = None
        self.recompute = False
        self.lora = nn.ModuleDict()
        self.reset_parameters()

    def __getattr__(self, name: str) -> Any:
        # fully_shard of a module around these experts looks for a state of their own. Over its mesh it cannot shard
        # them: the ranks of ``ep`` are among its ranks. So they are sharded now, over those that have the same. Others
        # who look for a state, such as get_state_dict, must change nothing.
        own = getattr(self.mesh, "parallel_mesh", None) if name.startswith("__composable_api_state_key") else None
        if own is None or self.copies or sys._getframe(2).f_code.co_name != "_is_composable_with_fsdp":
            return super().__getattr__(name)
        shard_experts(self, own)
        return self.__dict__[name]

    def reset_parameters(self) -> None:
        """Initialises each expert as ``nn.Linear`` does by default, independently of the mesh."""
        init_sharded_(self.gate_up, self.init_method or uniform(self.hidden_size))
        init_sharded_(self.down, self.output_init_method or uniform(self.ffn_hidden_size))
        for bias, fan_in in ((self.gate_up_bias, self.hidden_size), (self.down_bias, self.ffn_hidden_size)):
            if bias is not None:
                init_sharded_(bias, uniform(fan_in))

    def add_lora(self, name: str, *, rank: int, alpha: float) -> None:
        """Adds a low-rank adapter of ``"gate_up"`` or ``"down"``, zero at first; see ``LoraAdapter``."""
        weight: nn.Parameter = getattr(self, name)
        placement: Placement = Replicate() if self.copies else Shard(0)
        _, out_features, in_features = weight.shape
        self.lora[name] = LoraAdapter(
            in_features, out_features, (placement, placement), rank=rank, alpha=alpha, experts=self.num_experts,
            tp_mesh=self.mesh, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip

    def forward(
        self, in_flight: Sequence[Sequence[Tensor]], dispatched: Dispatch, modes: Sequence[Any] = ()
    ) -> list[Tensor]:
        """The results of the experts, on their way back: ``dispatched.combine`` takes it.

        Args:
            in_flight: those of ``dispatched``, which brings the rows, ``[r, hidden_size]`` for each chunk, and their
                weights: factors of the results without ``down_bias``, of which they are no part.
            modes: suspended dispatch modes, which see the computation.
        """
        with resumed_modes(modes):
            partial = (self.copies, self.copies)  # apart, since the second matmul reads what the first computes
            parameters = (
                *to_local(self, self.gate_up, self.gate_up_bias, partial=partial),
                *to_local(self, self.down, self.down_bias, partial=partial),
                *expert_adapters(self.lora, ("gate_up", "down"), copies=self.copies),
            )
            returning = []
            for chunk, chunk_parameters in enumerate(_chunked(parameters, dispatched.chunks)):
                rows, offs, weights = dispatched.receive(in_flight[chunk], chunk)
                if self.recompute and torch.is_grad_enabled():
                    # Within the module, so that FSDP2 has gathered the parameters both times. Nothing here is random.
                    y: Tensor = checkpoint(
                        self._compute, rows, offs, weights, *chunk_parameters, use_reentrant=False,
                        preserve_rng_state=False,
                    )  # fmt: skip
                else:
                    y = self._compute(rows, offs, weights, *chunk_parameters)
                returning.append(dispatched.send_back(y, chunk))
            return returning

    def _compute(
        self, rows: Tensor, offs: Tensor, weights: Tensor | None, gate_up: Tensor, gate_up_bias: Tensor | None,
        down: Tensor, down_bias: Tensor | None, a_up: Tensor | None, b_up: Tensor | None, a_down: Tensor | None,
        b_down: Tensor | None,
    ) -> Tensor:  # fmt: skip
        linear: Callable[..., Tensor] = grouped_linear
        if self.precision != "bf16":
            linear = functools.partial(float8_grouped_linear, recipe=self.precision, emulated=self.emulated)
        both = linear(rows, gate_up, offs, bias=gate_up_bias, **self._targets(self.gate_up))
        both = self._adapted("gate_up", both, rows, offs, a_up, b_up)
        x = bias_swiglu(both, weights=weights, **self._swiglu)
        y = linear(x, down, offs, bias=down_bias, **self._targets(self.down))
        return self._adapted("down", y, x, offs, a_down, b_down)

    def _adapted(self, name: str, y: Tensor, rows: Tensor, offs: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
        """``y`` with the term that the adapter ``a``, ``b`` of a linear adds."""
        if a is None or b is None:
            return y
        own = self.lora[name]
        assert isinstance(own, LoraAdapter)
        return y + (grouped_linear(grouped_linear(rows, a, offs), b, offs) * own.scaling).to(y.dtype)

    @property
    def local_sizes(self) -> tuple[int, int]:
        """Features after the activation and before the experts."""
        return self.ffn_hidden_size, self.hidden_size

    @property
    def multiple(self) -> int:
        """What the rows of each expert must be a multiple of."""
        return 1 if self.precision == "bf16" else RECIPES[self.precision].rows

    def _targets(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The target of a weight's gradient if it is deferred."""
        if self.deferred is None or self.copies or not parameter.requires_grad:
            return {}
        return {"main_grad": ParameterGrad(parameter), "deferred": self.deferred}


def _chunked(parameters: Sequence[Tensor | None], chunks: int) -> Iterator[tuple[Any, ...]]:
    """The parameters of each group of experts. Their gradients are joined, not added."""
    if chunks == 1:
        return iter([tuple(parameters)])
    return zip(*([None] * chunks if p is None else p.chunk(chunks) for p in parameters), strict=True)


def experts_of(model: nn.Module) -> list[Experts]:
    """The experts of a model that ranks share, layer by layer."""
    return [
        module for module in model.modules() if isinstance(module, Experts) and module.ranks > 1 and not module.copies
    ]


def shard_experts(
    model: nn.Module, mesh: ParallelMesh, *, mp_policy: MixedPrecisionPolicy | None = None, **options: Any
) -> None:
    """Applies ``fully_shard`` to all experts that ranks of ``ep`` share, over the ranks that have the same ones.

    ``fully_shard`` of a layer shards its experts in this way too, with FSDP2's defaults: the ranks of ``ep`` are among
    those that the layer is sharded over. Call this before it in a loop of your own to give them options, such as the
    ``mp_policy`` of the layers. ``parallelize`` calls it.

        mesh = ParallelMesh(dp_shard=4, ep=2)
        model = Transformer(config, ep_mesh=mesh["ep"], device="meta")
        shard_experts(model, mesh)
        for block in (*model.layers.values(), model):
            fully_shard(block, mesh=mesh["fsdp"])

    Gradients of experts become means over ``dp_replicate``, ``dp_shard`` and ``cp``, as those of all others. They are
    on another mesh: ``torch.nn.utils.clip_grad_norm_`` refuses both in one call, so take the norm of each mesh apart.

    Args:
        mp_policy, options: Those of ``fully_shard``. Inputs of experts are never cast: weights of rows are fp32.
    """
    policy = dataclasses.replace(mp_policy or MixedPrecisionPolicy(), cast_forward_inputs=False)
    for experts in experts_of(model):
        placed = functools.partial(_placement, ranks=mesh.size("efsdp"), held=experts.num_experts // mesh.size("ep"))
        fully_shard(experts, mesh=mesh.expert_shards, shard_placement_fn=placed, mp_policy=policy, **options)
        divide(experts, mesh, shards=mesh.size("efsdp"))


def _placement(parameter: nn.Parameter, *, ranks: int, held: int) -> Shard:
    """The dimension of the experts' weights that is sharded: one that divides, experts first."""
    sizes = (held, *parameter.shape[1:])
    return Shard(next((dim for dim, size in enumerate(sizes) if size % ranks == 0), 0))


def divide(experts: nn.Module, mesh: ParallelMesh, *, shards: int) -> None:
    """Makes the gradients of experts means over ``loss``, as those of all other parameters are.

    They are sums over all ranks: each expert gets tokens of all ranks of ``ep``, tensor-parallel ones among them.

    Args:
        shards: ranks over which gradients are reduce-scattered.
    """
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(float(mesh.size("loss")))
    # gloo cannot divide as it reduces. Where nothing is scattered, FSDP2 divides before, and with this a second time.
    if shards > 1 and mesh.root.device_type == "cpu":
        experts.set_force_sum_reduction_for_comms(True)
