"""Names of Megatron-core that the drop-in replaces: each alone, all or none, and undone."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron", reason="megatron-core is not installed")

from megatron.core.fusions import fused_bias_gelu, fused_bias_swiglu
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from parallel_ops.integrations import megatron
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
