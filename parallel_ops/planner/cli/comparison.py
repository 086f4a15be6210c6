"""Sentences about plans beside the first one of a search."""

from parallel_ops.planner.results import GIB, Estimate
from parallel_ops.planner.search.losses import loss
from parallel_ops.planner.search.result import SearchResult

# Smallest share of the step time that is worth a word.
MATTERS = 0.005


def tied(result: SearchResult, ties: int) -> str:
    """A sentence about ties; empty if there are none."""
    if ties < 2:
        return ""
    simplest = result.simplest.plan.describe()
    return f"The {ties} plans marked = are ties within this error: time them, or take the simplest, {simplest}."


# Causes of time whose name in ``Loss.parts`` says too little.
CAUSES = {"exposed": "exposed communication"}


def why(first: Estimate, other: Estimate) -> str:
    """The largest causes for which a plan takes other time than the first, and what memory keeps it from."""
    found = loss(first, other)
    parts = [part for part in found.parts.items() if abs(part[1]) >= MATTERS * first.step]
    parts.sort(key=lambda part: -abs(part[1]))
    said = [f"{CAUSES.get(name, name)} {each / first.step:+.1%}" for name, each in parts[:3]]
    if found.excess:
        name = "recompute" if found.recompute != other.plan.recompute else "offload"
        said.append(f"{name} {getattr(found, name)} lacks {least(found.excess / GIB, 1)} GiB")
    return ", ".join(said)


def beside(result: SearchResult) -> list[str]:
    """Sentences about ``SearchResult.own``, ``plain`` and ``published``."""
    first, lines = result.best, []
    if result.own:
        less = 1 - result.own.step / first.step
        lines.append(
            f"parallel-ops train alone runs {result.own.plan.describe()}: {less:.1%} less time than the first."
        )
    if result.plain:
        lines.append(f"Data parallelism alone, {_compared(first, result.plain)}.")
    if recipe := result.recipe:
        sizes = [f"{name}{getattr(recipe, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(recipe, name) > 1]
        named = f"Published ({recipe.run}): {', '.join(sizes) or 'data parallelism alone'}"
        if recipe.divides(first.plan):
            lines.append(f"{named}, as the first.")
        elif result.published is None:
            lines.append(f"{named}: no such plan runs here.")
        elif result.plain is None or result.published.plan != result.plain.plan:
            lines.append(f"{named}. Here the fastest such plan, {_compared(first, result.published)}.")
    return lines


def _compared(first: Estimate, other: Estimate) -> str:
    more, limit = other.step / first.step - 1, ", and only just fits" if other.tight else ""
    compared = f"{abs(more):.1%} {'more' if more >= 0 else 'less'} time than the first"
    causes = why(first, other)
    return f"{other.plan.describe()}, takes {compared}{limit}{': ' if causes else ''}{causes}"


def close(result: SearchResult) -> list[Estimate]:
    """Plans that are faster than the first but only just fit."""
    return [found for found in result.plans if found.tight and found.step < result.best.step]


def least(value: float, digits: int) -> str:
    """A positive number; ``<0.1`` where it would be rounded to zero."""
    text = f"{value:,.{digits}f}"
    return text if float(text.replace(",", "")) else f"<{10**-digits:.{digits}f}"
