"""A GPT over two tensor-parallel ranks, each of whose layers FSDP2 shards over two more, counts on modulo 97.

torchrun --nproc-per-node 4 examples/quick_start.py         # gloo on CPUs, NCCL on GPUs
"""

import logging

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from parallel_ops import ParallelMesh
from parallel_ops.models import Transformer, TransformerConfig

# A hint of torch, on each rank, that the gradient norm takes a sum over each of two mesh dimensions.
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
dist.init_process_group()
mesh = ParallelMesh(dp_shard=2, tp=2)
torch.manual_seed(0)
config = TransformerConfig(vocab_size=97, seq_length=32, num_layers=2, hidden_size=64, num_heads=4)
model = Transformer(config, tp_mesh=mesh["tp"], sequence_parallel=True, device=mesh.root.device_type)
for block in (*model.layers.values(), model):
    fully_shard(block, mesh=mesh["fsdp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(mesh.rank("dp"))  # other data on the other replica
for step in range(40):
    start, stride = torch.randint(97, (16,)), torch.randint(1, 5, (16,))
    text = ((start + stride * torch.arange(33)[:, None]) % 97).to(mesh.root.device_type)
    loss = model(text[:-1], text[1:])  # [s, b] tokens, and those that follow
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19 and dist.get_rank() == 0:
        print(f"step {step + 1:3d}  loss {loss.item():.4f}")
dist.destroy_process_group()
