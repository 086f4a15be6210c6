"""``python -m benchmarks.gpu_session.gains [FEATURE...]``: the gains of experimental features on this GPU.

    remembered_launches   the host's and the GPU's time of an eager forward and backward of two layers
    staged_norm           ``rms_norm``, forward and backward, of rows of 16,384 columns in bfloat16
    expert_kernels        ``route``, ``sort_by_expert``, ``permute`` and ``unpermute`` of 8,192 tokens
    sum_partials          the sum of eight ranks' parts, 64 MiB each

``docs/design/triton_kernels.md`` says which gain each needs to stay.
"""

import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness.timing import HostTimer, Rounds, device_timer, take_turns
from parallel_ops import permute, rms_norm, route, sort_by_expert, unpermute
from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.triton_kernels import experimental

# Largest ratio of the time with a feature to that without at which it stays.
WANTED = {"remembered_launches": 0.95, "staged_norm": 0.97, "expert_kernels": 1.0, "sum_partials": 1.0}


def _layers(device: torch.device, scale: int) -> Callable[[], object]:
    config = TransformerConfig(
        vocab_size=4096, seq_length=512 // scale, num_layers=2, hidden_size=1024 // scale, num_heads=8, norm="rms_norm",
        activation="swiglu", positions="rotary", bias=False,
    )  # fmt: skip
    model = Transformer(config).to(device, torch.bfloat16)
    tokens = torch.zeros(512 // scale, 2, dtype=torch.int64, device=device)
    return lambda: model(tokens, tokens).backward()


def _norm(device: torch.device, scale: int) -> Callable[[], object]:
    x = torch.randn(8192 // scale, 16384, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(16384, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.ones_like(x)
    return lambda: torch.autograd.backward([rms_norm(x, weight)], [grad])


def _experts(device: torch.device, scale: int) -> Callable[[], object]:
    logits = torch.randn(8192 // scale, 64, device=device, requires_grad=True)
    x = torch.randn(8192 // scale, 2048, device=device, dtype=torch.bfloat16).requires_grad_()

    def call() -> None:
        routing = route(logits, 8)
        order = sort_by_expert(routing.experts, 64)
        unpermute(permute(x, order), order, routing.weights).sum().backward()

    return call


def _parts(device: torch.device, scale: int) -> Callable[[], object]:
    parts = torch.randn(8, 4096 // scale, 8192, device=device, dtype=torch.bfloat16)
    return lambda: sum_partials(parts)


CASES = {"remembered_launches": _layers, "staged_norm": _norm, "expert_kernels": _experts, "sum_partials": _parts}


def ratio(feature: str, device: torch.device, scale: int = 1, rounds: int = 20) -> float:
    """The median time of a case with the feature, as a share of that without."""
    call = CASES[feature](device, scale)

    def with_feature() -> None:
        with experimental.enabled(feature):
            call()

    # The host's time counts where launches are meant to cost less of it.
    on_host = device.type == "cpu" or feature == "remembered_launches"
    timer = HostTimer(device) if on_host else device_timer(device, repeat=2)
    stats = take_turns({"with": with_feature, "without": call}, timer, Rounds(rounds))
    return stats["with"].median / stats["without"].median


def main(features: Sequence[str] = (), device: str = "cuda", scale: int = 1, rounds: int = 20) -> int:
    for feature in features or WANTED:
        found, wanted = ratio(feature, torch.device(device), scale, rounds), WANTED[feature]
        verdict = "stays" if found <= wanted else "goes"
        print(
            f"{feature:20} takes {found:.3f} of the time without, at most {wanted:.2f} is wanted: {verdict}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
