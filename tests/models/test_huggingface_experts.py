"""Hugging Face folders of models with experts: published forms of their weights, losses and gradients."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from parallel_ops.models import Transformer, YarnScaling, config_from_pretrained
from parallel_ops.models.huggingface import tensor_files
from parallel_ops.planner import Plan
from support.integrations.huggingface import LENGTH, VOCAB
from support.integrations.huggingface_folders import (
    GPT_OSS,
    SIZES,
    YARN,
    assert_same_gradients,
    change_config,
    change_tensors,
    logits_of,
    opened,
)
from support.parallelism import expert_parallel
from support.parallelism import transformer as on_rank
from support.ranks.distributed import ranks
from support.runs.tensor_files import tensors_in


def test_a_published_gpt_oss_folder_is_read(tmp_path):
    """Its keys of an older form, and the defaults of the family where keys are missing."""
    options = {
        "model_type": "gpt_oss", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3,
        "intermediate_size": 48, "num_attention_heads": 8, "max_position_embeddings": 131072, "experts_per_token": 4,
        "num_experts_per_tok": 4, "initial_context_length": 4096, "num_local_experts": 8, "head_dim": 64,
        "output_router_logits": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(options))
    config = config_from_pretrained(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.windows == (128, None, 128)
    assert config.rotary_base == theirs.rope_parameters["rope_theta"] == 150_000.0
    assert config.rotary_scaling == YarnScaling(factor=32.0, original_length=4096, truncate=False)
    assert theirs.rope_parameters["factor"] == 32.0 and not theirs.rope_parameters["truncate"]
    assert config.experts.aux_loss == theirs.router_aux_loss_coef
    assert (config.experts.swiglu_alpha, config.experts.swiglu_limit) == (theirs.swiglu_alpha, theirs.swiglu_limit)
    assert (config.resolved_qkv_bias, config.resolved_attention_bias, config.bias) == (True, True, False)
    for changes, message in (
        ({"experts_per_token": 2}, "num_experts_per_tok 4 and experts_per_token 2, which must be equal"),
        ({"layer_types": ["full_attention"]}, r"has layer_types \['full_attention'\] for 3 layers"),
        ({"sliding_window": None}, "for 3 layers and a sliding window of None"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(options | changes))
        with pytest.raises(ValueError, match=message):
            config_from_pretrained(tmp_path)


def test_quantized_gpt_oss_is_read_after_what_its_error_says(tokens, tmp_path):
    """Blocks of 32 numbers of 4 bits with a scale: transformers makes them bfloat16, we read that."""
    torch.manual_seed(0)
    folder, other = tmp_path / "mxfp4", tmp_path / "bf16"
    sizes = SIZES | GPT_OSS | {"hidden_size": 64, "intermediate_size": 64}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, rope_parameters=dict(YARN)))
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = tensors_in(folder)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inner, outer = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 126, (experts, outer, inner // 32), dtype=torch.uint8)
    save_file(tensors, folder / tensor_files.SINGLE, metadata={"format": "pt"})
    options = json.loads((folder / tensor_files.CONFIG).read_text())
    options["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "embed_tokens", "lm_head"],
    }
    (folder / tensor_files.CONFIG).write_text(json.dumps(options))
    with pytest.raises(ValueError, match="weights quantized by mxfp4, which are not supported") as raised:
        Transformer.from_pretrained(folder)
    command = str(raised.value).rpartition("with transformers: ")[2]
    names = {name: getattr(transformers, name) for name in ("GptOssForCausalLM", "Mxfp4Config")}
    exec(command, names | {"folder": folder, "other": other})
    want = logits_of(opened(other).float(), tokens)
    torch.testing.assert_close(Transformer.from_pretrained(other).float().eval()(tokens), want, rtol=1e-4, atol=1e-4)


WITH_AUX_LOSS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
OF_EXPERTS = (*WITH_AUX_LOSS[:3], "deepseek_v3", "gpt_oss")
OTHERS = ("gpt2", "qwen2", "qwen3")
# With the auxiliary loss of the whole batch where all ranks share it. Each family takes one plan of either kind.
SHARING = ("dp=1,tp=2,sequence_parallel=true", "dp=1,cp=2,ep=2,zero=1")
APART = ("dp=4,ep=4,zero=3", "dp=2,tp=2,ep=2,zero=2")


@pytest.mark.parametrize(
    ("name", "plan", "aux"),
    [(name, plans[n % 2], plans is SHARING) for n, name in enumerate(OF_EXPERTS) for plans in (SHARING, APART)]
    + [(name, "dp=1,tp=4,sequence_parallel=true", False) for name in OTHERS],
)
def test_losses_and_gradients_are_those_of_transformers(name, plan, aux, folders, tmp_path):
    """Under Hugging Face's names: our gradients are saved as weights are."""
    factor = 0.3 if aux and name in WITH_AUX_LOSS else 0.0
    changes = {"router_aux_loss_coef": factor} if name in WITH_AUX_LOSS else {}
    if name == "gpt2":
        changes = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    folder = change_config(folders / name, tmp_path / "m", **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    model.config.output_router_logits = name in OF_EXPERTS
    model.router_aux_loss_coef = factor
    tokens, targets = torch.randint(VOCAB, (2, LENGTH, 4), generator=torch.Generator().manual_seed(2))
    result = model(tokens.t(), labels=torch.zeros_like(tokens.t()))
    loss = torch.nn.functional.cross_entropy(result.logits.flatten(0, 1), targets.t().flatten())
    loss = loss + factor * result.aux_loss if factor else loss
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(tmp_path / "want")
    text = f"{plan},global_batch=4,micro_batch={4 // int(plan[3])},dtype=fp32"
    found = ranks(Plan.parse(text).gpus).run(
        expert_parallel.folder_gradients, str(folder), text, tokens, targets, str(tmp_path / "g")
    )
    torch.testing.assert_close(torch.stack(found).mean(), loss.detach(), rtol=1e-5, atol=0)
    assert_same_gradients(tmp_path / "g", tensors_in(tmp_path / "want"))


def test_weights_in_8_bits_are_multiplied_with_their_scales(folders, tokens, tmp_path):
    """As DeepSeek-V3's files have them: matrices of the layers in blocks, of which the last are cut off."""
    source = folders / "deepseek_v3"
    stored, undone = {}, {}
    for key, t in tensors_in(source).items():
        if t.dim() == 2 and "_proj" in key:
            rows, columns = -(-t.shape[0] // 7), -(-t.shape[1] // 5)
            scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(t.numel())) + 0.5
            each = scales.repeat_interleave(7, 0).repeat_interleave(5, 1)[: t.shape[0], : t.shape[1]]
            stored[key] = (t / each).to(torch.float8_e4m3fn)
            stored[f"{key}{tensor_files.SCALE}"] = scales
            undone[key] = stored[key].float() * each
    blocks = {"quant_method": "fp8", "weight_block_size": [7, 5], "fmt": "e4m3"}
    plain = change_tensors(change_config(source, tmp_path / "plain"), undone)
    scaled = change_tensors(change_config(source, tmp_path / "scaled", quantization_config=blocks), stored)
    want = Transformer.from_pretrained(plain).eval()(tokens)
    results = ranks(4).run(on_rank.loaded, str(scaled), tokens, str(tmp_path / "again"))
    for logits in [Transformer.from_pretrained(scaled).eval()(tokens), *results[0]["logits"]]:
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)
    assert "quantization_config" not in json.loads((tmp_path / "again" / tensor_files.CONFIG).read_text())
    other = change_config(source, tmp_path / "other", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match=r"has quantization_config .*; supported is fp8 with a weight_block_size"):
        Transformer.from_pretrained(other)
