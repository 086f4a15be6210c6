"""Settings: what a file may say, what it may not and how that is said, and the plan in them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parallel_ops.models import Llama3Scaling, YarnScaling
from parallel_ops.planner import Plan, presets
from parallel_ops.planner.export import export
from parallel_ops.train.config import json_schema
from parallel_ops.train.config_file import read_settings, settings_of, with_changes
from parallel_ops.train.launch.cli import settings_for
from parallel_ops.train.planner_model import planner_model
from parallel_ops.train.settings import renamed
from parallel_ops.train.step.optimizer import learning_rate

SMALL = {
    "model": {"vocab_size": 64, "seq_length": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 4},
    "data": {"paths": ["tokens.bin"]},
    "parallel": {"dp": 2, "tp": 2, "zero": 3, "global_batch": 8},
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "[model]\nvocab_size = 64\nseq_length = 32\nnum_layers = 2\nhidden_size = 32\nnum_heads = 4\n"
        "window = [8, 'none']\n"
        "[data]\npaths = ['tokens.bin']\n[parallel]\ndp = 2\ntp = 2\nglobal_batch = 8\n"
        "[optimizer]\ngrad_clip = 'none'\n"
    )
    return path


def test_a_file_and_changes_to_it(file):
    settings = read_settings(file, ["parallel.zero=3", "run.steps=7", "checkpoint.dir=runs/a", "optimizer.lr=1"])
    assert settings.plan == Plan(dp=2, tp=2, zero=3, global_batch=8, fused_loss=True)
    assert settings.config.windows == (8, None) and settings.optimizer.grad_clip is None
    assert (settings.run.steps, settings.optimizer.lr, str(settings.checkpoint.dir)) == (7, 1.0, "runs/a")
    assert (settings.plan.zero, settings.plan.dtype, settings.seq_length) == (3, "bf16", 32)


def test_partial_sums_are_added_in_fp32_unless_set(file):
    assert read_settings(file).model.grad_reduce == "fp32"
    assert read_settings(file, ["model.grad_reduce=backend"]).model.grad_reduce == "backend"


def test_tables_of_the_model(file):
    """A table that may be one of several kinds is told by its keys."""
    text = file.read_text()
    for table, want in (
        ("low_frequency = 1.0\nhigh_frequency = 4.0", Llama3Scaling(
            factor=8.0, original_length=16, low_frequency=1.0, high_frequency=4.0)),
        ("truncate = false", YarnScaling(factor=8.0, original_length=16, truncate=False)),
    ):  # fmt: skip
        shape = f"positions = 'rotary'\n[model.rotary_scaling]\nfactor = 8.0\noriginal_length = 16\n{table}\n"
        file.write_text(text.replace("window = [8, 'none']\n", shape))
        settings = read_settings(file)
        assert settings.config.rotary_scaling == want
        assert type(settings).model_validate(settings.model_dump(exclude_unset=True)).config == settings.config
    file.write_text(text.replace("window = [8, 'none']\n", shape + "beta = 2\n"))
    with pytest.raises(ValueError, match="unexpected keyword argument 'beta'"):
        read_settings(file)


def test_the_plan_in_one_line_and_fields_that_other_sections_have(file):
    settings = read_settings(file, ["parallel=dp=4,dp_replicate=2,zero=2,global_batch=8,dtype=fp32,recompute=full"])
    assert (settings.precision.dtype, settings.recompute.kind) == ("fp32", "full")
    assert settings.plan == Plan.parse(settings.plan.text)
    assert (settings.plan.dp_shard, settings.plan.recompute) == (2, "full")
    with pytest.raises(ValueError, match=r"precision\.dtype is 'bf16', but parallel\.dtype is 'fp32'"):
        settings_of({**SMALL, "parallel": {"dtype": "fp32"}, "precision": {"dtype": "bf16"}})
    # A plan's float8 is that of matmuls.
    for change in ("parallel=dtype=fp8_blockwise", "parallel.dtype=fp8_blockwise"):
        with pytest.raises(ValueError, match=r"precision\.linears needs sizes of linears that 128 divides"):
            read_settings(file, [change, "precision.fp8_bf16_layers=0"])
    with pytest.raises(ValueError, match=r"precision\.linears is 'bf16', but parallel\.dtype is 'mxfp8'"):
        settings_of({**SMALL, "parallel": {"dtype": "mxfp8"}, "precision": {"linears": "bf16"}})


@pytest.mark.parametrize(
    "plan",
    [
        {"parallel": "dp=2,global_batch=2,dtype=fp16,recompute=full"},
        {"parallel": {"dp": 2, "global_batch": 2, "dtype": "mxfp8", "recompute": "full"}},
        {"parallel": {"dp": 2, "global_batch": 2}, "precision": {"dtype": "fp16"}, "recompute": {"kind": "full"}},
    ],
    ids=["line", "table", "sections"],
)
def test_what_the_command_line_sets_goes_before_the_file_wherever_it_is_there(plan):
    keys = ["parallel.dtype=fp32", "parallel.recompute=selective"]
    own = ["precision.linears=bf16", "precision.dtype=fp32", "recompute.kind=selective"]
    for changes in (
        keys,
        own,
        ["parallel.zero=2", *keys],
        ["parallel=dp=2,global_batch=2,dtype=fp32,recompute=selective"],
    ):
        found = settings_of(with_changes({**SMALL, **plan}, changes))
        assert (found.precision.dtype, found.precision.float8, found.recompute.kind) == ("fp32", {}, "selective")
        assert found.plan.dp == 2
    with pytest.raises(ValueError, match=r"precision\.dtype is 'bf16', but parallel\.dtype is 'fp32'"):
        with_changes({**SMALL, "parallel": {"dtype": "fp32"}, "precision": {"dtype": "bf16"}}, ["parallel.tp=2"])


def test_a_pipeline_sends_the_input_gradient_first(file):
    assert read_settings(file, ["parallel.pp=2"]).plan.input_grad_first
    assert not read_settings(file, ["parallel.pp=1"]).plan.input_grad_first
    assert not read_settings(file, ["parallel.pp=2", "run.compile=true"]).plan.input_grad_first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.step=3", "unknown key run.step; nearest: steps"),
        ("runn.steps=3", "unknown key runn; nearest: run"),
        ("parallel.tq=3", "unknown key parallel.tq; nearest: tp"),
        ("parallel=dp=2,tq=1", "unknown field of parallel 'tq'; nearest: tp"),
        ("parallel.tp='2'", "parallel.tp: input should be a valid integer, got '2'"),
        ("parallel=pp=2,input_grad_first=false", "input_grad_first must be true with pp=2"),
        ("parallel.overlap=false", "parallel.overlap must be True"),
        ("parallel.offload=optimizer", "offload needs zero of 1 or more"),
        ("parallel=tp=2,zero=1,offload=optimizer", r"parallel.offload needs dp_shard \* cp of 2 or more"),
        ("parallel.fsdp=false", "parallel.fsdp must be True, got False: its shards are FSDP2's"),
        ("parallel.recompute=operators", "recompute.kind: input should be 'none', 'selective', 'full' or 'experts'"),
        ("precision.dtype=fp8", "precision.dtype: input should be 'bf16', 'fp32' or 'fp16'"),
        ("optimizer.lr=fast", "optimizer.lr: input should be a valid number, got 'fast'"),
        ("optimizer.schedule=wsd", "optimizer.decay must be at least 1 for the schedule wsd, got 0"),
        ("optimizer.warmup=1001", "optimizer.warmup 1001 is more than run.steps 1000: lower it, or raise run.steps"),
        ("run.steps=true", "run.steps: input should be a valid integer, got True"),
        ("model.grad_reduce=exact", "model.grad_reduce: input should be 'fp32' or 'backend', got 'exact'"),
        ("model.reduction=exact", 'model.reduction is now model.grad_reduce: grad_reduce = "fp32"'),
        (
            "model.num_layers=1180591620717411303424",
            r"num_layers \+ prediction_layers must be at most 10,000, got 1,180",
        ),
        ("model.prediction_layers=100000", r"num_layers \+ prediction_layers must be at most 10,000, got 100,00"),
        ("data.eos_id=65535", r"data\.eos_id must be below the vocabulary's \d+, got 65535"),
        ("model.dir=nowhere", "model.dir has the shape of the model: leave out hidden_size, num_heads"),
        ("model.dropout=none", "run.toml: model.dropout must not be 'none': give a value, or leave it out"),
        ("data.paths=README.md", r"data\.paths: must be a list: paths = \[\"README\.md\"\]$"),
        ("optimizer.betas=0.9", r"optimizer\.betas: must be a list: betas = \[0\.9\]"),
        ("checkpoint.interval=5", "checkpoint.dir is needed with checkpoint.interval"),
        ("run.seed=7\noptimizer.lr=1", r"run.seed: input should be a valid integer, got '7\\noptimizer.lr=1'"),
        ("data.paths=[]", r"data\.paths: .* at least 1 item"),
        ("data.sources=[{paths=['a'],wait=1.0}]", r"unknown key data\.sources\.0\.wait; nearest: weight"),
        ("data.sources=[{paths=['a'],weight=0.0}]", r"data\.sources\.0\.weight: .* greater than 0, got 0\.0"),
        ("data.sources=a", r"data\.sources: must be a list"),
        ("optimizer.groups=[{lr_ratio=1.0}]", r"optimizer\.groups\.0\.match is missing"),
        ("optimizer.groups=[{match='a',rate=1.0}]", r"unknown key optimizer\.groups\.0\.rate; nearest: lr_ratio$"),
        ("optimizer.groups=[{match='a',lr_ratio=-1.0}]", r"optimizer\.groups\.0\.lr_ratio: .* greater than or"),
        ("run=3", "--set takes section.key=value, got 'run=3'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(file, change, message):
    with pytest.raises(ValueError, match=message) as raised:
        read_settings(file, [change])
    assert "\n" not in str(raised.value)


class TestPaths:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("RUNS", "a/b")
        monkeypatch.delenv("NOTHING", raising=False)
        (tmp_path / "one.bin").write_bytes(b"")
        (tmp_path / "two.bin").write_bytes(b"")

    @pytest.mark.parametrize("key", ["checkpoint.dir", "logging.jsonl", "logging.plot", "logging.tensorboard"])
    def test_of_one_file_or_folder(self, file, tmp_path, key):
        section, name = key.split(".")
        for given, want in (("~/runs", "runs"), ("$HOME/${RUNS}", "a/b"), ("~/one.*", "one.bin"), ("~/x[1]", "x[1]")):
            assert getattr(getattr(read_settings(file, [f"{key}={given}"]), section), name) == tmp_path / want
        for given, message in (
            ("", "'' is an empty path"),
            ("$NOTHING/x", r"\$NOTHING/x: the variable \$NOTHING is not set"),
            ("~/*.bin", "must name one path, and matches 2 paths: .*one.bin, "),
            ("~/runs*", "must name one path, and matches nothing"),
            ("~nobody-here/x", "there is no user 'nobody-here'"),
        ):
            with pytest.raises(ValueError, match=rf"{section}\.{name} .*{message}"):
                read_settings(file, [f"{key}={given}"])

    def test_of_data(self, file, tmp_path):
        found = read_settings(file, ['data.paths=["~/*.bin", "$RUNS"]', 'evaluation.paths=["${HOME}/one.bin"]'])
        assert found.data.paths == (tmp_path / "*.bin", Path("a/b"))
        assert found.evaluation.paths == (tmp_path / "one.bin",)
        sources = 'data.sources=[{paths=["~/one.bin"], weight=1.0}]'
        assert read_settings(file, ["data.paths=none", sources]).data.sources[0].paths == (tmp_path / "one.bin",)

    def test_lists_that_are_left_out(self, file):
        with pytest.raises(ValueError, match=r"data\.paths is missing"):
            read_settings(file, ["data.paths=none"])
        found = read_settings(file, ["evaluation.paths=none", "model.freeze=none", "optimizer.groups=none"])
        assert (found.evaluation.paths, found.model.freeze, found.optimizer.groups) == ((), (), ())

    def test_a_byte_order_mark(self, file, tmp_path):
        marked = tmp_path / "marked.toml"
        marked.write_bytes(b"\xef\xbb\xbf" + Path(file).read_bytes().replace(b"\n", b"\r\n"))
        assert read_settings(marked) == read_settings(file)


def test_a_schedule_longer_than_the_run(file):
    changes = ["optimizer.schedule=wsd", "optimizer.decay=60", "optimizer.warmup=40"]
    assert read_settings(file, [*changes, "run.steps=100"]).optimizer.decay == 60
    message = r"optimizer\.warmup 40 plus optimizer\.decay 60 is more than run\.steps 99: low"
    with pytest.raises(ValueError, match=message):
        read_settings(file, [*changes, "run.steps=99"])


@pytest.mark.parametrize(
    ("kind", "more"), [("linear", {}), ("dynamic", {"original_length": 16}), ("yarn", {"original_length": 16})]
)
def test_kinds_of_rotary_scaling(kind, more):
    model = {**SMALL["model"], "positions": "rotary", "rotary_scaling": {"kind": kind, "factor": 2.0, **more}}
    scaling = settings_of({**SMALL, "model": model}).config.rotary_scaling
    assert type(scaling).__name__ == f"{kind.title()}Scaling" and scaling.factor == 2.0
    model["rotary_scaling"] = {"kind": "longrope", "factor": 2.0}
    with pytest.raises(ValueError, match="kind must be one of 'linear', 'yarn', 'llama3', 'dynamic', got 'longrope'"):
        settings_of({**SMALL, "model": model})


@pytest.mark.parametrize(
    ("changes", "steps", "schedule"),
    [
        (["optimizer.warmup=500"], 2, 1000),  # that of the file, whose warm-up is longer
        (["optimizer.schedule=wsd", "optimizer.decay=60", "optimizer.warmup=40", "run.steps=100"], 3, 100),
        (["optimizer.schedule_steps=5000"], 2, 5000),
        (["optimizer.schedule_steps=none"], 2, 1000),
        (["run.steps=10"], 30, 30),
        (["run.steps=10"], 10, 10),
    ],
)
def test_fewer_steps_are_the_first_of_the_schedule(file, changes, steps, schedule):
    settings = settings_for(file, changes, None, None, steps=steps)
    assert (settings.run.steps, settings.schedule_steps) == (steps, schedule)
    shorter = settings_for(file, changes, None, None, steps=1)
    assert learning_rate(settings.optimizer, settings.schedule_steps, 0) == pytest.approx(
        learning_rate(shorter.optimizer, schedule, 0)
    )


def test_every_wrong_key_is_named_at_once(file):
    with pytest.raises(ValueError, match=r"steps.*lr.*unknown key precision.dtpye; nearest: dtype"):
        read_settings(file, ["run.steps=0", "optimizer.lr=-1", "precision.dtpye=fp32"])


def test_a_file_that_is_no_toml(tmp_path):
    (tmp_path / "run.toml").write_text("[run")
    with pytest.raises(ValueError, match=r"run\.toml is not TOML"):
        read_settings(tmp_path / "run.toml")


def test_the_example_and_the_schema_agree():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    example = Path(__file__).parents[3] / "examples/train.toml"
    assert read_settings(example).plan.gpus == 4
    schema = json.loads(json_schema())
    for section, keys in tomllib.loads(example.read_text()).items():
        known = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
        assert set(keys) <= set(known["properties"]), section


@pytest.mark.parametrize(("model", "changes"), [("llama3-8b", {"prediction_layers": 1}), ("gpt3-175b", {})])
def test_what_the_planner_writes_is_a_run(model, changes):
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    plan = Plan(dp=2, tp=8, zero=3, sequence_parallel=True, global_batch=16, recompute="full", fused_loss=True)
    shape = replace(presets.model(model), **changes)
    data = tomllib.loads(export("parallel_ops", shape, presets.cluster("h100x16"), plan))
    settings = settings_of(with_changes(data, ["run.steps=1"]))  # a trial of the plan
    assert settings.plan == plan
    assert np.iinfo(settings.data.dtype).max >= shape.vocab_size - 1
    assert planner_model(settings.config, settings.seq_length, shape.name) == shape


@pytest.mark.parametrize("by", ["file", "change"])
def test_a_key_with_another_name_is_an_error_with_the_new_one(file, monkeypatch, by):
    monkeypatch.setitem(renamed.KEYS, "run.iterations", "run.steps")
    monkeypatch.setitem(renamed.VALUES, "run.steps", {"all": 1000})
    assert renamed.current({"run": {"iterations": "all", "seed": 1}}) == {"run": {"steps": 1000, "seed": 1}}
    for given, value in (("7", "7"), ("'all'", "1000"), ("'7'", '"7"')):
        if by == "file":
            file.write_text(f"{file.read_text()}[run]\niterations = {given}\n")
        with pytest.raises(ValueError, match=f"run.iterations is now run.steps: steps = {value}$"):
            read_settings(file, [] if by == "file" else [f"run.iterations={given}"])
        file.write_text(file.read_text().partition("[run]")[0])
