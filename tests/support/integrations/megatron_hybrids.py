"""Megatron-core's ``HybridModel``, since 0.18, as somebody without Transformer Engine builds it: of the layers of
Megatron's local GPT spec, taken apart."""

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.hybrid import hybrid_block, hybrid_model
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from parallel_ops.integrations import megatron


class LocalStack(hybrid_block.HybridStack):
    """The last norm of Megatron's stack is Transformer Engine's, whatever the spec says."""

    def __init__(self, config, *args, post_layer_norm=True, **kwargs):
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)


def local_spec(config, core):
    norms = {"qk_layernorm": config.qk_layernorm, "normalization": config.normalization}

    def layer(**options):
        return gpt_layer_specs.get_gpt_layer_local_spec(**norms, **options).submodules

    def attention(of):
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=of.input_layernorm, self_attention=of.self_attention, self_attn_bda=of.self_attn_bda
            ),
        )

    def feed_forward(module, of):
        return ModuleSpec(
            module=module,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=of.pre_mlp_layernorm, mlp=of.mlp, mlp_bda=of.mlp_bda
            ),
        )

    latent = layer(multi_latent_attention=True)
    latent.self_attention.submodules.core_attention = core
    mtp = MultiTokenPredictionBlockSubmodules(
        layer_specs=[get_mtp_layer_spec(IdentityOp, use_transformer_engine=False)]
    )
    submodules = hybrid_block.HybridStackSubmodules(
        attention_layer=attention(layer(qk_l2_norm=config.qk_l2_norm)),
        mlp_layer=feed_forward(MLPLayer, layer()),
        moe_layer=feed_forward(MoETransformerLayer, layer(num_experts=8)),
        mtp_block_spec=ModuleSpec(module=MultiTokenPredictionBlock, submodules=mtp),
    )
    if hasattr(submodules, "mla_layer"):  # 0.19
        submodules.mla_layer = attention(latent)
    return ModuleSpec(module=LocalStack, submodules=submodules)


def build(case, config, core, **arguments):
    MTPLossLoggingHelper.tracker.clear()  # as long as the first model of the process predicts tokens
    if case.drop_in == "spec":
        spec = megatron.hybrid_stack_spec(config, grad_reduce=case.grad_reduce)
    else:
        spec = local_spec(config, core)
    return hybrid_model.HybridModel(config, spec, hybrid_layer_pattern=case.pattern, **arguments)
