"""``parallel-ops overlap``: how the tensor-parallel linears of a layer communicate, by the model behind ``"auto"``."""

import dataclasses
import json as to_json
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from parallel_ops._internal.overlap_model import Rates, Times, Work, candidates, choose, reason, times
from parallel_ops._internal.overlap_model import rates_of_sheet as of_sheet
from parallel_ops._internal.overlap_schedule import GATED, LANES, OFF, TAPERED, Phase
from parallel_ops.planner import presets
from parallel_ops.planner.cli.app import app

_ITEMSIZE = 2  # bf16

_REDUCTIONS = ("backend", "exact")


@dataclass(frozen=True)
class Row:
    """A linear, the ways to do it in the order of ``candidates``, and which of them ``"auto"`` takes.

    Attributes:
        work: product and communication of one rank.
        speedup: of the chosen way over ``OFF``, the collective of NCCL and the product of cuBLAS; at least 1.
    """

    name: str
    work: Work
    ways: tuple[Times, ...]
    chosen: int
    speedup: float
    reason: str


def linears(
    hidden: int,
    ffn: int,
    kv: int,
    tokens: int,
    tp: int,
    *,
    pulls: bool = False,
    puts: bool = False,
    exact: bool = False,
) -> dict[str, Work]:
    """The products whose communication ``"auto"`` may cut: of a layer's forward and backward, by name.

    Args:
        hidden, ffn, kv: widths of the layer, of the gated MLP between its linears, and of all keys.
        tokens: rows of a sequence-parallel batch on all ranks together.
        tp: ranks.
        pulls: ranks may read each other's memory (``allow_pulls``). puts: copy engines bring messages.
        exact: sums in rank order, also where nothing is cut.

    Raises:
        ValueError: ``tp`` does not divide one of the others.
    """
    for name, value in (("--hidden", hidden), ("--ffn", ffn), ("--kv", kv), ("--tokens", tokens)):
        if value % tp:
            raise ValueError(f"overlap: {name} must be a multiple of --tp {tp}, got {value}")

    def work(phase: Phase, columns: int, inner: int, *, leased: bool = True) -> Work:
        sent = (tokens - tokens // tp) * (inner if phase == "gather" else columns) * _ITEMSIZE
        return Work(phase, tokens, columns, inner, sent, tp, _ITEMSIZE, exact, not (puts and leased), pulled=pulls)

    return {
        "qkv": work("gather", (hidden + 2 * kv) // tp, hidden),
        "proj": work("scatter", hidden, hidden // tp),
        "fc1": work("gather", 2 * ffn // tp, hidden),
        "fc2": work("scatter", hidden, ffn // tp),
        # Gathered gradients stay for those of the weights, so they are not in memory that copy engines put them into.
        "proj, dx": work("gather", hidden // tp, hidden, leased=False),
        "fc2, dx": work("gather", ffn // tp, hidden, leased=False),
    }


def rates_of(gpu: str) -> Rates:
    """The model's rates of a GPU preset, linked as in the cluster preset of its name.

    Raises:
        ValueError: unknown, or its number of multiprocessors is.
    """
    sheet = presets.gpu(gpu)
    if not sheet.multiprocessors:
        raise ValueError(f"overlap: --gpu {gpu} has no known number of multiprocessors, which its waves need")
    return of_sheet(sheet.peak("bf16"), sheet.multiprocessors, presets.cluster(gpu).intra.bandwidth, sheet.bandwidth)


def rows(works: dict[str, Work], rates: Rates) -> list[Row]:
    found = []
    for name, work in works.items():
        ways, chosen = tuple(times(work, rates, way) for way in candidates(work)), choose(work, rates)
        total = {way.pieces: way.total for way in ways}
        found.append(Row(name, work, ways, chosen, total[OFF] / total[chosen], reason(work, rates)))
    return found


@app.command("overlap")
def overlap_command(
    hidden: Annotated[int, typer.Option(min=1, help="Width of the layer.")],
    tp: Annotated[int, typer.Option(min=2, help="Ranks that share the layer's weights, on one node.")],
    gpu: Annotated[str, typer.Option(help="Preset, linked as in the cluster of its name.")] = "h100",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch on all ranks together.")] = 8192,
    ffn: Annotated[
        int | None, typer.Option(min=1, help="Width of the gated MLP.", show_default="3.5 times --hidden")
    ] = None,
    kv: Annotated[
        int | None, typer.Option(min=1, help="Width of all keys.", show_default="an eighth of --hidden")
    ] = None,
    pulls: Annotated[
        bool, typer.Option("--pulls", help="Ranks may read each other's memory (allow_pulls): a gather may be gated.")
    ] = False,
    puts: Annotated[
        bool, typer.Option("--puts", help="Messages are put by copy engines (NCCL 2.29.7 and later, within a node).")
    ] = False,
    reduction: Annotated[
        str,
        typer.Option(help="backend: NCCL's reduce-scatter where nothing is cut; exact: an exchange and one kernel."),
    ] = "backend",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How the overlapped linears of a layer communicate (overlap="auto").

    Every number of the model's choice is shown. No row is slower than NCCL's collective and cuBLAS' product one after
    the other: that is what is chosen where pieces do not pay. All figures are the model's; on a GPU the first call of a
    kind measures the ways and decides.

    Example: parallel-ops overlap --hidden 8192 --tp 8 --tokens 16384
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"overlap: --reduction must be {' or '.join(_REDUCTIONS)}, got {reduction}")
    rates = rates_of(gpu)
    works = linears(
        hidden, 7 * hidden // 2 if ffn is None else ffn, hidden // 8 if kv is None else kv, tokens, tp,
        pulls=pulls, puts=puts, exact=reduction == "exact",
    )  # fmt: skip
    found = rows(works, rates)
    if json:
        print(to_json.dumps({"rates": dataclasses.asdict(rates), "linears": [dataclasses.asdict(r) for r in found]}))
        return
    console = Console(width=132)  # the widest row
    sheet, link = presets.gpu(gpu), presets.cluster(gpu).intra
    console.print(f"bf16, {tokens:,} tokens, {tp} ranks of {gpu}, reduction {reduction}\n")
    console.print(_assumptions(rates, sheet.peak("bf16"), link.name, link.bandwidth, sheet.bandwidth, pulls, puts))
    console.print(_ways(found))
    console.print(_choices(found))
    console.print(
        "dx of qkv and fc1: whole collectives beside whole products, as in Megatron-LM. No figure is measured on a GPU."
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title=title, title_justify="left")
    for number, name in enumerate(columns):
        text = number < 2 or name == "reason"
        table.add_column(name, justify="left" if text else "right", no_wrap=name != "reason")
    return table


def _assumptions(
    rates: Rates, flops: float, link: str, bandwidth: float, memory: float, pulls: bool, puts: bool
) -> Table:  # fmt: skip
    table = _table("What the model believes", "", "from", "value")
    share = rates.flops * rates.processors / flops
    lines: list[tuple[str, str, str]] = [
        (f"{rates.processors} multiprocessors", f"data sheet, {flops / 1e12:g} TFLOP/s; products reach {share:.2f}",
         f"{rates.flops / 1e12:.3f} TFLOP/s each"),
        (link, f"data sheet, {bandwidth / 1e9:g} GB/s; messages reach {rates.bandwidth / bandwidth:.2f}",
         f"{rates.bandwidth / 1e9:g} GB/s"),
        ("memory", f"data sheet, {memory / 1e9:g} GB/s; kernels reach {rates.memory_bandwidth / memory:.2f}",
         f"{rates.memory_bandwidth / 1e9:g} GB/s"),
        ("latency of a message", "assumed", f"{1e6 * rates.latency:g} us"),
        ("between two kernels", "assumed", f"{1e6 * rates.launch:g} us"),
        ("host, a product", "assumed", f"{1e6 * rates.host_product:g} us"),
        ("host, a message", "25 us measured without NCCL, 15 assumed for it", f"{1e6 * rates.host_message:g} us"),
        ("multiprocessors taken", *(("none by copy engines", "0") if puts else ("assumed", str(rates.taken)))),
    ]  # fmt: skip
    lines.append(("streams of products", "assumed: the next fills the last wave", str(LANES)))
    if pulls:
        lines.append(("rate of a gated product", "of a plain one, assumed", f"{rates.gated_share:g}"))
        lines.append(("host, a pull and its flag", "assumed", f"{1e6 * rates.host_pull:g} us"))
    for line in lines:
        table.add_row(*line)
    return table


def _ways(found: list[Row]) -> Table:
    table = _table(
        "\nEvery way, in us", "linear", "way", "products", "tiles", "waves", "each", "messages", "staging", "sum",
        "host", "total", "of plain",
    )  # fmt: skip
    for row in found:
        plain = row.ways[0].total
        for way in row.ways:
            seconds = way.product, way.communication, way.staging, way.reduction, way.host, way.total
            each, messages, staging, reduction, host, total = (f"{1e6 * s:,.0f}" for s in seconds)
            mark = " <" if way.pieces == row.chosen else ""
            counts: tuple[Any, ...] = way.products, f"{way.tiles:,}", way.waves
            table.add_row(
                row.name if way is row.ways[0] else "", _way(way.pieces), *map(str, counts), each, messages, staging,
                reduction, host, total, f"{plain / way.total:.2f}x{mark}",
            )  # fmt: skip
    return table


def _choices(found: list[Row]) -> Table:
    columns = "linear", "rows x columns x inner", "plain", "chosen", "time", "speed-up", "reason"
    table = _table("\nWhat auto takes", *columns)
    for row in found:
        work, total = row.work, {way.pieces: f"{1e6 * way.total:,.0f} us" for way in row.ways}
        table.add_row(
            row.name, f"{work.rows:,} x {work.columns:,} x {work.inner:,}", total[OFF], _way(row.chosen),
            total[row.chosen], f"{row.speedup:.2f}x", row.reason,
        )  # fmt: skip
    return table


def _way(pieces: int) -> str:
    return {OFF: "plain", TAPERED: "tapered", GATED: "gated"}.get(pieces, f"{pieces} a shard")
