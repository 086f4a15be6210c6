"""A model of one's own as a chain of modules, which a pipeline can cut."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from parallel_ops._internal.module_names import matching
from parallel_ops.pipeline_parallel.cut import Stages


class ModuleChain(nn.Module):
    """Modules of a model that are called one after another, each with the result of the one before.

        chain = ModuleChain(model, ["tokens", "layers.*", "norm", "head"], blocks="layers.*", loss=loss,
                            shape=lambda s, b: (s, b, 512))

    Parameters and modules keep their names, so a checkpoint of any pipeline, or of none, loads into any other. The
    model is built whole; a rank of a pipeline then drops what its stages do not have.

    Args:
        model: Has no parameters beside those of the named modules.
        names: Of the modules, in the order of the calls; a pattern such as ``"layers.*"`` stands for those that match,
            in the model's order.
        blocks: The pattern of the modules between which the model may be cut. Those before the first belong to the
            first stage, those after the last to the last.
        loss: Of the result of the last module and the targets; the mean over this rank's tokens.
        shape: The shape of what a block returns, from the shape ``(s, b)`` of the tokens.

    Raises:
        ValueError: A name matches no module; modules lie within one another, are shared or lack parameters of the
            model; the blocks are not consecutive.
    """

    tied_weight: nn.Parameter | None = None

    def __init__(
        self, model: nn.Module, names: Sequence[str], *, blocks: str,
        loss: Callable[[Tensor, Tensor], Tensor], shape: Callable[[int, int], Sequence[int]],
    ) -> None:  # fmt: skip
        super().__init__()
        every = dict(model.named_modules(remove_duplicate=False))
        self._names = [found for name in names for found in _matching(every, name)]
        held = [id(p) for name in self._names for p in every[name].parameters()]
        if len(held) != len(set(held)) or set(held) != {id(p) for p in model.parameters()}:
            raise ValueError(
                "ModuleChain: names must have each parameter of the model in one module; they have "
                f"{len(set(held))} of {sum(1 for _ in model.parameters())}"
                + (", some of them twice" if len(held) != len(set(held)) else "")
            )
        self._blocks = _matching(every, blocks)
        first = self._names.index(self._blocks[0]) if self._blocks[0] in self._names else -1
        if first < 0 or self._names[first : first + len(self._blocks)] != self._blocks:
            raise ValueError(f"ModuleChain: names must have the blocks {blocks!r} one after another, got {self._names}")
        self._before, self._after = self._names[:first], self._names[first + len(self._blocks) :]
        for name, child in model.named_children():
            self.add_module(name, child)
        self._loss, self._shape = loss, shape
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.stages: Stages | None = None
        self.pp_rank = 0

    @property
    def block_names(self) -> list[str]:
        """The blocks of the whole model."""
        return list(self._blocks)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, of the whole model."""
        return len(self._blocks)

    def keep(self, stages: Stages, pp_rank: int) -> None:
        """Drops the modules that the stages of a pipeline rank do not have."""
        if sum(stages.sizes) != self.num_blocks:
            raise ValueError(f"ModuleChain: stages must have {self.num_blocks} blocks in all, got {sum(stages.sizes)}")
        self.stages, self.pp_rank = stages, pp_rank
        own = {name for stage in stages.on(pp_rank) for name in self._of(stage)}
        for name in self._names:
            if name not in own:
                parent, _, child = name.rpartition(".")
                del self.get_submodule(parent)._modules[child]  # keeps the names of the others in a ModuleList

    def _of(self, stage: int | None) -> list[str]:
        if self.stages is None or stage is None:
            return self._names
        found = [self._blocks[number] for number in self.stages.layers[stage]]
        before = self._before if stage == 0 else []
        return [*before, *found, *(self._after if stage == self.stages.count - 1 else [])]

    def loads_of_model(self) -> None:
        """It has no auxiliary losses."""

    def stage_blocks(self, stage: int) -> list[nn.Module]:
        """The blocks of a stage of this rank."""
        assert self.stages is not None
        return [self.get_submodule(self._blocks[number]) for number in self.stages.layers[stage]]

    def stream_shape(self, s: int, b: int) -> tuple[int, ...]:
        """The shape of what a stage returns, for tokens ``[s, b]``."""
        return tuple(self._shape(s, b))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, stage: int | None = None,
        hidden_states: Tensor | None = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """The loss, or what a stage that is not the last returns; without targets the result of the last module.

        Args:
            tokens, targets: Of the whole micro-batch, on every stage. stage: The one to compute; ``None`` for all.
            hidden_states: What the stage before returned; ``None`` for the first.

        Raises:
            ValueError: Further arguments, such as documents, which a chain does not have.
        """
        if given := [name for name, value in options.items() if value is not None]:
            raise ValueError(f"ModuleChain: a chain of modules takes tokens and targets alone, got {', '.join(given)}")
        x = tokens if hidden_states is None else hidden_states
        for name in self._of(stage):
            x = self.get_submodule(name)(x)
        last = self.stages is None or stage is None or stage == self.stages.count - 1
        return self._loss(x, targets) if last and targets is not None else x


def _matching(modules: dict[str, nn.Module], pattern: str) -> list[str]:
    found = matching(modules, pattern)
    if not found:
        children = ", ".join(name for name in modules if name and "." not in name)
        raise ValueError(f"ModuleChain: the model has no module {pattern!r}; it has {children}")
    return found
