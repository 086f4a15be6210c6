"""A step of a Llama whose sequence the ranks share; prints the memory that each needs for it.

torchrun --nproc-per-node 4 examples/long_context.py 8192 32768         # gloo on CPUs, NCCL on GPUs
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from parallel_ops import ParallelMesh
from parallel_ops.models import Transformer, TransformerConfig


def peak(device: torch.device) -> int:
    """The most memory held so far, in bytes: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


dist.init_process_group()
mesh = ParallelMesh(cp=dist.get_world_size())
torch.manual_seed(0)
device = torch.device(mesh.root.device_type)
before = peak(device)
for length in sorted(int(argument) for argument in sys.argv[1:] or ["8192"]):
    config = TransformerConfig(
        vocab_size=256, seq_length=length, num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2,
        ffn_hidden_size=384, activation="swiglu", norm="rms_norm", positions="rotary", bias=False,
    )  # fmt: skip
    model = Transformer(config, cp_mesh=mesh["cp"], device=device)
    for block in (*model.layers.values(), model):
        fully_shard(block, mesh=mesh["fsdp"])
    text = torch.randint(256, (length + 1, 1), device=device)  # the same on every rank, which takes its tokens of it
    loss = model(text[:-1], text[1:])
    loss.backward()
    used = torch.tensor((peak(device) - before) / 2**20)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{length:7,d} tokens over {mesh.size('cp')} ranks: loss {loss.item():.4f}, {used:,.0f} MiB a rank")
dist.destroy_process_group()
