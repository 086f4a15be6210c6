"""Parts of a layer that a plan recomputes: the values of ``Plan.recompute``.

A value is a kind (``KINDS``) or modules of ``MODULES`` joined by ``+``, as in Megatron-LM's ``--recompute-modules``:
``mla_up_proj+mlp``.
"""

from functools import lru_cache

# The first three are what a search tries by default.
KINDS = ("none", "selective", "full", "operators", "experts")
# Attention (scores), outputs of norms, activation functions of dense layers and of experts, the heads that latent
# attention expands, dense MLPs, whole layers of experts with what they send, shared experts.
MODULES = ("core_attn", "layernorm", "mlp_act", "moe_act", "mla_up_proj", "mlp", "moe", "shared_experts")
_SELECTIVE = frozenset(("layernorm", "mlp_act", "moe_act", "mla_up_proj"))


@lru_cache(maxsize=256)
def recomputed(recompute: str, flash_attention: bool) -> frozenset[str]:
    """Modules that a value recomputes, ``experts`` among them for matmuls and activation of routed experts. Empty for
    ``full`` and ``operators``, which are not by module."""
    if recompute == "selective":
        return _SELECTIVE if flash_attention else frozenset(("core_attn",))
    if recompute == "experts":
        return frozenset(("experts",))
    return frozenset() if recompute in KINDS else frozenset(recompute.split("+"))


def elementwise_only(recompute: str, flash_attention: bool) -> bool:
    """True if only norms and activation functions are recomputed, which each half of a split backward pass can do."""
    found = recomputed(recompute, flash_attention)
    return bool(found) and found <= _SELECTIVE


def check_recompute(value: object) -> None:
    """Raises ``ValueError`` unless ``value`` is a value of ``Plan.recompute``."""
    parts = value.split("+") if isinstance(value, str) else []
    if value not in KINDS and not (parts and set(parts) <= set(MODULES) and len(set(parts)) == len(parts)):
        modules = f"modules joined by +, of {', '.join(MODULES)}"
        raise ValueError(f"Plan: recompute must be one of {', '.join(KINDS)}, or {modules}; got {value!r}")
