"""The configuration of this package's trainer: TOML whose ``parallel`` section has the fields of ``Plan``.

``Plan(**parallel)`` is the plan again; fields at their default are left out.
"""

import json
from collections.abc import Iterator
from dataclasses import fields

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.export.target import Target
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan


def _problems(model: Model, cluster: Cluster, plan: Plan) -> Iterator[str]:
    if model.experts or model.latent:
        yield "it has neither experts nor latent attention"


def _write(model: Model, cluster: Cluster, plan: Plan) -> str:
    changed = {f.name: getattr(plan, f.name) for f in fields(Plan) if getattr(plan, f.name) != f.default}
    sections = {"model": {"name": model.name, "sequence": model.sequence}, "parallel": changed}
    # Strings, numbers, booleans and lists are written the same in TOML and in JSON.
    blocks = (
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())])
        for name, section in sections.items()
    )
    return "\n\n".join(blocks) + "\n"


TRAINER = Target(
    name="parallel_ops",
    write=_write,
    limits={
        "pp": ((1,), "its trainer has no pipeline yet: pp=1"),
        "ep": ((1,), "its trainer has no expert parallelism yet: ep=1"),
        "dtype": (("bf16", "fp16", "fp32"), "its trainer runs bf16, fp16 and fp32"),
        "offload": (("none", "optimizer"), "its trainer offloads the optimizer"),
        "recompute": (("none", "selective", "full"), "it recomputes layers, or norms and activation functions"),
        "optimizer_barrier": ((True,), "its trainer waits for the gradient norm of all ranks"),
    },
    problems=_problems,
)
