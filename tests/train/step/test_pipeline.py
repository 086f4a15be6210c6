"""``Trainer`` through the stages of a pipeline: the steps of one process, and what a run says of it."""

import json
from xml.etree import ElementTree

import pytest
import torch

from parallel_ops.pipeline_parallel import schedule_of
from support.ranks.distributed import ranks
from support.runs import trainer as runs

BATCH = 8
FOUR = {"num_layers": 4}


def settings_of(data, parallel, /, **sections):
    model = {**runs.MODELS[sections.pop("kind", "gpt")], **FOUR, **sections.pop("model", {})}
    return runs.settings_of(data, model=model, parallel={"global_batch": BATCH, **parallel}, **sections)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_dropout_is_that_of_one_process(data, schedule):
    options = {"model": {"dropout": 0.2, "attention_dropout": 0.1}, "run": {"steps": 3}}
    want = runs.steps_of(0, settings_of(data, {"micro_batch": 2}, **options))
    plan = {"pp": 2, "schedule": schedule, "micro_batch": 2}
    for got in ranks(2).run(runs.steps_of, settings_of(data, plan, **options)):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [{"pp": 2, "schedule": "zb-v"}, {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-h1"}])
def test_a_run_goes_on_bit_by_bit(data, tmp_path, plan):
    """With dropout and tied embeddings, on the ranks that it was on."""
    processes = 2 * plan.get("dp", 1)
    options = {"model": {"dropout": 0.1}}
    whole = ranks(processes).run(runs.steps_of, settings_of(data, plan, **options))[0]
    saving = settings_of(data, plan, checkpoint={"dir": str(tmp_path)}, **options)
    assert ranks(processes).run(runs.steps_of, saving, None, 3)[0] == whole[:3]
    assert ranks(processes).run(runs.steps_of, settings_of(data, plan, **options), tmp_path)[0] == whole[3:]


def test_what_a_run_draws(data, tmp_path):
    settings = settings_of(data, {"pp": 2, "schedule": "zb-h1"}, logging={"trace": str(tmp_path)}, run={"steps": 3})
    ranks(2).run(runs.train, settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipeline.json", "pipeline.svg"]
    events = json.loads((tmp_path / "pipeline.json").read_text())["traceEvents"]
    ran = [
        [e["name"] for e in sorted(events, key=lambda e: e.get("ts", -1)) if e["ph"] == "X" and e["tid"] == rank]
        for rank in range(2)
    ]
    # What was executed is the planner's list.
    assert ran == [[str(action) for action in order] for order in schedule_of(settings.plan)]
    text = "".join(ElementTree.parse(tmp_path / "pipeline.svg").getroot().itertext())
    assert "Step 2: zb-h1 on 2 ranks, 8 micro-batches" in text
    assert text.count("bubble") >= 2


def test_ranks_that_do_not_all_trace(data, tmp_path):
    traced = settings_of(data, {"pp": 2}, logging={"trace": str(tmp_path)})
    for outcome in ranks(2).outcomes(runs.steps_of_each, [traced, settings_of(data, {"pp": 2})]):
        assert outcome.type == "Disagreement" and "logging.trace" in outcome.message
