"""Recognizes what a forward computes by trying it: beside our forwards, on random rows, at ``apply``.

The trial is of a stand-in: an object of the module's class with its options, small random weights in float64 on the CPU
and functions for its children. The model, its hooks and its weights (sharded, quantised or on the meta device) take no
part, and the random generators stay as they are. Values and gradients are compared to a relative error of 1e-9, in
training and in evaluation, with the options that the module has and with others. So that this is possible, casts to
float32 become casts to float64 in the trial.

A trial cannot see what a forward would do in another dtype, on another device, or for values and lengths that were not
tried.
"""

import contextlib
import copy
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from parallel_ops.integrations.huggingface._fused import stock_class

# Options that may be neutral or absent in a model, and not in the next call.
_OPTIONS = ("logits_scaling", "final_logit_softcapping", "logit_scale", "residual_dropout")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, tuple, list, dict, functools.partial)
_OF_EVERY_MODULE = {*vars(nn.Module()), "config"}

Verdict = tuple[str | None, str]  # the name of the forward of ours that computes the same, and why there is none
_verdicts: dict[Any, Verdict] = {}
forget = _verdicts.clear  # before a model is planned: what a class computes may have been replaced since


class Draw:
    """Random leaves of a trial, always the same, and its options."""

    def __init__(self, training: bool, changed: bool) -> None:
        self.training, self._changed = training, changed
        self.leaves: list[Tensor] = []
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        self.leaves.append(self.constant(*shape).requires_grad_())
        return self.leaves[-1]

    def constant(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64, device="cpu")

    def rows(self, *shape: int) -> Tensor:
        """Rows of different sizes, which tell a clamp or an epsilon: from 0.001 to 300."""
        scales = torch.logspace(-3, 2.5, shape[-2], dtype=torch.float64, device="cpu")
        return self(*shape) * scales[:, None]

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator, device="cpu")

    def options(self, owner: Any, names: Mapping[str, Any]) -> dict[str, Any]:
        """``names`` of ``owner``, or with other values for all numbers that are no sizes."""
        if not self._changed:
            return dict(names)
        other = {name: 0.2 + zlib.crc32(name.encode()) % 97 / 160 for name in names}  # below 1, for dropout
        return {n: other[n] if type(v) is float or n in _OPTIONS else v for n, v in names.items()}


def stand_in(module: nn.Module, draw: Draw, **given: Any) -> Any:
    """An object of the class of ``module`` with its options, and ``given`` in place of weights and children.

    Of sizes, those that the module has are given.
    """
    made: Any = object.__new__(stock_class(module) or type(module))
    nn.Module.__init__(made)
    own = made.__dict__
    own |= draw.options(module, _plain(module))
    if "config" in module.__dict__:
        own["config"] = copy.copy(module.config)
        own["config"].__dict__.update(draw.options(module.config, vars(module.config)))
    own |= {n: v for n, v in given.items() if type(v) is not int or hasattr(module, n)} | {"training": draw.training}
    return made


def _plain(module: nn.Module) -> dict[str, Any]:
    """Options of ``module``: neither tensors nor modules nor objects that its forward might change."""
    found = {n: v for n, v in vars(module).items() if n not in _OF_EVERY_MODULE}
    return {n: copy.copy(v) for n, v in found.items() if isinstance(v, _PLAIN) or inspect.isroutine(v)}


def tried(
    owner: nn.Module | None, own: Callable[..., Any], ours: Mapping[str, Callable[..., Any]],
    arrange: Callable[[Draw], tuple[Any, ...]], *others: Any,
) -> Verdict:  # fmt: skip
    """Which of ``ours`` returns the same as ``own``, and has the same gradients, for the arguments of ``arrange``.

    Once for all modules of the class and the options of ``owner``, whose forward is tried, that agree in ``others``.
    """
    options: tuple[Any, ...] = (own, *others)
    if owner is not None:
        cls = type(owner)
        options = (cls, cls.forward, repr(_plain(owner)), id(getattr(owner, "config", None)), *others)
    key = (arrange.__qualname__, *options)
    if key not in _verdicts:
        _verdicts[key] = _verdict(own, ours, arrange)
    return _verdicts[key]


def _verdict(
    own: Callable[..., Any], ours: Mapping[str, Callable[..., Any]], arrange: Callable[[Draw], tuple[Any, ...]]
) -> Verdict:
    settings = [(True, True), (False, False)]
    with undisturbed(), _Exact():
        try:
            expected = [_results(own, arrange, *setting) for setting in settings]
        except Exception as error:
            return None, _unknown(own, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        for name, function in ours.items():
            with contextlib.suppress(Exception):  # it needs what this module does not have
                if all(
                    _same(_results(function, arrange, *setting), right)
                    for setting, right in zip(settings, expected, strict=True)
                ):
                    return name, ""
    return None, _unknown(own, "its results are others")


def _unknown(function: Any, why: str) -> str:
    return f"{inspect.unwrap(function).__qualname__} is none that it was written for (tried on random rows: {why})"


def _results(function: Callable[..., Any], arrange: Any, training: bool, changed: bool) -> list[Tensor]:
    """What ``function`` returns, and the gradients of what it was drawn from."""
    draw = Draw(training, changed)
    args = arrange(draw)
    torch.default_generator.manual_seed(0)  # for dropout; torch.manual_seed is of GPUs too
    found = [t for t in tree_leaves(function(*args)) if isinstance(t, Tensor)]
    total = sum((t * draw.constant(*t.shape)).sum() for t in found if t.requires_grad)
    gradients = torch.autograd.grad(total, draw.leaves, materialize_grads=True) if isinstance(total, Tensor) else ()
    return [t.detach().double() for t in (*found, *gradients)]


def _same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return [t.shape for t in got] == [t.shape for t in expected] and all(map(_close, got, expected))


def _close(got: Tensor, expected: Tensor) -> bool:
    got, expected = (t.reshape(-1, t.shape[-1] if t.dim() else 1) for t in (got, expected))
    size = expected.abs()
    rounding = 1e-11 * size.amax(-1, keepdim=True) + 1e-13 * size.amax()  # what is zero in exact arithmetic is not
    return bool(((got - expected).abs() <= 1e-9 * size + rounding).all())


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Runs on the CPU with gradients, whatever the caller's contexts say, and leaves its random numbers alone."""
    with (
        torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"),
        torch.autocast("cpu", enabled=False), _disable_current_modes(),
    ):  # fmt: skip
        yield


class _Exact(TorchFunctionMode):
    """Casts to float32 are casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        return func(*wide, **{n: torch.float64 if v is torch.float32 else v for n, v in (kwargs or {}).items()})
