"""Proofs of a GPU session, run on the CPU, and the page that says what has run."""

import os
from dataclasses import replace

import pytest

import parallel_ops.context_parallel
import parallel_ops.expert_parallel
import parallel_ops.tensor_parallel  # noqa: F401 - registers its ops
from benchmarks.gpu_session import kernels, prove, ranks, status
from benchmarks.gpu_session.paths import PATHS
from benchmarks.gpu_session.proofs import proofs
from benchmarks.harness import results
from benchmarks.harness.processes import Processes
from parallel_ops._internal.dispatch.registration import cuda_kernels
from parallel_ops.ops.attention.options import BACKENDS
from parallel_ops.planner.plan import SCHEDULES
from support.further import thinned
from support.ranks.answers import answer
from support.transports.bound_device import bound_devices


@pytest.fixture(scope="module")
def two():
    processes = Processes(2, {"PROOF": "set", "OMP_NUM_THREADS": "1"})
    yield processes
    processes.close()


def test_processes_go_on_after_what_one_of_them_did(two):
    assert two.run(answer, "variable", seconds=60) == ["set", "set"]
    assert "PROOF" not in os.environ
    for what, message in (("raise", "rank 1: ValueError: wrong on rank 1"), ("exit", "rank 0: its process is gone")):
        with pytest.raises(RuntimeError, match=f"^{message}$"):
            two.run(answer, what, seconds=60)
    two.run(answer, "variable", seconds=60)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not answer within 2 s"):
        two.run(answer, "hang", seconds=2)
    assert two.run(answer, "variable", seconds=60) == ["set", "set"]
    assert two.serve(2, {"PROOF": "set", "OMP_NUM_THREADS": "1"}) and not two.serve(2, {}) and not two.serve(4, {})


# One proof of each function over ranks.
NAMES_OF_RANKS = (
    "pipeline zb-v, 2 stages, llama, eager", "context parallelism, ring, c10d", "expert parallelism, c10d",
    "data parallelism, zero 3", "overlap symmetric", "checkpoints of a pipeline",
)  # fmt: skip


@pytest.mark.parametrize("name", thinned(NAMES_OF_RANKS[::-1]))
def test_proofs_over_ranks(two, tmp_path, name):
    proof = proofs()[name]
    two.run(proof.run, "cpu", str(tmp_path / "store"), *proof.arguments, seconds=120)


@pytest.mark.parametrize("eager", [False, True])
def test_ranks_that_share_a_gpu_bind_their_groups_to_it(eager, tmp_path, monkeypatch):
    bound = bound_devices(monkeypatch, gpus=8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for rank in range(2):
        with ranks.group(rank, 2, "cuda", str(tmp_path / "store"), eager=eager):
            pass
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert bound == [ranks.device_of("cuda")] * 2


def test_settings_of_every_proof_are_valid(tmp_path):
    functions = ranks.trains_alike, ranks.resumes, ranks.keeps_training
    trained = [proof for proof in proofs().values() if proof.run in functions]
    for proof in trained:
        model, plan, *further = proof.arguments
        sections = further[0] if further and proof.run is not ranks.keeps_training else None  # whose third is the steps
        assert ranks.settings_of("cpu", model, plan, 1, tmp_path, sections).plan.gpus == proof.processes
    assert len(trained) > 30


def test_a_wrong_loss_is_found(two, tmp_path, monkeypatch):
    proof = proofs()["data parallelism, zero 0"]
    model, plan = proof.arguments
    wrong = plan | {"micro_batch": 2, "global_batch": 4}
    with pytest.raises(RuntimeError, match=r"^rank 0: ValueError: step 1: loss [^;]*$"):
        two.run(proof.run, "cpu", str(tmp_path / "store"), model, wrong, seconds=120)


def test_rows_are_kept(tmp_path, monkeypatch, capsys):
    given = ["kernels", "--device", "cpu", "--only", "fp32 weight", "--output", str(tmp_path)]
    assert prove.main(given) == 0
    (row,) = results.read_as(prove.Proven, tmp_path / "proofs.csv")
    assert (row.proof, row.result, row.nccl) == ("fp32 weight gradients", prove.PASSED, "") and row.commit
    assert "1 of 1 proofs passed" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in kernels.PROOFS if name != "attention backends"])
def test_proofs_of_kernels(name):
    kernels.PROOFS[name](0, 1, "cpu", "")


def test_errors_of_kernels_are_found(monkeypatch):
    monkeypatch.setattr(kernels, "rms_norm", lambda x, weight: x)
    with pytest.raises(ValueError, match="turn 0, 64 rows at 0: error"):
        kernels.repeated_launches(0, 1, "cpu", "")


def test_the_page_says_what_the_rows_say():
    """``python -m benchmarks.gpu_session.status`` writes it."""
    assert status.PAGE.read_text(encoding="utf-8") == status.page()


def test_defaults_have_run_or_are_a_librarys():
    proven, measured = status.read()
    unproven = [
        path.name for path in PATHS if path.default and not path.library and not status.runs(path, proven, measured)
    ]
    assert unproven == []


def test_a_passed_row_counts_and_a_failed_one_is_shown():
    path = next(path for path in PATHS if path.name == "float8 linears")
    environment = dict.fromkeys(("driver", "torch", "triton", "version"), "") | {"threads": 1}
    rows = [
        prove.Proven(proof="float8 linear", result=result, seconds=1.0, nccl="", detail="", device=f"gpu-{result[0]}",
                     commit="abc", date="2026-12-01", **environment)
        for result in (prove.PASSED, prove.FAILED)
    ]  # fmt: skip
    assert status.runs(path, rows, []) == ["gpu p, abc, 2026-12-01"]
    assert status.runs(replace(path, since="2026-12-01"), rows, []) == []
    assert status.failures(path, rows) == ["FAILED: float8 linear (gpu f, abc, 2026-12-01)"]


def test_the_page_has_every_path_of_the_code():
    named = {op for path in PATHS for op in path.ops}
    assert named == set(cuda_kernels)
    text = " ".join(f"{path.name} {path.chosen_by}" for path in PATHS)
    assert all(f'overlap="{name}"' in text for name in ("off", "symmetric"))
    assert all(f'backend="{name}"' in text for name in BACKENDS if name != "auto")
    assert all(f"`{name}`" in text for name in SCHEDULES)
    every = proofs()
    assert all(any(proof.startswith(name) for proof in every) for path in PATHS for name in path.proofs)
    shown = tuple(name for path in PATHS for name in path.proofs)
    assert [name for name, proof in every.items() if proof.part == "kernels" and not name.startswith(shown)] == []
