"""A model of your own on tensor-parallel layers, trained to count on, modulo 97, in steps of 1 to 4.

torchrun --nproc-per-node 2 examples/tensor_parallel.py     # or 4: they share 4 heads; gloo on CPUs, NCCL on GPUs
python examples/tensor_parallel.py                          # one process: the same model, the same losses
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from parallel_ops import ParallelMesh, vocab_parallel_linear_cross_entropy
from parallel_ops.layers import Norm, ParallelTransformerLayer, VocabParallelEmbedding

VOCAB, LENGTH, BATCH, HIDDEN = 97, 32, 16, 64


class Model(nn.Module):
    """Tokens [s, b] to the mean loss; each rank holds its part of every weight and its part of the sequence."""

    def __init__(self, mesh):
        super().__init__()
        parallel = {"tp_mesh": mesh, "sequence_parallel": True}
        self.tokens = VocabParallelEmbedding(VOCAB, HIDDEN, init_method=lambda w: w.normal_(std=0.1), **parallel)
        self.layers = nn.Sequential(*(ParallelTransformerLayer(HIDDEN, 4, dropout=0.1, **parallel) for _ in range(2)))
        self.norm = Norm(HIDDEN, **parallel)

    def forward(self, tokens, targets):
        x = self.layers(self.tokens(tokens))
        group, weight = self.tokens.group, self.tokens.local_weight()
        over = {"group": group, "sequence_parallel": group is not None}
        return vocab_parallel_linear_cross_entropy(self.norm(x), weight, targets, **over)


def main():
    world, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device("cuda", rank) if torch.cuda.device_count() >= world else torch.device("cpu")
    if world > 1:  # otherwise every mesh is None
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = ParallelMesh(tp=world)["tp"]
    torch.manual_seed(0)  # on every rank alike: weights, batches and dropout are those of one process
    model = Model(mesh).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(int(os.environ.get("STEPS", "100"))):
        start, stride = torch.randint(VOCAB, (BATCH,)), torch.randint(1, 5, (BATCH,))
        sequence = ((start + stride * torch.arange(LENGTH + 1)[:, None]) % VOCAB).to(device)
        loss = model(sequence[:-1], sequence[1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19 and rank == 0:
            print(f"step {step + 1:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
