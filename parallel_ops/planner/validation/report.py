"""The error table of published rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure beside the planner's.

    Attributes:
        source, table, name: where the row is from.
        quantity, unit: what is compared.
        published, predicted: in ``unit``.
        role: ``"held out"`` (measured, not used for the fit), ``"fitted"`` (measured and used) or ``"computed"`` (by
            the authors, from a formula).
        parts: of a predicted memory: parameters, gradients, optimizer, activations, logits, buffers, ``runtime`` where
            it is measured too.
    """

    source: str
    table: str
    name: str
    quantity: str
    unit: str
    published: float
    predicted: float
    role: str
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """``predicted / published - 1``."""
        return self.predicted / self.published - 1


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A bound on the planner's errors: ``value`` is at most ``limit``."""

    name: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        """Whether the promise holds."""
        return self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The errors of one quantity in one table.

    Attributes:
        rows, fitted: number of rows, and of those used for the fit.
        mean, bias: mean of the absolute and of the signed relative errors.
        largest: the relative error furthest from 0.
    """

    source: str
    table: str
    quantity: str
    rows: int
    fitted: int
    mean: float
    bias: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Errors with constants that were fitted without one table of step times.

    Attributes:
        table, rows: the table, and its number of rows.
        mean, bias: mean of its absolute and of its signed relative errors.
        others: change of the mean error of the other tables, on average.
        most, most_moved: change of the mean error of the other table that moves most, and that table.
    """

    table: str
    rows: int
    mean: float
    bias: float
    others: float
    most: float
    most_moved: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """All compared rows, the promises about their errors, and the errors of tables that were left out of the fit."""

    rows: tuple[Row, ...]
    promises: tuple[Promise, ...]
    left_out: tuple[LeftOut, ...] = ()

    def summaries(self) -> tuple[Summary, ...]:
        """One summary per quantity and table."""
        tables: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            tables.setdefault((row.source, row.table, row.quantity), []).append(row)
        return tuple(
            Summary(
                source=source,
                table=table,
                quantity=quantity,
                rows=len(rows),
                fitted=sum(row.role == "fitted" for row in rows),
                mean=mean_error(tuple(rows)),
                bias=bias(tuple(rows)),
                largest=max((row.error for row in rows), key=abs),
            )
            for (source, table, quantity), rows in tables.items()
        )

    def select(self, quantity: str) -> tuple[Row, ...]:
        """The rows of a quantity."""
        return tuple(row for row in self.rows if row.quantity == quantity)


def mean_error(rows: tuple[Row, ...]) -> float:
    """Mean of the absolute relative errors."""
    return sum(abs(row.error) for row in rows) / len(rows)


def bias(rows: tuple[Row, ...]) -> float:
    """Mean of the relative errors."""
    return sum(row.error for row in rows) / len(rows)
