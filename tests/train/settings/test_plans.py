"""Random settings: what ``Settings`` accept trains as one process does; all else is a ValueError of theirs."""

from support import plans
from support import trainer as runs


def test_any_settings_train_as_one_process(tmp_path, pytestconfig):
    """Four steps on a plan, and the last two of them again from its checkpoint on another plan."""
    data, count = runs.data_file(tmp_path), pytestconfig.getoption("plans")
    found, refused, trained = [], 0, 0
    for number in range(count or DEFAULT):
        case = plans.Case(number, data, tmp_path / str(number), most=8 if count else 4)
        refused, trained = refused + len(case.refused), trained + len(case.plans)
        if problems := case.problems():
            found.append("\n".join([case.text, *problems]))
    assert not found, "\n\n".join(found)
    # Neither is a search that finds nothing.
    assert refused > trained / 4 and trained > refused / 8


DEFAULT = 2
