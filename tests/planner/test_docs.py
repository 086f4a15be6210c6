"""The tables of docs/planner.md are what the code makes."""

import re

import pytest

from parallel_ops.planner import presets, search
from parallel_ops.planner.rules import RULES
from support.planner_scenarios import DOCUMENT, SCENARIOS, regenerate


@pytest.mark.parametrize("name", SCENARIOS)
def test_tables_are_up_to_date(name):
    text = DOCUMENT.read_text(encoding="utf-8")
    written = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- end -->", text, re.DOTALL)
    assert written is not None
    assert written[1] == SCENARIOS[name](), "run: cd tests && python -m support.planner_scenarios"


def test_a_table_without_a_place_is_noticed():
    with pytest.raises(ValueError, match="no place for 7b-on-8"):
        regenerate("nothing here")


def test_the_first_example_runs():
    text = DOCUMENT.read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    # A smaller search than the example's, of the same call.
    code = (
        code.replace("llama3-70b", "llama2-7b").replace("a100-80x64", "a100-80x8").replace("dp=4, tp=8, pp=2", "dp=8")
    )
    code = code.replace("sequence_parallel=True, ", "")
    names: dict[str, object] = {}
    exec(code, names)
    assert names["search"] is search
    assert names["cluster"] == presets.cluster("a100-80x8")


def test_every_rule_is_described():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)[-len(RULES) :] == list(RULES)
