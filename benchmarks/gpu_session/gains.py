"""``python -m benchmarks.gpu_session.gains [FEATURE...]``: the gains of experimental features on this GPU.

    expert_kernels   ``route``, ``sort_by_expert``, ``permute`` and ``unpermute`` of 8,192 tokens
    sum_partials     the sum of eight ranks' parts, 64 MiB each

``docs/design/triton_kernels.md`` says which gain each needs to stay.
"""

import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness.timing import HostTimer, Rounds, device_timer, take_turns
from parallel_ops import permute, route, sort_by_expert, unpermute
from parallel_ops.comm.sum_partials import sum_partials
from parallel_ops.triton_kernels import experimental

# Largest ratio of the time with a feature to that without at which it stays.
WANTED = {"expert_kernels": 1.0, "sum_partials": 1.0}


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


CASES = {"expert_kernels": _experts, "sum_partials": _parts}


def ratio(feature: str, device: torch.device, scale: int = 1, rounds: int = 20) -> float:
    """The median time of a case with the feature, as a share of that without."""
    call = CASES[feature](device, scale)

    def with_feature() -> None:
        with experimental.enabled(feature):
            call()

    timer = HostTimer(device) if device.type == "cpu" else device_timer(device, repeat=2)
    stats = take_turns({"with": with_feature, "without": call}, timer, Rounds(rounds))
    return stats["with"].median / stats["without"].median


def main(features: Sequence[str] = (), device: str = "cuda", scale: int = 1, rounds: int = 20) -> int:
    if unknown := sorted(set(features) - set(WANTED)):
        print(f"error: unknown feature {unknown[0]!r}; choose from {', '.join(WANTED)}", file=sys.stderr)
        return 2
    for feature in features or WANTED:
        found, wanted = ratio(feature, torch.device(device), scale, rounds), WANTED[feature]
        verdict = "stays" if found <= wanted else "goes"
        print(
            f"{feature:15} takes {found:.3f} of the time without, at most {wanted:.2f} is wanted: {verdict}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
