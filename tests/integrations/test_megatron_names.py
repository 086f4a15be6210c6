"""Names of Megatron-core that the drop-in replaces: each alone, all or none, and undone."""

import functools
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron", reason="megatron-core is not installed")

from megatron.core import tensor_parallel
from megatron.core.fusions import fused_bias_gelu, fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from parallel_ops.integrations import megatron
from parallel_ops.integrations.megatron import experts, functions, modules, rotary
from parallel_ops.integrations.megatron._rebind import Binding, Replaced

pytestmark = pytest.mark.usefixtures("megatron_on_cpu")


def test_what_a_model_keeps_is_said():
    """Of one that was built before: its norms; and what its configuration turns off."""

    class Core(DotProductAttention):
        def forward(self, *args):
            return super().forward(*args)

    config = SimpleNamespace(
        bias_activation_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=True,
        cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te",
    )  # fmt: skip
    model, core = torch.nn.Module(), Core.__new__(Core)
    torch.nn.Module.__init__(core)
    model.config, model.norm, model.core = config, torch.nn.LayerNorm(8), core
    with megatron.apply() as applied:
        unreplaced = applied.unreplaced(model)
        config.bias_activation_fusion, config.cross_entropy_fusion_impl = True, "native"
        assert list(applied.unreplaced(model)) == ["norm", "core"]
        model.norm = WrappedTorchNorm(
            SimpleNamespace(normalization="LayerNorm", layernorm_zero_centered_gamma=False, sequence_parallel=False), 8
        )
        del model.core
        assert applied.unreplaced(model) == {}
    assert list(unreplaced) == [
        "Module.config.bias_activation_fusion",
        "Module.config.cross_entropy_fusion_impl",
        "norm",
        "core",
    ]
    assert "built before apply()" in unreplaced["norm"]
    with megatron.apply("softmax") as applied:
        assert applied.unreplaced(model) == {}


def _names():
    """Every name of every module and class of Megatron, and what it is bound to."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name == "megatron" or module_name.startswith("megatron."):
            for name, value in vars(module).items():
                found[module_name, name] = value
                if isinstance(value, type) and value.__module__.startswith("megatron."):
                    found.update({(module_name, name, inner): v for inner, v in vars(value).items()})
    return found


def _changed(before):
    now = _names()
    return {key for key, value in before.items() if now.get(key) is not value}


def test_undo_restores_every_name():
    late = "megatron.core.models.T5.t5_spec"  # imports what is replaced
    assert late not in sys.modules
    before, extension_before = _names(), sys.modules.get("fused_weight_gradient_mlp_cuda")
    replaced = megatron.apply()
    assert len(_changed(before)) >= 25
    importlib.import_module(late)
    replaced.undo()
    replaced.undo()
    assert _changed(before) == set()
    added = {key: value for key, value in _names().items() if key not in before}
    assert [key for key, v in added.items() if str(getattr(v, "__module__", "")).startswith("parallel_ops.")] == []
    assert sys.modules.get("fused_weight_gradient_mlp_cuda") is extension_before


def test_modules_imported_meanwhile_get_megatrons_own_back():
    module = SimpleNamespace(__name__="megatron.late")
    original = fused_bias_gelu.bias_gelu_impl
    with megatron.apply("bias_gelu"):
        module.bias_gelu_impl = fused_bias_gelu.bias_gelu_impl
        sys.modules["megatron.late"] = module
    del sys.modules["megatron.late"]
    assert module.bias_gelu_impl is original


def test_applying_twice_unknown_ops_and_missing_names(monkeypatch):
    with megatron.apply("softmax"), pytest.raises(RuntimeError, match="applied already"):
        megatron.apply("norm")
    with pytest.raises(ValueError, match="'flash'"):
        megatron.apply(["softmax", "flash"])
    before = _names()
    monkeypatch.delattr(fused_bias_swiglu, "weighted_bias_swiglu_impl")
    with pytest.raises(RuntimeError, match=r"megatron-core \d+\.\d+.* has no .*fused_bias_swiglu.weighted_bias_swiglu"):
        megatron.apply()
    monkeypatch.undo()
    assert _changed(before) == set()
    megatron.apply("bias_gelu").undo()


def test_all_or_nothing_and_names_that_others_took():
    here = SimpleNamespace(__name__="here", one=1, two=2)
    with pytest.raises(TypeError):
        Replaced("nobody", [Binding(here, "one", 1, 10), Binding(int, "real", 2, 20)])
    assert here.one == 1
    replaced = Replaced("nobody", [Binding(here, "one", 1, 10), Binding(here, "two", 2, 20)])
    here.two = 3
    with pytest.raises(RuntimeError, match=r"here\.two"):
        replaced.undo()
    assert (here.one, here.two) == (1, 3)


def test_nothing_is_printed(capfd):
    with megatron.apply():
        pass
    assert capfd.readouterr() == ("", "")


_GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
_CHOSEN = torch.ones(5, 4, dtype=torch.bool)
# Builders, what they replace, and arguments that the ops support.
NEWER = {
    "swiglu": (functions.bias_swiglu, fused_bias_swiglu.bias_swiglu_impl, torch.ones(5, 8), None),
    "weighted swiglu": (
        functions.weighted_bias_swiglu, fused_bias_swiglu.weighted_bias_swiglu_impl,
        torch.ones(5, 8), None, torch.ones(5, 1),
    ),
    "rotary": (rotary.rotary, rope_utils._apply_rotary_pos_emb_bshd, torch.ones(5, 2, 4, 8), torch.ones(5, 1, 1, 8)),
    "packed rotary": (
        rotary.packed_rotary, rope_utils._apply_rotary_pos_emb_thd,
        torch.ones(5, 4, 8), torch.tensor([0, 5], dtype=torch.int32), torch.ones(5, 1, 1, 8),
    ),
    "router": (experts.topk_routing, moe_utils.topk_routing_with_score_function, torch.ones(5, 4), 2),
    "permute": (experts.permute, moe_utils.permute, torch.ones(5, 8), _CHOSEN, None, 20),
    "unpermute": (experts.unpermute, moe_utils.unpermute, torch.ones(20, 8), None, (5, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", NEWER)
def test_arguments_of_later_versions_are_not_swallowed(name):
    """They reach Megatron's function; those that say no more than their default do not keep the op away."""
    build, stock, *values = NEWER[name]
    options = {"cp_group": _GROUP} if name == "packed rotary" else {}
    if name == "unpermute":
        values[1] = experts.permute(moe_utils.permute, False)(torch.ones(5, 8), _CHOSEN, None, 20)[2]
    replacement = build(functools.wraps(stock)(lambda *args, **options: options), False)
    assert replacement(*values, **options, newer=True) == {**options, "newer": True}
    for unset in ({"newer": False}, {"newer": None}):
        assert not isinstance(replacement(*values, **options, **unset), dict)


def test_positions_after_the_known_ones_reach_megatrons_permute():
    replacement = experts.permute(functools.wraps(moe_utils.permute)(lambda *args: args), False)
    values = torch.ones(5, 8), _CHOSEN, None, 20, False, False, None, 0
    assert len(replacement(*values, True)) == 9


def test_later_options_of_linears_reach_megatrons(monkeypatch):
    linear = modules.ColumnParallelLinear.__new__(modules.ColumnParallelLinear)
    monkeypatch.setattr(
        tensor_parallel.ColumnParallelLinear, "_forward_impl", lambda self, input, weight, **options: options
    )
    options = {"sequence_parallel": True, "output_dtype": torch.float32}
    assert linear._forward_impl(None, None, **options) == options
