"""What each rank does in the tests of faults that are known from other systems."""

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.train.config import Settings
from support.parallelism.layers import whole
from support.runs import trainer as runs

_CONFIG = TransformerConfig(
    vocab_size=31, seq_length=12, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=1, head_dim=8,
    ffn_hidden_size=24, activation="swiglu", norm="rms_norm", bias=False, positions="rotary", attention_sinks=True,
    experts=ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=8, dense_layers=1, aux_loss=0.05, z_loss=0.01),
)  # fmt: skip


def _loss(seed: int, tensor: DeviceMesh | None) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a model with this seed's weights and tokens, some of which do not count."""
    torch.manual_seed(seed)
    model = Transformer(
        dataclasses.replace(_CONFIG), tp_mesh=tensor, ep_mesh=tensor, sequence_parallel=tensor is not None
    )  # fmt: skip
    tokens = torch.randint(31, (12, 2), generator=torch.Generator().manual_seed(seed))
    targets = tokens.roll(-1, 0)
    targets[: 3 + 4 * seed, 0] = -100
    loss = model(tokens, targets)
    loss.backward()
    return loss.item(), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


class TwoHeads(nn.Module):
    """Predicts the next token and, with a smaller weight, the one behind it, as multi-token prediction does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Embedding(31, 16), nn.Linear(16, 31), nn.Linear(16, 31)])

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.layers[0](tokens)
        later = targets.roll(-1, 0)
        later[15::16] = -100  # of a packed row, the last of each sequence
        losses = []
        for head, wanted in ((self.layers[1], targets), (self.layers[2], later)):
            total = F.cross_entropy(head(x).flatten(0, 1), wanted.flatten(), reduction="sum")
            losses.append(total / (targets != -100).sum().clamp(min=1))
        return losses[0] + 0.3 * losses[1]


def two_heads(rank: int, settings: Settings) -> tuple[list[tuple[float, float]], None, dict[str, Tensor]]:
    trainer = runs.trainer_of(settings, model=TwoHeads())
    steps = [trainer.step() for _ in range(3)]
    trainer.loader.close()
    weights = {name: whole(t.detach()) for name, t in trainer.model.state_dict().items()}
    return [(step.loss, step.grad_norm) for step in steps], None, weights


def both_alone() -> list[tuple[float, dict[str, Tensor]]]:
    return [_loss(seed, None) for seed in range(2)]


def on_a_sub_mesh(rank: int) -> tuple[float, dict[str, Tensor]]:
    """Ranks 0 and 1 have one model, 2 and 3 another."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("model", "tp"))
    return _loss(mesh.get_local_rank("model"), mesh["tp"])
