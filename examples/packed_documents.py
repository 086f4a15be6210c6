"""Trains a small Llama on packed documents that the ranks share, in one layout after another; prints area, bytes and
time of each.

torchrun --nproc-per-node 4 examples/packed_documents.py --layout balanced zigzag    # gloo on CPUs, NCCL on GPUs
"""

import argparse
import math
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from parallel_ops import ParallelMesh
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.ops.attention import document_ranges

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layout", nargs="+", default=["balanced", "zigzag", "contiguous"], metavar="LAYOUT")
parser.add_argument("--length", type=int, default=16384, help="tokens of a step, packed")
parser.add_argument(
    "--median", type=float, default=500.0, help="tokens of a document; log-normal lengths with sigma 1.5"
)
parser.add_argument("--steps", type=int, default=6)
options = parser.parse_args()


def packed(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, targets, positions and starts of documents. A document counts up in steps of its own, modulo 251."""
    generator = torch.Generator().manual_seed(seed)
    edges = [0]
    while edges[-1] < options.length:
        size = math.exp(math.log(options.median) + 1.5 * float(torch.randn((), generator=generator)))
        edges.append(min(options.length, edges[-1] + max(2, round(size))))
    cu_seqlens = torch.tensor(edges, dtype=torch.int32)
    sizes = cu_seqlens.diff()
    start, stride = torch.randint(1, 251, (2, len(sizes)), generator=generator).repeat_interleave(sizes, dim=1)
    positions = torch.arange(options.length) - cu_seqlens[:-1].repeat_interleave(sizes)
    tokens = (start + stride * positions) % 251
    targets = tokens.roll(-1)
    targets[cu_seqlens[1:] - 1] = -100  # the next token is another document's
    return tokens[:, None], targets[:, None], positions, cu_seqlens


dist.init_process_group()
mesh = ParallelMesh(cp=dist.get_world_size())
device = torch.device(mesh.root.device_type)
config = TransformerConfig(
    vocab_size=256, seq_length=options.length, num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2,
    ffn_hidden_size=384, activation="swiglu", norm="rms_norm", positions="rotary", bias=False,
)  # fmt: skip
say = print if dist.get_rank() == 0 else lambda *_: None
say(f"{'layout':11} {'loss':>15} {'area':>5} {'MiB sent':>9} {'ms/step':>8}   largest rank; area over the mean")
for cp_layout in options.layout:
    torch.manual_seed(0)
    model = Transformer(config, cp_mesh=mesh["cp"], cp_layout=cp_layout, algorithm="ring", device=device)
    for block in (*model.layers.values(), model):
        fully_shard(block, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, seconds, areas, sent = [], [], [], []
    for step in range(options.steps):
        tokens, targets, positions, cu_seqlens = packed(step)  # the same on every rank, which takes its tokens of it
        layout = model.sequence_layout(options.length, cu_seqlens)
        mask = document_ranges(cu_seqlens)
        areas.append(max(layout.area(mask)) * layout.ranks / sum(layout.area(mask)))
        if cp_layout != "striped":
            rows = max(sum(to) for to in layout.rows_sent(mask))
            sent.append(rows * config.num_layers * 2 * 2 * 32 * 4 / 2**20)  # k and v, 2 heads of 32, fp32
        inputs = [t.to(device) for t in (tokens, targets, positions, cu_seqlens)]
        dist.barrier()
        before = time.perf_counter()
        loss = model(*inputs[:2], positions=inputs[2], cu_seqlens=inputs[3], layout=layout)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        dist.barrier()
        seconds.append(time.perf_counter() - before)
    mean_sent = f"{statistics.mean(sent):9.2f}" if sent else f"{'-':>9}"
    trained = f"{losses[0]:.4f} to {losses[-1]:.4f}"
    time_of_step = 1e3 * statistics.median(seconds)
    say(f"{cp_layout:11} {trained:>15} {statistics.mean(areas):5.2f} {mean_sent} {time_of_step:8.0f}")
dist.destroy_process_group()
