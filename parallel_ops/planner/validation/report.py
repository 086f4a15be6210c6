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
class Target:
    """What the planner promises: ``value`` is at most ``limit``."""

    name: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows and the promises about them."""

    rows: tuple[Row, ...]
    targets: tuple[Target, ...]

    def select(self, quantity: str, *roles: str) -> tuple[Row, ...]:
        """The rows of a quantity, of all roles where none is given."""
        return tuple(row for row in self.rows if row.quantity == quantity and (not roles or row.role in roles))


def mean_error(rows: tuple[Row, ...]) -> float:
    """Mean of the absolute relative errors."""
    return sum(abs(row.error) for row in rows) / len(rows)


def largest_error(rows: tuple[Row, ...]) -> float:
    """Largest absolute relative error."""
    return max(abs(row.error) for row in rows)
