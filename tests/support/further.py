"""Which cases of a long test ``make test`` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], step: int = 2) -> list[Any]:
    """Each ``step``-th of some cases, from the first on, and the others for ``make test-runs``; tuples are of several
    arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.runs] * (number % step > 0))
        for number, case in enumerate(cases)
    ]
