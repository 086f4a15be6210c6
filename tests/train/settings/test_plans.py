"""Random settings: what ``Settings`` accept trains as one process does; all else is a ValueError of theirs."""

import pytest

pytest.importorskip("spmd_types")

import spmd_types
from types_over_ranks import steps

from support.planning import plans
from support.runs import trainer as runs


def test_any_settings_train_as_one_process(tmp_path, pytestconfig):
    """Four steps on a plan, and the last two of them again from its checkpoint on another plan."""
    data, count = runs.data_file(tmp_path), pytestconfig.getoption("plans")
    found, refused, trained = [], 0, 0
    for number in range(count or DEFAULT):
        case = plans.Case(number, data, tmp_path / str(number), most=8 if count else 4)
        refused, trained = refused + len(case.refused), trained + len(case.plans)
        if problems := [*types_of(case), *case.problems()]:
            found.append("\n".join([case.text, *problems]))
    assert not found, "\n\n".join(found)
    # Neither is a search that finds nothing.
    assert refused > trained / 4 and trained > refused / 8


def types_of(case):
    """What is replicated, partial or sharded where an op needs it otherwise, without running the ranks."""
    for _, settings in case.plans:
        if settings.plan.gpus > 1:
            try:
                steps.check(settings, case.number % settings.plan.gpus)
            except (spmd_types.SpmdTypeError, AssertionError) as error:
                yield f"{settings.plan.text}: {error}"


DEFAULT = 2
