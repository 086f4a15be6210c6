"""The error table."""

from dataclasses import dataclass

# Measured by the authors; computed by them from a formula or from other figures; or measured and used for the fit.
ROLES = ("held out", "computed", "fitted")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure beside the planner's.

    Attributes:
        source, table, name: where it is from; ``quantity`` with its ``unit``.
        published, predicted: in that unit.
        bound: ``"at least"`` or ``"at most"`` where the authors give one end of a range; "" elsewhere.
        role: ``"held out"`` (measured, not used for the fit), ``"fitted"`` (measured and used) or ``"computed"`` (by
            the authors, from a formula).
    """

    source: str
    table: str
    name: str
    quantity: str
    unit: str
    published: float
    predicted: float
    role: str
    bound: str = ""

    @property
    def error(self) -> float:
        """``predicted / published - 1``; 0 where a bound holds."""
        error = self.predicted / self.published - 1
        holds = error >= 0 if self.bound == "at least" else self.bound == "at most" and error <= 0
        return 0.0 if holds else error


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What the planner promises: ``value`` is at most ``limit``."""

    name: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The errors of one quantity in one table: of ``rows`` rows, of which ``fitted`` were used for the fit.

    Attributes:
        mean: of the absolute relative errors. ``bias``: of the signed ones. ``largest``: the one furthest from 0.
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
class Report:
    """All rows and the promises about them."""

    rows: tuple[Row, ...]
    promises: tuple[Promise, ...]

    def summaries(self) -> tuple[Summary, ...]:
        """Of each quantity of each table."""
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

    def select(self, quantity: str, *roles: str) -> tuple[Row, ...]:
        """The rows of a quantity, of all roles where none is given."""
        return tuple(row for row in self.rows if row.quantity == quantity and (not roles or row.role in roles))


def mean_error(rows: tuple[Row, ...]) -> float:
    """Mean of the absolute relative errors."""
    return sum(abs(row.error) for row in rows) / len(rows)


def bias(rows: tuple[Row, ...]) -> float:
    """Mean of the relative errors."""
    return sum(row.error for row in rows) / len(rows)


def largest_error(rows: tuple[Row, ...]) -> float:
    """Largest absolute relative error."""
    return max(abs(row.error) for row in rows)
