"""Ranks that would train different runs raise one error, which names the keys, before a mesh or a model is built."""

import json
import sys
import typing
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from parallel_ops.comm.errors import named
from parallel_ops.train.config import Settings
from parallel_ops.train.config_file import read_settings
from parallel_ops.train.launch.consistency import FREE, Comparison, Disagreement, difference, values_of
from support.ranks import processes
from support.ranks.distributed import Raised, ranks
from support.runs import trainer as runs

KEYS = [
    f"{name}.{key}"
    for name, section in Settings.model_fields.items()
    for key in (typing.get_args(section.annotation) or (section.annotation,))[0].model_fields
]  # fmt: skip


def outcomes(all_values, seconds=20.0, absent=()):
    """What each rank, here a thread, raises as it compares its values; an exception in their place is raised before."""
    store, size = HashStore(), len(all_values)

    def compare(rank):
        try:
            with Comparison(store, rank, size, seconds) as comparison:
                if isinstance(all_values[rank], Exception):
                    raise all_values[rank]
                comparison(all_values[rank])
        except Exception as error:
            return error

    there = [rank for rank in range(size) if rank not in absent]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(compare, there))


def test_every_key_of_the_settings_is_compared(folder):
    """But for those that may differ: a key that is added is compared, unless it says that it may."""
    values = values_of(read_settings(folder / "run.toml"))
    free = {key for key in KEYS if key in FREE or key.partition(".")[0] in FREE}
    assert set(KEYS) - free <= set(values) and not free & set(values)
    assert {"parallel_ops", "torch"} <= set(values)
    assert outcomes([values] * 3) == [None] * 3
    for key in set(values):
        found = outcomes([values, {**values, key: "another"}, values])
        assert {type(error) for error in found} == {Disagreement}
        wanted = (
            f'the ranks have different settings: {key} is {json.dumps(values[key])} on ranks 0, 2, "another" on rank 1'
        )
        assert {str(error) for error in found} == {wanted}


def test_settings_that_mean_the_same_are_the_same(folder):
    plain = values_of(read_settings(folder / "run.toml"))
    spelled = ["data.seq_length=32", "model.norm=layer_norm", "optimizer.betas=[0.9, 0.95]", "run.timeout=300"]
    free = ["logging.interval=7", "logging.jsonl=other.jsonl", f"data.paths=['{folder / 'tokens.bin'}']"]
    assert difference({0: plain, 1: values_of(read_settings(folder / "run.toml", [*spelled, *free]))}) == ""


def test_a_rank_that_fails_or_does_not_come_is_named():
    missing = FileNotFoundError(2, "No such file or directory", "tokens.bin")
    for failing in range(3):
        given = [{"a": 1}, {"a": 1}, {"a": 1}]
        given[failing] = missing
        found = outcomes(given)
        assert found[failing] is missing
        others = {str(error) for rank, error in enumerate(found) if rank != failing}
        assert others == {f"rank {failing}: FileNotFoundError: {missing}"}
    assert {str(e) for e in outcomes([{}] * 4, 0.3, absent=(1, 3))} == {"ranks 1, 3 of 4 did not come within 0.3 s"}


def test_ranks_and_many_keys_in_words():
    assert [named(given) for given in ((3,), (0, 1, 2, 5), (4, 2))] == ["rank 3", "ranks 0-2, 5", "ranks 2, 4"]
    many = difference({0: dict.fromkeys("abcdefghij", 0), 1: {}})
    assert many.startswith("the ranks have different settings: a is 0 on rank 0, missing on rank 1; ")
    assert many.endswith("h is 0 on rank 0, missing on rank 1; and 2 more")


@pytest.mark.runs
def test_ranks_as_they_are_launched(folder):
    """Two processes with the environment that torchrun gives: each case was silent, a hang or an abort elsewhere."""
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    one = ["run.toml", "--set", "run.device=cpu", "--set", "checkpoint.dir=none"]
    cases = {
        "learning rate": ([*one], [*one, "--set", "optimizer.lr=0.1"]),
        "steps and batch": ([*one, "--set", "parallel.global_batch=8"], [*one, "--steps", "9"]),
        "width": ([*one, "--set", "model.ffn_hidden_size=64"], [*one]),
        "plan": ([*one], [*one, "--set", "parallel=tp=2,global_batch=4"]),
        "ranks": ([*one], [*one, "--set", "parallel=dp=4,global_batch=4"]),
        "key": ([*one, "--set", "run.stepz=3"], [*one]),
        "file": ([*one], [*one, "--set", "data.paths=['nothing.bin']"]),
        "checkpoint": (["run.toml", "--resume"], ["run.toml", "--resume", "--set", "checkpoint.dir=elsewhere"]),
    }
    wanted = {
        "learning rate": "optimizer.lr is 0.0003 on rank 0, 0.1 on rank 1",
        "steps and batch": "run.steps is 400 on rank 0, 9 on rank 1; optimizer.schedule_steps is null on rank 0, "
        "400 on rank 1; parallel.global_batch is 8 on rank 0, 4 on rank 1",
        "width": "model.ffn_hidden_size is 64 on rank 0, null on rank 1",
        "plan": "parallel.dp is 2 on rank 0, 1 on rank 1; parallel.tp is 1 on rank 0, 2 on rank 1; parallel.zero is 3",
        "ranks": "dp=4 * cp=1 * tp=1 is 4 ranks, but there are 2",
        "key": "unknown key run.stepz; nearest: steps",
        "file": "nothing.bin",
        "checkpoint": "run.json: No such file or directory",
    }
    (folder / "cases.json").write_text(json.dumps([[processes.free_port(), both] for both in cases.values()]))
    driver = [sys.executable, "-m", "support.ranks.disagreement", "cases.json"]
    path = {"PYTHONPATH": ":".join(sys.path)}
    logs = [folder / f"rank-{rank}" for rank in range(2)]
    started = [processes.start(folder, logs[rank], *driver, str(rank), **path) for rank in range(2)]
    try:
        assert [process.wait(300) for process in started] == [0, 0], logs[0].read_text() + logs[1].read_text()
    finally:
        for process in started:
            process.kill()
    found = [json.loads(log.read_text().splitlines()[-1]) for log in logs]
    for name, *ends in zip(cases, *found, strict=True):
        for end in ends:
            assert end["code"] == 2 and wanted[name] in end["said"], (name, ends)
            assert end["said"].splitlines()[-1].startswith("error: ") and "Traceback" not in end["said"], (name, ends)
            assert not end["group"] and end["seconds"] < 60, (name, ends)


def test_trainers_compare_too(folder):
    """Without a launcher: the default process group's store."""
    data = folder / "tokens.bin"
    (folder / "short.bin").write_bytes(data.read_bytes()[:8000])
    two = {"parallel": {"dp": 2, "global_batch": 4}}
    base = runs.settings_of(data, **two)
    cases = {
        "run.seed is 3 on rank 0, 4 on rank 1": runs.settings_of(data, **two, run={"seed": 4}),
        "optimizer.grad_clip is 0.5 on rank 0, null on rank 1": runs.settings_of(
            data, **two, optimizer={"grad_clip": None}
        ),
        "model.norm_eps is 1e-05 on rank 0, 0.001 on rank 1": runs.settings_of(
            data, **two, model={**runs.MODELS["gpt"], "norm_eps": 1e-3}
        ),
        "data.tokens is 6000 on rank 0, 4000 on rank 1": runs.settings_of(folder / "short.bin", **two),
    }
    for wanted, other in cases.items():
        for outcome in ranks(2).outcomes(runs.steps_of_each, [base, other]):
            assert isinstance(outcome, Raised) and outcome.type == "Disagreement" and wanted in outcome.message
    both = ranks(2).outcomes(runs.steps_of_each, [base, runs.settings_of(folder / "none.bin", **two)])
    assert "rank 1: FileNotFoundError" in both[0].message and both[1].type == "FileNotFoundError"
    copy = folder / "copy.bin"
    copy.write_bytes(data.read_bytes())
    own, other = ranks(2).run(runs.steps_of_each, [base, runs.settings_of(copy, **two)])
    assert own == other and len(own) == 5


def test_ranks_that_would_resume_from_different_checkpoints(folder):
    two = {"parallel": {"dp": 2, "global_batch": 4}, "run": {"steps": 2}}
    saved = folder / "saved"
    checkpoint = {"dir": str(saved), "interval": 1}
    ranks(2).run(runs.train, runs.settings_of(folder / "tokens.bin", **two, checkpoint=checkpoint))
    settings = runs.settings_of(folder / "tokens.bin", **two)
    found = ranks(2).outcomes(runs.resumed_from_each, settings, [saved, saved / "step-00000001"])
    assert {outcome.type for outcome in found} == {"Disagreement"}
    wanted = 'checkpoint is "step-00000002" on rank 0, "step-00000001" on rank 1'
    assert all(wanted in outcome.message for outcome in found)
