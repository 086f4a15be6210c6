"""Bubbles that the paper on zero bubble schedules (arXiv:2401.10241) computed, beside the planner's."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parallel_ops.planner.schedules.schedule import Times, actions, simulate
from parallel_ops.planner.validation.measurement import table
from parallel_ops.planner.validation.report import Row

# Schedules whose bubbles are the published ones, and all.
EXACT = ("1f1b", "zb-h1", "zb-h2", "zb-1p")
BUBBLES = (*EXACT, "zb-2p", "interleaved")


def bubble_rows() -> Iterator[Row]:
    """Every published bubble beside that of the simulated schedule."""
    for row in table("zero_bubble")["table 5"]:
        times = Times(**{name: row[name] for name in ("forward", "input_grad", "weight_grad", "link")})
        sizes = next(sizes for sizes in table("zero_bubble")["table 4"] if sizes["model"] == row["model"])
        for kind, published in row["bubble"].items():
            predicted = _bubble(kind, row["pp"], row["micro_batches"], times, sizes)
            name = f"{row['model']}, {kind}, {row['micro_batches']} micro-batches"
            yield Row(
                source=table("zero_bubble")["source"],
                table="table 5",
                name=name,
                quantity="bubble",
                unit="",
                published=published,
                predicted=predicted,
                role="computed",
            )


def _bubble(kind: str, pp: int, micro_batches: int, times: Times, sizes: dict[str, Any]) -> float:
    if kind in ("zb-1p", "zb-2p"):
        # Share of a layer's activations that is kept from I to W, by the paper's table 3; the sequence is 1,024.
        retained = 32 / (34 + 5 * sizes["num_heads"] * 1024 / sizes["hidden_size"])
        limit = (1 if kind == "zb-1p" else 2) * pp
        order = actions("zb-2p", pp, micro_batches, times=times, memory_limit=limit, retained=retained)
    else:
        # Interleaved, one layer a chunk; the first and the last stage have a layer less.
        v = (sizes["num_layers"] + 2) // sizes["pp"] if kind == "interleaved" else 1
        passes = {name: getattr(times, name) / v for name in ("forward", "input_grad", "weight_grad")}
        order, times = actions(kind, pp, micro_batches, v), replace(times, **passes)
    return simulate(order, times).bubble_without_barrier
