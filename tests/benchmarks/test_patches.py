"""Another package's patch is in force within its block alone."""

import sys
from types import ModuleType

from benchmarks.training.patches import Patch


def test_a_patch_is_in_force_within_its_block_alone(monkeypatch):
    defining, consuming = ModuleType("patched"), ModuleType("patched.consumer")
    exec("def norm(): return 'stock'\nclass Layer:\n    def forward(self): return 'stock'", defining.__dict__)
    consuming.rms_norm, consuming.size = defining.norm, 1
    for module in (defining, consuming):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before = [dict(vars(module)) for module in (defining, consuming)]

    def apply():
        defining.norm = lambda: "patched"
        defining.Layer.forward = lambda self: "patched"
        defining.added = lambda: "patched"
        consuming.size = 2  # no kernel: it stays

    patch = Patch("patched", apply)
    assert patch.names() == ["Layer.forward", "patched.added", "patched.consumer.rms_norm", "patched.norm"]
    for _ in range(2):
        assert [defining.norm(), consuming.rms_norm(), defining.Layer().forward()] == ["stock"] * 3
        with patch:
            assert [defining.norm(), consuming.rms_norm(), defining.Layer().forward()] == ["patched"] * 3
            assert defining.added() == "patched"
    assert [dict(vars(module)) for module in (defining, consuming)] == [before[0], before[1] | {"size": 2}]
