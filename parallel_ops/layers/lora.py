"""Low-rank adapters of parallel linears (LoRA; Hu et al., arXiv:2106.09685).

    Y = X W^T + alpha / r (dropout(X) A^T) B^T          A [r, in], B [out, r]; W is frozen, B begins as zeros

    column parallel     A whole on every rank, B sharded as W, by rows:
                        U = X A^T, of this rank's tokens with ``sequence_parallel``, then gathered; U B_r^T
    row parallel        A sharded as W, by columns, B whole on every rank:
                        U = sum over r of X_r A_r^T, scattered by tokens with ``sequence_parallel``; U B^T

    whole linear        A and B whole on every rank, which computes its own tokens
    experts             A [experts, r, in], B [experts, out, r], sharded as W, by experts: grouped matmuls of the rows

So all that an adapter sends is U, of r features. Linears with the same input share one matmul with their A, one
message and, with dropout, one mask. Masks are drawn by global element index and are independent of the number of ranks.

peft's own tuner is not used: it replaces a linear by a module around it, and the layers here read weights of several
linears at once (``column_linears``). Files are those of peft; see ``models.huggingface.adapters``.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from parallel_ops._internal.distributed.groups import check_sizes, group_rank
from parallel_ops.comm import all_gather, copy_to_group, reduce_from_group, reduce_scatter
from parallel_ops.layers.initialization import fill_, init_sharded_, uniform
from parallel_ops.layers.parameters import ShardedModule, empty_parameter, to_local
from parallel_ops.ops import bias_dropout_add


class LoraAdapter(ShardedModule):
    """The adapter of one linear, or of one linear of each expert; the ``add_lora`` of layers makes it.

    Args:
        in_features, out_features: of the whole linear.
        placements: of A and B on the mesh.
        rank: features between A and B. alpha: the adapter is scaled by ``alpha / rank``.
        dropout: probability for elements of the input of A, in training.
        experts: number of experts; ``None`` for a linear.

    Attributes:
        a: ``[rank, in_features]``. b: ``[out_features, rank]``. Both ``[experts, ...]`` of experts.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        placements: tuple[Placement, Placement],
        *,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        experts: int | None = None,
        tp_mesh: DeviceMesh | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp_mesh)
        self.in_features, self.rank, self.scaling, self.dropout = in_features, rank, alpha / rank, dropout
        each = () if experts is None else (experts,)
        self.a = empty_parameter((*each, rank, in_features), placements[0], self.mesh, device, dtype)
        self.b = empty_parameter((*each, out_features, rank), placements[1], self.mesh, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A as ``nn.Linear`` (and peft) initialises it, independently of the mesh; B with zeros."""
        init_sharded_(self.a, uniform(self.in_features))
        fill_(self.b, 0.0)

    def drop(self, x: Tensor, index_offset: int) -> Tensor:
        """Dropout of ``x``, whose first element has the index ``index_offset`` in the whole tensor."""
        return bias_dropout_add(x, None, None, self.dropout, training=self.training, index_offset=index_offset)

    @property
    def drops(self) -> bool:
        return self.training and self.dropout > 0.0


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return ".lora." in name


def is_of_experts(linear: str) -> bool:
    """Whether a linear of this name is one of each expert."""
    return linear.rpartition(".")[0].endswith(".experts")


def names_of(linear: str) -> tuple[str, str, str]:
    """The names of the parameters of a linear: the weight, and A and B of its adapter."""
    module, _, own = linear.rpartition(".")
    if is_of_experts(linear):
        return linear, f"{module}.lora.{own}.a", f"{module}.lora.{own}.b"
    return f"{linear}.weight", f"{linear}.lora.a", f"{linear}.lora.b"


def whole_adapter(x: Tensor, adapter: LoraAdapter, *, sequence_parallel: bool, sizes: Sequence[int] | None) -> Tensor:
    """The term that the adapter of a linear that is whole on every rank adds; arguments as in ``column_adapters``.

    Sharding: x and the result replicated, or S(0) with ``sequence_parallel``.
    """
    if adapter.drops:
        x = adapter.drop(x, _rows_before(x, adapter, sequence_parallel, sizes) * x.shape[1:].numel())
    (a,) = to_local(adapter, adapter.a, partial=(sequence_parallel,))
    (b,) = to_local(adapter, adapter.b, partial=(sequence_parallel,))
    assert a is not None and b is not None
    return F.linear(F.linear(x, a), b) * adapter.scaling


def expert_adapters(adapters: nn.ModuleDict, names: Sequence[str], *, copies: bool) -> list[Tensor | None]:
    """A and B of the adapters of these linears of experts, one after the other; ``None`` for a linear without one."""
    found: list[Tensor | None] = []
    for name in names:
        if name not in adapters:
            found += [None, None]
            continue
        own = adapters[name]
        assert isinstance(own, LoraAdapter)
        found += [*to_local(own, own.a, partial=(copies,)), *to_local(own, own.b, partial=(copies,))]
    return found


def _rows_before(x: Tensor, adapter: LoraAdapter, sequence_parallel: bool, sizes: Sequence[int] | None) -> int:
    """Rows of the ranks before this one."""
    if not sequence_parallel:
        return 0
    every = check_sizes("LoraAdapter", "sizes", sizes, adapter.group, 0, shard=x)
    return sum(every[: group_rank(adapter.group)])


def column_adapters(
    x: Tensor,
    adapters: Sequence[LoraAdapter | None],
    rows: Sequence[slice | None],
    *,
    sequence_parallel: bool,
    sizes: Sequence[int] | None,
) -> list[Tensor | None]:
    """The terms that adapters of column-parallel linears with one input add; ``None`` for a linear without one.

    Args:
        adapters: of each linear, at least one.
        rows: this rank's rows of a B that is whole on every rank; ``None`` if it is sharded.
        sizes: with ``sequence_parallel``, the rows of ``x`` on every rank; ``None`` for equal parts.

    Sharding: x replicated, or S(0) with ``sequence_parallel``; the results S(-1).
    """
    used = [(adapter, own) for adapter, own in zip(adapters, rows, strict=True) if adapter is not None]
    first, group = used[0][0], used[0][0].group
    if first.drops:
        x = first.drop(x, _rows_before(x, first, sequence_parallel, sizes) * x.shape[1:].numel())
    given = to_local(first, *[adapter.a for adapter, _ in used], partial=[sequence_parallel] * len(used))
    u = F.linear(x, torch.cat([a for a in given if a is not None]))
    u = all_gather(u, group, dim=0, sizes=sizes) if sequence_parallel else copy_to_group(u, group)
    given = to_local(first, *[adapter.b for adapter, _ in used], partial=[own is not None for _, own in used])
    parts = iter(zip(u.split([adapter.rank for adapter, _ in used], dim=-1), given, used, strict=True))
    added: list[Tensor | None] = []
    for adapter in adapters:
        if adapter is None:
            added.append(None)
            continue
        part, b, (_, own) = next(parts)
        assert b is not None
        added.append(F.linear(part, b if own is None else b[own]) * adapter.scaling)
    return added


def row_adapter(x: Tensor, adapter: LoraAdapter, *, sequence_parallel: bool, sizes: Sequence[int] | None) -> Tensor:
    """The term that the adapter of a row-parallel linear adds to its reduced output.

    Args:
        sizes: with ``sequence_parallel``, the rows of the result on every rank; ``None`` for equal parts.

    Sharding: x S(-1); the result replicated, or S(0) with ``sequence_parallel``.
    """
    group = adapter.group
    if adapter.drops:
        # By features first: so this rank's elements are adjacent in the whole tensor.
        x = adapter.drop(x.movedim(-1, 0), group_rank(group) * x.numel()).movedim(0, -1)
    (a,) = to_local(adapter, adapter.a)
    assert a is not None
    u = F.linear(x, a)
    u = reduce_scatter(u, group, dim=0, sizes=sizes) if sequence_parallel else reduce_from_group(u, group)
    (b,) = to_local(adapter, adapter.b, partial=(sequence_parallel,))
    assert b is not None
    return F.linear(u, b) * adapter.scaling
