"""Megatron-core's GPT on this package's ops: the same losses and gradient norms, with one line changed.

python examples/megatron_drop_in.py                        # one process
torchrun --nproc-per-node 2 examples/megatron_drop_in.py   # in parallel: tensor, sequence, context, pipeline; or gloo

Needs megatron-core (0.16 to 0.19), and neither Apex nor Transformer Engine. On GPUs it prints time and memory too.
"""

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from parallel_ops.integrations import megatron

VOCAB, LENGTH, BATCH, MICRO_BATCHES = 512, 64, 2, 2
LAYOUTS = {
    "TP 1": {},
    "TP 2": {"tensor_model_parallel_size": 2},
    "TP 2 + SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "CP 2": {"context_parallel_size": 2},
    "PP 2": {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
}


def train(layout, steps, drop_in, device):
    """Loss and gradient norm of each step, seconds a step and bytes of GPU memory."""
    config = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=4, init_method_std=0.1, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=True, bias_dropout_fusion=True, **layout,
    )  # fmt: skip
    sizes = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(*sizes, context_parallel_size=config.context_parallel_size)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    spec = megatron.gpt_block_spec(config) if drop_in else get_gpt_layer_local_spec()
    model = GPTModel(config, spec, VOCAB, LENGTH, **ends).to(device)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    batches = torch.Generator().manual_seed(0)
    rows, seconds = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        start = torch.randint(VOCAB, (MICRO_BATCHES, BATCH, 1), generator=batches)
        tokens = ((start + 3 * torch.arange(LENGTH + 1)) % VOCAB).to(device)
        started = time.perf_counter()
        model.zero_grad_buffer()
        results = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(tokens), model=[model], num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH // config.context_parallel_size, micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        # Of the ranks with the last stage, each has the loss of its tokens.
        loss = torch.tensor([sum(r["loss"].item() for r in results), len(results)], device=device, dtype=torch.float64)
        squares = gradient_squares(model)
        dist.all_reduce(loss)
        dist.all_reduce(squares)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.02 * parameter.main_grad)
        rows.append(((loss[0] / loss[1]).item(), squares.sqrt().item()))
        seconds.append(time.perf_counter() - started)
    parallel_state.destroy_model_parallel()
    return rows, sorted(seconds)[steps // 2], torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def forward_step(batches, model):
    tokens = next(batches)
    rank, ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    here = torch.arange(LENGTH, device=tokens.device)
    if ranks > 1:  # zigzag: the first and the last of what is left, so that causal attention costs ranks the same
        chunks = here.chunk(2 * ranks)
        here = torch.cat((chunks[rank], chunks[-1 - rank]))
    output = model(tokens[:, here], here.expand(BATCH, -1), None, labels=tokens[:, here + 1])
    # Megatron multiplies a loss by the number of context-parallel ranks.
    return output, lambda loss: (loss.mean() / ranks, {"loss": loss.detach().mean()})


def gradient_squares(model):
    """Each parameter counted once: ranks that share a batch, and both ends of a pipeline, share some or all of them."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    mine = [
        p.main_grad.double().square().sum()
        for p in model.parameters()
        if (first or getattr(p, "tensor_model_parallel", False)) and not getattr(p, "shared", False)
    ]
    return torch.stack(mine).sum() / parallel_state.get_data_parallel_world_size(with_context_parallel=True)


def main():
    world, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    layouts = [name for name in LAYOUTS if ("2" in name) == (world == 2)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", choices=layouts, default=layouts)
    options = parser.parse_args()
    gpu = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    store = {} if world > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", **store)
    if gpu:
        torch.cuda.set_device(device)
    with contextlib.nullcontext() if gpu else megatron.on_cpu():
        for name in options.layouts:
            compare(name, options.steps, device, rank)
    dist.destroy_process_group()


def compare(name, steps, device, rank):
    # Megatron's own norms refuse sequence parallelism without Apex, so these are replaced for "stock" too. Its core of
    # attention has no context parallelism without Transformer Engine, so "stock" has whole sequences there.
    stock_layout = {} if name == "CP 2" else LAYOUTS[name]
    with torch.compiler.set_stance("default" if device.type == "cuda" else "force_eager"):
        with megatron.apply(["norm"]):
            stock, *of_stock = train(stock_layout, steps, False, device)
        with megatron.apply():
            ours, *of_ours = train(LAYOUTS[name], steps, True, device)
    if rank:
        return
    print(f"{name:10}  {'loss':>9} {'replaced':>9}   {'grad norm':>9} {'replaced':>9}")
    for step, (a, b) in enumerate(zip(stock, ours, strict=True), 1):
        print(f"   step {step:2d}  {a[0]:9.6f} {b[0]:9.6f}   {a[1]:9.6f} {b[1]:9.6f}")
    if device.type == "cuda":
        for what, (seconds, memory) in (("stock", of_stock), ("replaced", of_ours)):
            print(f"   {what}: {1e3 * seconds:.1f} ms a step, {memory / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
