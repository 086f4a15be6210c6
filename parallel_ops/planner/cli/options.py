"""Options that several commands of ``parallel-ops`` have."""

from collections.abc import Callable
from collections.abc import Sequence as PySequence
from pathlib import Path
from typing import Annotated

import typer

from parallel_ops.planner import presets
from parallel_ops.planner.compute.software import CURRENT, eras
from parallel_ops.planner.export import FORMATS, TARGETS
from parallel_ops.planner.export.launcher import LAUNCHERS


def completed(names: Callable[[], PySequence[str]]) -> Callable[[str], list[str]]:
    """Completes a value in a shell."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        help="Preset (llama3-70b; see `presets`), JSON or TOML file with the fields of Model, or config.json.",
        autocompletion=completed(presets.models),
    ),
]  # fmt: skip
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="Preset and GPUs (h100x512; h100 is one node), or JSON or TOML file with the fields of Cluster.",
        autocompletion=completed(presets.clusters),
    ),
]  # fmt: skip
Sequence = Annotated[int | None, typer.Option("--seq", help="Tokens of a sequence.", show_default="the model's")]
Documents = Annotated[
    str | None,
    typer.Option(
        "--documents",
        help="Lengths of packed documents that attention stays inside of: 1024, 512x10:8192 for ten to one, "
        "lognormal:512:2.0 (median, sigma), or a file with one length a line.",
        show_default="whole sequences",
    ),
]
Lora = Annotated[
    str | None,
    typer.Option(
        help="Rank of low-rank adapters that are trained alone: 16, or 16:nf4 with the frozen weights in 4 bits.",
        show_default="all parameters are trained",
    ),
]
Workload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        help="Fields of the workload: prediction_layers=1 (multi-token prediction), expert_imbalance=1.3 (tokens of "
        "the fullest expert over the mean), loss_fraction=0.4 (of the documents' tokens), padding=0.2 (of all tokens).",
        show_default="none",
    ),
]
Batch = Annotated[
    str, typer.Option("--batch", help="Sequences of a step (2048), or tokens with k or M for 2^10 or 2^20 (16M).")
]
PlanText = Annotated[
    str | None,
    typer.Option(
        "--plan",
        help="Fields of the plan (tp=8,pp=4,zero=1), or JSON or TOML file with them. dp takes the remaining GPUs.",
        show_default="the fastest",
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--for", help=f"Only plans that one system can run: {', '.join(TARGETS)}.",
        autocompletion=completed(lambda: list(TARGETS)),
    ),
]  # fmt: skip
Only = Annotated[
    str | None,
    typer.Option("--only", help="Values that fields of the plan may have: tp=4:8,schedule=1f1b,zero=1."),
]


WrittenFor = Annotated[
    str | None,
    typer.Option(
        "--for", help=f"System whose defaults the plan has and --output writes: {', '.join(FORMATS)}.",
        autocompletion=completed(lambda: list(FORMATS)),
    ),
]  # fmt: skip
Output = Annotated[
    Path | None,
    typer.Option(help="Write the plan for the system of --for; run.toml is for `train`, - prints it alone."),
]
SoftwareName = Annotated[
    str | None,
    typer.Option(
        "--software",
        help=f"Era of the training software, whose kernels and overlap the times are of: {', '.join(eras())}.",
        show_default=f"that of --for, or {CURRENT}", autocompletion=completed(eras),
    ),
]  # fmt: skip
Price = Annotated[float | None, typer.Option("--price", help="Price of one GPU for one hour, for the cost.")]
Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        help="Days, GPU hours, money, energy of a run: its tokens (15T), or tokens=15T,mtbf=50000 (GPU hours), "
        "checkpoint=30,restart=600 (seconds); "
        "phases=4M@4096:252M/8M:2T first takes these batches, tokens of a sequence, and tokens.",
    ),
]
Prices = Annotated[str | None, typer.Option("--prices", help="JSON or TOML file: price of an hour by GPU, kwh, pue.")]
Launcher = Annotated[
    str | None,
    typer.Option(help=f"Write a bash script that runs it: {', '.join(LAUNCHERS)}.", show_default="the config alone"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
