"""Tables of errors against published runs and a user's own."""

from collections.abc import Sequence

from rich.table import Table

from parallel_ops.planner.cli.json_data import own_runs_data
from parallel_ops.planner.cli.tables import new_table
from parallel_ops.planner.compute.software import fitted_constants
from parallel_ops.planner.validation import Report
from parallel_ops.planner.validation.measurement import Measurement


def summaries(report: Report) -> Table:
    """The errors of each quantity of each published table."""
    title = "Errors against published tables: positive is too slow, or too much"
    out = new_table(title, "*table", "quantity", ">rows", ">fitted", ">mean", ">bias", ">largest")
    for found in report.summaries():
        errors = f"{found.mean:.1%}", f"{found.bias:+.1%}", f"{found.largest:+.1%}"
        out.add_row(
            f"{found.source.partition(':')[0].partition(',')[0]}: {found.table}",
            found.quantity,
            str(found.rows),
            str(found.fitted),
            *errors,
        )
    return out


def own_runs(rows: Sequence[Measurement]) -> Table:
    """Measured and predicted seconds of a step, for runs of a user's own."""
    title = "Seconds of a step: positive errors are too slow"
    out = new_table(title, "*run", ">measured", ">planner", ">error", ">±")
    for row in own_runs_data(rows):
        seconds, found = row["measured"], row["predicted"]
        figures = f"{seconds:.4g}", f"{found:.4g}", f"{found / seconds - 1:+.1%}", f"{row['band']:.0%}"
        out.add_row(f"{row['table']}: {row['run']}", *figures)
    return out


def left_out(report: Report) -> Table:
    """The errors of each table of step times with constants that were fitted without it."""
    title = "Step times of each table, fitted without it, and what that changes for the other tables"
    out = new_table(title, "*table", ">rows", ">mean", ">bias", ">others", ">most moved", ">")
    for found in report.left_out:
        others = f"{found.others:+.1%}", f"{found.most:+.1%}", found.most_moved
        out.add_row(found.table, str(found.rows), f"{found.mean:.1%}", f"{found.bias:+.1%}", *others)
    return out


def constants() -> Table:
    """The fitted constants of software, their values in fits that leave out one table each, and their tables."""
    title = "Fitted constants of software, and their range when any one table is left out"
    out = new_table(title, "<constant", ">value", ">range", "*tables that carry it")
    for found in fitted_constants():
        few = f" (range: ± {found.half_width:.0%} on its estimates)" if found.half_width else ""
        span = f"{found.low:.4g} to {found.high:.4g}"
        out.add_row(found.name, f"{found.value:.4g}", span, f"{len(found.tables)}: {', '.join(found.tables)}{few}")
    return out


def errors(report: Report) -> list[Table]:
    """Every row, one table per published table: published and predicted figures."""
    parts: dict[str, Table] = {}
    for row in report.rows:
        title = f"{row.source}, {row.table}"
        if title not in parts:
            parts[title] = out = new_table(title)
            out.add_column("", ratio=1)
            out.add_column("quantity", width=18)
            for name in ("published", "planner", "error", "role"):
                out.add_column(name, justify="right", no_wrap=True, width=8 if name == "error" else 9)
        quantity = f"{row.quantity}, {row.unit}" if row.unit else row.quantity
        figures = f"{row.published:.4g}", f"{row.predicted:.4g}", f"{row.error:+.1%}"
        of = ", ".join(f"{name} {value:.2f}" for name, value in row.parts.items() if value)
        parts[title].add_row(f"{row.name}: {of}" if of else row.name, quantity, *figures, row.role)
    return list(parts.values())


def promises(report: Report) -> Table:
    """The promises, and whether each holds."""
    out = new_table("Promises", "*", ">found", ">at most", ">")
    for promise in report.promises:
        verdict = "holds" if promise.met else "does not hold"
        out.add_row(promise.name, f"{promise.value:.4g}", f"{promise.limit:.4g}", verdict)
    return out
