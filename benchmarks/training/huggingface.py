"""A training step of Transformers' models with and without ``parallel_ops.integrations.huggingface``.

    python -m benchmarks huggingface [--model llama] [--dtype bfloat16] [--batch 1] [--rounds 9] [--compiled]
        [--liger] [--large]

Random models of 4 layers with hidden size 512, 8 heads of 64 and a vocabulary of 16,384; 512 tokens with labels,
forward and backward, dropout as in the model's default configuration. Mixtral has 8 experts of width 1,408, 2 a token,
Qwen3-MoE 64 of width 256, 8 a token; "eager experts" is their loop over experts, stock their default, torch's grouped
matmul. With --large, for GPUs, 4 layers of Llama 3.2 1B:
hidden size 2,048, 32 heads and 8 key heads of 64, a vocabulary of 128,256, 4,096 tokens a sequence. Stock is what
``from_pretrained`` gives: eager mode with SDPA. Variants take turns in each round, so a slow spell of the machine falls
on all alike. Peak memory is that of tensors beyond the parameters, their gradients included.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Annotated, Any, cast

import torch
import typer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, PreTrainedModel, Qwen3MoeConfig

from benchmarks.harness import options
from benchmarks.harness.memory import peak_bytes
from benchmarks.harness.timing import HostTimer, Rounds, take_turns
from benchmarks.training import liger as ligers
from benchmarks.training.patches import Patch
from parallel_ops._internal.command_line import fail
from parallel_ops.integrations import huggingface

_LENGTH, _VOCAB = 512, 16_384
_DTYPES = ("float32", "bfloat16")
_GPT2: dict[str, Any] = {"vocab_size": _VOCAB, "n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": _LENGTH}
_LLAMA: dict[str, Any] = {
    "vocab_size": _VOCAB, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 1_408, "max_position_embeddings": _LENGTH,
}  # fmt: skip
_QWEN3_MOE: dict[str, Any] = {
    **_LLAMA, "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256,
}  # fmt: skip
_CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": functools.partial(LlamaConfig, **_LLAMA),
    "gpt2": functools.partial(GPT2Config, **_GPT2),
    "mixtral": functools.partial(MixtralConfig, **_LLAMA, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": functools.partial(Qwen3MoeConfig, **_QWEN3_MOE),
}
_MIXTURES = ("mixtral", "qwen3_moe")

_LARGE_LENGTH, _LARGE_VOCAB = 4_096, 128_256
_LARGE_LLAMA: dict[str, Any] = {
    "vocab_size": _LARGE_VOCAB, "hidden_size": 2_048, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8_192, "max_position_embeddings": _LARGE_LENGTH,
    "tie_word_embeddings": True,
}  # fmt: skip


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="llama, gpt2, mixtral or qwen3_moe; the first two by default.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bfloat16 or float32; both by default.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of 512 tokens.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of which the median is shown.")] = 9,
    compiled: Annotated[bool, typer.Option("--compiled", help="Also torch.compile of stock and of ours.")] = False,
    liger: Annotated[bool, typer.Option("--liger", help="Also Liger's patch, on a GPU, of what it knows.")] = False,
    large: Annotated[bool, typer.Option("--large", help="A Llama with the sizes of a 1B model's layers.")] = False,
) -> None:
    """Step time and peak memory of each variant, and stock's time over its."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    missing = ligers.unavailable(device, "liger_kernel.transformers") if liger else None
    columns = ("model", "dtype", "variant", "ms", "quartiles", "faster", "tokens/s", "peak MiB")
    table = options.table(*columns, left=("dtype", "variant"), caption=missing)
    length = _LARGE_LENGTH if large else _LENGTH
    options.check("model", model, _CONFIGS)
    options.check("dtype", dtype, _DTYPES)
    if large and set(model or ["llama"]) != {"llama"}:
        fail("--large is a Llama; leave --model out")
    for family in model or (["llama"] if large else ["llama", "gpt2"]):
        for name in dtype or _DTYPES:
            steps = _variants(family, options.DTYPES[name], batch, device, compiled, liger and not missing, large)
            peaks = {variant: peak_bytes(step, device) / 2**20 for variant, step in steps.items()}
            stats = take_turns(steps, HostTimer(device), Rounds(rounds))
            for variant, s in stats.items():
                table.add_row(
                    family, name, variant, *options.milliseconds(s), f"{stats['stock'].median / s.median:.2f}x",
                    f"{batch * length / s.median:,.0f}", f"{peaks[variant]:.0f}",
                )  # fmt: skip
    options.console().print(table)


app = options.single(main)


def _variants(
    family: str, dtype: torch.dtype, batch: int, device: torch.device, compiled: bool, liger: bool, large: bool
) -> dict[str, Callable[[], None]]:
    """A step of each; every model has the same weights."""
    make = functools.partial(_model, family, dtype, device, large)
    models = {"stock": make("sdpa"), "parallel_ops": make("sdpa")}
    if not large:  # eager attention keeps all scores
        models["eager"] = make("eager")
    if family in _MIXTURES:
        models["eager experts"] = make("sdpa", "eager")
    huggingface.apply(models["parallel_ops"])
    if compiled:
        models |= {
            f"{name}, compiled": cast(PreTrainedModel, torch.compile(models[name]))
            for name in ("stock", "parallel_ops")
        }
    size = (_LARGE_VOCAB, (batch, _LARGE_LENGTH)) if large else (_VOCAB, (batch, _LENGTH))
    tokens = torch.randint(*size, device=device, generator=torch.Generator(device).manual_seed(1))
    steps: dict[str, Callable[[], None]] = {
        name: functools.partial(_step, model, tokens) for name, model in models.items()
    }
    if liger and ligers.knows(models["stock"]):
        patched = make("sdpa")
        steps["liger"] = functools.partial(_step, patched, tokens, ligers.patch_model(patched))
    return steps


def _model(
    family: str, dtype: torch.dtype, device: torch.device, large: bool, attention: str, experts: str | None = None
) -> PreTrainedModel:
    torch.manual_seed(0)
    chosen = {"attn_implementation": attention} | ({"experts_implementation": experts} if experts else {})
    config = LlamaConfig(**_LARGE_LLAMA) if large else _CONFIGS[family]()
    model: Any = AutoModelForCausalLM.from_config(config, **chosen)
    return cast(PreTrainedModel, model.to(device, dtype).train())


def _step(model: PreTrainedModel, tokens: torch.Tensor, patch: Patch | None = None) -> None:
    model.zero_grad()
    with patch or contextlib.nullcontext():
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    if tokens.is_cuda:
        torch.cuda.synchronize()
