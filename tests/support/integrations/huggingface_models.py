"""Tiny models of Transformers and their training steps."""

import contextlib
import io

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from parallel_ops.integrations import huggingface
from support.integrations.huggingface import GPT2_SIZES, LENGTH, SIZES, VOCAB

# Before Transformers 5 experts have separate weights, and stay Transformers'.
OLD = int(transformers.__version__.partition(".")[0]) < 5
GPT2 = GPT2_SIZES | {"bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-gelu": lambda: transformers.LlamaConfig(**SIZES, hidden_act="gelu", attention_bias=True, head_dim=12),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, **NO_DROPOUT),
    "gpt2-gelu": lambda: transformers.GPT2Config(**GPT2, **NO_DROPOUT, activation_function="gelu"),
}
if hasattr(transformers, "Qwen3Config"):  # since 4.51
    CONFIGS["qwen3"] = lambda: transformers.Qwen3Config(**SIZES, head_dim=16)

EXPERTS = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-gelu": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=1, hidden_act="gelu", sliding_window=5
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=3, clip_qkv=1.5, pad_token_id=0, eos_token_id=0
    ),
    "olmoe-normalised": lambda: transformers.OlmoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=6, norm_topk_prob=True, pad_token_id=0, eos_token_id=0
    ),
}
if hasattr(transformers, "Qwen3MoeConfig"):  # since 4.51
    QWEN3_MOE = SIZES | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
    EXPERTS["qwen3_moe"] = lambda: transformers.Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=True)
    EXPERTS["qwen3_moe-dense"] = lambda: transformers.Qwen3MoeConfig(**QWEN3_MOE, mlp_only_layers=[0])
CONFIGS |= EXPERTS
# One family of each kind of layer.
kinds = pytest.mark.parametrize("family", ["llama", "gpt2"] if OLD else ["llama", "gpt2", "mixtral"])


def model_of(family, **config):
    torch.manual_seed(0)
    made = CONFIGS[family]()
    given = ("attn_implementation", "experts_implementation")
    implementations = {name: config.pop(name) for name in given if name in config}
    made.update(config)
    return transformers.AutoModelForCausalLM.from_config(made, **implementations).train()


def with_drawn_vectors(model):
    """Norms and biases are ones and zeros otherwise."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def batch(padded=False, seed=1):
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    given = {"input_ids": ids, "labels": labels}
    if padded:
        mask = torch.ones_like(ids)
        mask[1, 14:] = 0
        given |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    return given


def step(model, run=None, **given):
    """(outputs, gradients by parameter) of one step; stock has none of indexers and of biases of routers.

    ``run``: What is called in the place of ``model``, with its parameters: compiled, or a replica.
    """
    model.zero_grad()
    outputs = (model if run is None else run)(**given)
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def saved_and_loaded(made):
    buffer = io.BytesIO()
    torch.save(made, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def assert_same(got, expected, tolerance=1e-5):
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * scale)


def assert_same_step(got, expected):
    assert_same(got[0].loss, expected[0].loss)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert_same(got[1][name], gradient)


def fully_sharded_steps(rank, family, drop_in):
    """Losses and gradient norms of three steps of FSDP2, each rank with a batch of its own."""
    model = model_of(family, num_local_experts=8)  # Mixtral's
    if drop_in:
        huggingface.apply(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.transformer.h if family == "gpt2" else model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, results = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


def tensor_parallel_step(rank, drop_in, sharded_loss):
    """Loss and whole gradients of a Llama under torch's tensor and sequence parallelism, and what ``apply`` counted."""
    model = model_of("llama", vocab_size=64)
    if drop_in:
        huggingface.apply(model, skip_logits=False)
    whole, rows = Replicate(), Shard(1)
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=rows, use_local_output=False)
    head = ColwiseParallel(
        input_layouts=rows, output_layouts=Shard(-1) if sharded_loss else whole, use_local_output=not sharded_loss
    )
    gathered = {"input_kwarg_layouts": {"hidden_states": rows}, "desired_input_kwarg_layouts": {"hidden_states": whole}}
    layer = {
        "*layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(**gathered),
        "self_attn.[qkv]_proj": column,
        "self_attn.o_proj": row,
        "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
        "mlp.gate_proj": column,
        "mlp.up_proj": column,
        "mlp.down_proj": row,
    }
    tokens = RowwiseParallel(input_layouts=whole, output_layouts=rows, use_local_output=False)
    plan = {"model.embed_tokens": tokens, "model.norm": SequenceParallel(), "lm_head": head}
    plan |= {f"model.layers.*.{name}": style for name, style in layer.items()}
    parallelize_module(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), plan)
    with loss_parallel() if sharded_loss else contextlib.nullcontext():
        loss = model(**batch(), use_cache=False).loss
        loss.backward()
    found = {"loss": loss} | {name: p.grad for name, p in model.named_parameters()}
    found = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}
    return {name: t.detach() for name, t in found.items()}, str(huggingface.applied(model))
