"""A training step of Megatron-core's GPT with and without ``parallel_ops.integrations.megatron``.

    python -m benchmarks drop_in [--model gpt] [--dtype bfloat16] [--rounds 9] [--compiled] [--liger]
    torchrun --nproc-per-node 2 -m benchmarks drop_in [--sequence-parallel]        tensor parallel

Models of 4 layers with hidden size 512, 8 heads and a vocabulary of 16,384; 512 tokens, two sequences, forward and
backward. GPT has biases, GeLU, layer norm, learned positions and dropout of 0.1; Llama has SwiGLU, RMS
norm and rotary positions. Stock is Megatron's local spec with its fused functions as they are written, "compiled" as it
has them, by torch.compile; "sdpa" has torch's attention in the place of Megatron's. Variants take turns in each round,
so a slow spell of the machine falls on all alike. Peak memory is that of tensors beyond the parameters, their gradients
included.
"""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from benchmarks.harness import options
from benchmarks.harness.memory import peak_bytes
from benchmarks.harness.timing import HostTimer, Rounds, take_turns
from benchmarks.training import liger as ligers
from benchmarks.training.patches import Patch
from parallel_ops.integrations import megatron

_BATCH = 2
_DTYPES = ("float32", "bfloat16")
_GPT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_LLAMA: dict[str, Any] = {
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "RMSNorm", "gated_linear_unit": True,
    "activation_func": F.silu, "add_bias_linear": False, "ffn_hidden_size": 1_408,
}  # fmt: skip
_MODELS = {"gpt": _GPT, "llama": _LLAMA}


class _Sdpa(DotProductAttention):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.attention_dropout.p)
        return out.permute(2, 0, 1, 3).flatten(2)


@dataclasses.dataclass(frozen=True)
class _Step:
    model: GPTModel
    tokens: torch.Tensor
    applied: bool = False
    stance: str = "force_eager"
    patch: Patch | None = None

    def surroundings(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.compiler.set_stance(self.stance))
        if self.applied:
            stack.enter_context(megatron.apply())
        if self.patch is not None:
            stack.enter_context(self.patch)
        return stack

    def __call__(self) -> None:
        tokens = self.tokens
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(_BATCH, -1)
        self.model.zero_grad()
        self.model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
        if tokens.is_cuda:
            torch.cuda.synchronize()


def _peak(step: _Step, device: torch.device) -> float:
    """Peak memory in MiB of a step after one that fills caches."""
    with step.surroundings():
        step()
        step.model.zero_grad()
        return peak_bytes(step, device) / 2**20


def main(
    model: Annotated[list[str] | None, typer.Option(help="gpt or llama; both by default.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bfloat16 or float32; both by default.")] = None,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 512,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 512,
    vocab: Annotated[int, typer.Option(min=1, help="Entries of the vocabulary.")] = 16_384,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of which the median is shown.")] = 9,
    compiled: Annotated[bool, typer.Option("--compiled", help="Also Megatron's fusions compiled.")] = False,
    liger: Annotated[bool, typer.Option("--liger", help="Also Liger's patch of Megatron-core, on a GPU.")] = False,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="Under torchrun.")] = False,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="CPU time of the thread: on a machine in use.")] = False,
) -> None:
    """Step time and peak memory of each variant, and stock's time over its."""
    options.check("model", model, _MODELS)
    options.check("dtype", dtype, _DTYPES)
    world, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    gpu = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    alone: dict[str, Any] = (
        {} if world > 1 else {"store": torch._C._distributed_c10d.HashStore(), "rank": 0, "world_size": 1}
    )
    dist.init_process_group("nccl" if gpu else "gloo", **alone)
    if gpu:
        torch.cuda.set_device(device)
    missing = ligers.unavailable(device, "liger_kernel.megatron") if liger else None
    columns = ("model", "dtype", "variant", "ms", "quartiles", "faster", "peak MiB")
    table = options.table(*columns, left=("dtype", "variant"), caption=missing)
    clock = time.thread_time if cpu_time else time.perf_counter
    timer = HostTimer(device, clock=clock, around=_Step.surroundings)
    with contextlib.nullcontext() if gpu else megatron.on_cpu():
        parallel_state.initialize_model_parallel(world)
        for family in model or list(_MODELS):
            for name in dtype or _DTYPES:
                shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 8}
                parallel = {"tensor_model_parallel_size": world, "sequence_parallel": sequence_parallel}
                sizes = {**shape, **parallel}
                build = functools.partial(_model, family, vocab, length, options.DTYPES[name], device, sizes)
                steps = _variants(build, vocab, length, device, compiled, liger and not missing)
                peaks = {variant: _peak(step, device) for variant, step in steps.items()}
                stats = take_turns(steps, timer, Rounds(rounds))
                for variant, s in stats.items():
                    faster = f"{stats['stock'].median / s.median:.2f}x"
                    table.add_row(family, name, variant, *options.milliseconds(s), faster, f"{peaks[variant]:.0f}")
    dist.destroy_process_group()
    if rank == 0:
        options.console().print(table)


app = options.single(main)


def _variants(
    build: Callable[[str], GPTModel], vocab: int, length: int, device: torch.device, compiled: bool, liger: bool
) -> dict[str, _Step]:
    """A step of each; every model has the same weights."""
    tokens = torch.randint(vocab, (_BATCH, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    stock = build("stock")
    steps = {
        "stock": _Step(stock, tokens),
        "sdpa": _Step(build("sdpa"), tokens),
        "apply": _Step(stock, tokens, applied=True),
        "apply + spec": _Step(build("spec"), tokens, applied=True),
    }
    if compiled:
        steps["compiled"] = _Step(stock, tokens, stance="default")
    if liger:
        with ligers.patch_megatron() as patch:
            steps["liger"] = _Step(build("stock"), tokens, patch=patch)
    return steps


def _model(
    family: str, vocab: int, length: int, dtype: torch.dtype, device: torch.device, shape: dict[str, Any], kind: str
) -> GPTModel:
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    config = TransformerConfig(
        **shape, **_MODELS[family], use_cpu_initialization=True, params_dtype=dtype, bf16=dtype is torch.bfloat16,
        bias_activation_fusion=True, bias_dropout_fusion=True,
    )  # fmt: skip
    # Megatron's own norms refuse sequence parallelism without Apex.
    with megatron.apply(["norm"]) if config.sequence_parallel or kind == "spec" else contextlib.nullcontext():
        if kind == "spec":
            spec = megatron.gpt_block_spec(config)
        else:
            spec = get_gpt_layer_local_spec(normalization=config.normalization)
        if kind == "sdpa":
            spec.submodules.self_attention.submodules.core_attention = _Sdpa
        positions = "rope" if family == "llama" else "learned_absolute"
        return GPTModel(config, spec, vocab, length, position_embedding_type=positions).to(device, dtype).train()
