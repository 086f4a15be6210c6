"""The stack of a ``HybridModel``, which Megatron-core has since 0.18, of this package's modules; see ``hybrid.py``."""

import dataclasses
from typing import Any

from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from parallel_ops._internal.distributed.groups import GradReduce
from parallel_ops.integrations.megatron import modules, specs

_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
_FEED_FORWARD = ("pre_mlp_layernorm", "mlp", "mlp_bda")


class HybridStack(hybrid_block.HybridStack):
    """Megatron's with this package's last norm. Megatron's own is Transformer Engine's, whatever the spec says."""

    def __init__(self, config: Any, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = modules.Norm(config, config.hidden_size, config.layernorm_epsilon)


def stack_spec(config: Any, grad_reduce: GradReduce) -> ModuleSpec:
    """The layers of GPT, in two parts: attention, and what follows it."""
    norms = {"qk_layernorm": config.qk_layernorm, "normalization": config.normalization, "grad_reduce": grad_reduce}
    dense = specs.gpt_layer_spec(qk_l2_norm=config.qk_l2_norm, **norms)
    # Any number of experts: the layer reads the configuration.
    experts = specs.gpt_layer_spec(num_experts=8, moe_grouped_gemm=config.moe_grouped_gemm, **norms)
    own = {
        "attention_layer": _part(TransformerLayer, dense, _ATTENTION),
        "mla_layer": _part(TransformerLayer, specs.gpt_layer_spec(multi_latent_attention=True, **norms), _ATTENTION),
        "mlp_layer": _part(MLPLayer, dense, _FEED_FORWARD),
        "moe_layer": _part(MoETransformerLayer, experts, _FEED_FORWARD),
        "mtp_block_spec": ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(
                layer_specs=[get_mtp_layer_spec_for_backend(None, specs.ParallelOpsSpecProvider(grad_reduce))]
            ),
        ),
    }
    megatrons = hybrid_layer_specs.hybrid_stack_spec.submodules
    known = {name: layer for name, layer in own.items() if hasattr(megatrons, name)}  # latent attention since 0.19
    return ModuleSpec(module=HybridStack, submodules=dataclasses.replace(megatrons, **known))


def _part(module: type, layer: ModuleSpec, names: tuple[str, ...]) -> ModuleSpec:
    """The submodules ``names`` of a layer, saved under the names of Megatron's own spec: its norms are fused with the
    linears that follow them, but for that before experts."""
    of_layer = layer.submodules
    keys = {} if module is MoETransformerLayer else of_layer.sharded_state_dict_keys_map
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            **{name: getattr(of_layer, name) for name in names},
            sharded_state_dict_keys_map={key: to for key, to in keys.items() if key.rstrip(".") in names},
        ),
    )
