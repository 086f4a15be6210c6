"""Changes of a model as users and libraries make them: each takes the model and a monkeypatch."""

import functools

import torch
import transformers
from torch import nn
from transformers import modeling_utils
from transformers.loss import loss_utils

STOCK_LOSS = loss_utils.LOSS_MAPPING["ForCausalLM"]
ATTENTION = modeling_utils.ALL_ATTENTION_FUNCTIONS
_EVERY_ATTENTION = ATTENTION if isinstance(ATTENTION, dict) else type(ATTENTION)._global_mapping


class Square(nn.Module):
    def forward(self, x):
        return x * x


class OwnMLP(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 0.5


class Prompted(nn.Module):
    """An attention around the model's own, as PEFT's adaption prompt puts there."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        mixed, *rest = self.model(*args, **kwargs)
        return (mixed * 2, *rest)


@functools.wraps(STOCK_LOSS)
def sevenfold(*args, **kwargs):
    return 7 * STOCK_LOSS(*args, **kwargs)


def doubled(function):
    """``function``, the first of whose results is doubled: a wrapper as libraries put it over a forward."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        found = function(*args, **kwargs)
        return (2 * found[0], *found[1:]) if isinstance(found, tuple) else 2 * found

    return call


def twice(*args, **kwargs):
    out, weights = STOCK_SDPA(*args, **kwargs)
    return 2 * out, weights


STOCK_SDPA = ATTENTION["sdpa"]


def hook(path, kind="forward_hook"):
    def change(model, patch):
        module = model.get_submodule(path)
        {
            "forward_hook": lambda: module.register_forward_hook(lambda m, args, out: 2 * out),
            "forward_pre_hook": lambda: module.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:])),
            "backward_hook": lambda: module.register_full_backward_hook(lambda m, given, _: (given[0] * 2, *given[1:])),
        }[kind]()

    return change


def wrap(path):
    def change(model, patch):
        module = model.get_submodule(path)
        module.forward = doubled(module.forward)

    return change


def exchange(path, make):
    def change(model, patch):
        parent, _, name = path.rpartition(".")
        parent = model.get_submodule(parent)
        setattr(parent, name, make(getattr(parent, name)))

    return change


def replace(owner, name, make=doubled):
    def change(model, patch):
        patch.setattr(owner, name, make(getattr(owner, name)))

    return change


def register_loss(model, patch):
    patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", sevenfold)


def own_loss_type(model, patch):
    patch.setitem(loss_utils.LOSS_MAPPING, "Mine", sevenfold)
    model.loss_type = "Mine"


def own_loss_of_the_class(model, patch):
    patch.setattr(transformers.LlamaForCausalLM, "loss_function", property(lambda _: sevenfold))


def own_loss(model, patch):
    model.loss_function = sevenfold


def register_attention(model, patch):
    patch.setitem(_EVERY_ATTENTION, "sdpa", twice)


def another_attention(model, patch):
    patch.setitem(_EVERY_ATTENTION, "mine", twice)
    model.config._attn_implementation = "mine"


def another_attention_of_one_registry(model, patch):
    patch.setitem(ATTENTION if isinstance(ATTENTION, dict) else ATTENTION._local_mapping, "mine", twice)
    model.config._attn_implementation = "mine"


def shifted(tables):
    cos, sin = tables
    return cos * torch.linspace(0.5, 1.0, cos.shape[-1]), sin


def wrap_tables(model, patch):
    rotary = model.model.rotary_emb
    stock = rotary.forward
    rotary.forward = lambda *args, **kwargs: shifted(stock(*args, **kwargs))


class Quantised(torch.Tensor):
    """A weight that linears alone take, as torchao's."""

    @staticmethod
    def __new__(cls, whole):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype, device=whole.device)

    def __init__(self, whole):
        self.whole = whole

    def __tensor_flatten__(self):
        return ["whole"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            return function(args[0], args[1].whole, *args[2:], **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].whole)
        raise NotImplementedError(f"{function} of a quantised weight")


def quantise(model, patch):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Quantised(module.weight.detach()), requires_grad=False)
