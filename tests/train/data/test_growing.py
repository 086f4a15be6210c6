"""Folders to which files are added while a run goes on."""

import numpy as np
import pytest

from parallel_ops.train.checkpoint.inspection import described, inspect
from parallel_ops.train.data.growing import Growing
from parallel_ops.train.data.tokens import TokenStream
from support.ranks.distributed import ranks
from support.runs import trainer as runs


def put(folder, name, first, count):
    folder.mkdir(exist_ok=True)
    np.save(folder / f".{name}.npy", np.arange(first, first + count, dtype="uint16"))
    (folder / f".{name}.npy").rename(folder / f"{name}.npy")


def listed(parts):
    """The files of parts without their digests."""
    return [[file[:3] for file in part] for part in parts]


def growing(*paths, **options):
    given = {"seq_length": 4, "seed": 3, "document_mask": False, "shuffle": True, **options}
    return Growing(list(paths), "uint16", TokenStream, **given)


def here(found):
    return found()


def read(samples, first, last):
    return [int(q.tokens[0]) for q in samples.samples(range(first, last))]


class TestSamples:
    def test_a_part_is_what_has_come_since(self, tmp_path):
        folder = tmp_path / "data"
        put(folder, "b", 0, 101)
        np.save(folder / ".hidden.npy", np.arange(9))
        samples = growing(folder)
        samples.reach(10, here)
        assert len(samples) == samples.in_epoch == 25 and sorted(read(samples, 0, 25)) == list(range(0, 100, 4))
        put(folder, "a", 1000, 41)
        samples.reach(25, here)
        assert len(samples) == 25  # the part goes on to its end
        samples.reach(26, here)
        assert listed(samples.parts) == [[(0, "b.npy", 101)], [(0, "a.npy", 41)]] and samples.in_epoch == 35
        assert sorted(read(samples, 25, 35)) == list(range(1000, 1040, 4))
        samples.reach(36, here)  # nothing has come: all files, in another order
        assert samples.parts[2] == [] and len(samples) == 35 + 35 and samples.in_epoch == 35
        again = read(samples, 35, 70)
        assert sum(1000 <= token < 1041 for token in again) in (10, 11)
        samples.reach(71, here)
        assert sorted(read(samples, 70, 105)) != again != read(samples, 70, 105)

    def test_too_few_tokens_wait(self, tmp_path):
        put(tmp_path / "data", "a", 0, 101)
        samples = growing(tmp_path / "data")
        samples.reach(25, here)
        put(tmp_path / "data", "b", 1000, 4)
        samples.reach(26, here)
        assert samples.parts[1] == []
        put(tmp_path / "data", "c", 2000, 2)
        samples.reach(51, here)
        assert listed(samples.parts)[2] == [(0, "b.npy", 4), (0, "c.npy", 2)]

    def test_a_checkpoint_has_the_parts(self, tmp_path):
        folder = tmp_path / "data"
        put(folder, "a", 0, 101)
        samples = growing(folder)
        samples.reach(1, here)
        put(folder, "b", 1000, 41)
        samples.reach(26, here)
        want = read(samples, 0, 35)
        put(folder, "c", 2000, 41)
        other = growing(folder)
        other.reach(1, here)
        assert len(other) == 45 and other.problem(samples.described()) is None
        other.restore(samples.described())
        assert read(other, 0, 35) == want
        other.reach(36, here)
        assert listed(other.parts)[2] == [(0, "c.npy", 41)]
        put(folder, "a", 0, 90)
        problem = growing(folder).problem(samples.described())
        assert problem.endswith("a.npy has 90 tokens, and had 101 when it was listed")
        put(folder, "a", 7, 101)
        assert (
            growing(folder)
            .problem(samples.described())
            .endswith("a.npy has other tokens, or another mask, than when it was listed")
        )
        assert growing(folder).problem({"growing": listed(samples.parts)}) is None  # of a checkpoint from before
        (folder / "a.npy").unlink()
        assert growing(folder).problem(samples.described()).endswith("a.npy does not exist")
        assert growing(folder).problem({"growing": [["x"]]}) is not None

    def test_another_mask_is_other_data(self, tmp_path):
        folder = tmp_path / "data"
        put(folder, "a", 0, 41)
        before = growing(folder)
        before.reach(1, here)
        (folder / "a.mask").write_bytes(bytes([0, 1] * 20 + [1]))
        samples = growing(folder)
        samples.reach(1, here)
        assert growing(folder).problem(samples.described()) is None
        # As without a mask, or with ``prompt_loss``.
        assert growing(folder).problem(before.described()) is None
        (folder / "a.mask").write_bytes(bytes([1, 0] * 20 + [1]))
        problem = growing(folder).problem(samples.described())
        assert problem.endswith("a.npy has other tokens, or another mask, than when it was listed")
        (folder / "a.mask").unlink()
        assert growing(folder).problem(samples.described()) is None

    def test_a_pattern_and_what_is_not_read(self, tmp_path):
        for name in ("in1", "in2"):
            put(tmp_path / name, "a", 0, 41)
            put(tmp_path / name, ".b", 0, 41)
        (tmp_path / "in2" / "a.txt").write_text("text")
        samples = growing(tmp_path / "in*")
        samples.reach(1, here)
        assert listed(samples.parts) == [[(0, "a.npy", 41), (1, "a.npy", 41)]]
        assert [path.name for path, _ in samples.stream.skipped] == ["a.txt"] and not samples.masked

    def test_the_token_that_is_wrong_is_found(self, tmp_path):
        for n in range(2):
            put(tmp_path / "data", f"{n}", 1000 * n, 41)
        samples = growing(tmp_path / "data")
        samples.reach(1, here)
        file, document = samples.file_of(3, int(samples.samples(range(3, 4))[0].tokens[1]))
        assert file.path.parent == tmp_path / "data" and document == 0

    def test_what_does_not_grow(self, tmp_path):
        put(tmp_path / "data", "a", 0, 3)
        with pytest.raises(ValueError, match=r"data\.growing: needs a folder in data\.paths, got .*a\.npy"):
            growing(tmp_path / "data" / "a.npy")
        with pytest.raises(ValueError, match="the data has 3 tokens, but a sequence needs 5"):
            growing(tmp_path / "data").reach(1, here)


def settings_of(folder, plan, **sections):
    data = {"paths": [str(folder)], "growing": True, "seq_length": 8}
    return runs.settings_of("tokens.bin", data=data, parallel={"global_batch": 8, **plan}, **sections)


def steps_while_it_grows(rank, settings, folder, resume=None, steps=4):
    """Losses of steps before each of which the first rank adds a file, and the parts."""
    trainer, losses = runs.trainer_of(settings, resume), []
    while trainer.global_step < steps:
        if rank == 0:
            runs.write_tokens(folder / f"{trainer.global_step}.bin", seed=trainer.global_step, count=60)
        losses.append(trainer.step().loss)
    trainer.loader.close()
    if settings.checkpoint.dir is not None:
        trainer.save()
    return losses, trainer.samples.parts


def test_any_mesh_takes_the_same_samples_and_resumes(tmp_path):
    losses, parts = {}, {}
    plans = {"one": {}, "dp": {"dp": 2, "zero": 2}, "pp": {"pp": 2, "schedule": "zb-h1"}}
    for name, plan in plans.items():
        folder = tmp_path / name
        folder.mkdir()
        runs.write_tokens(folder / "first.bin", seed=99, count=100)
        processes = 1 if name == "one" else 2
        settings = settings_of(folder, plan, checkpoint={"dir": str(tmp_path / f"{name}-runs")}, run={"steps": 8})
        losses[name], parts[name] = ranks(processes).run(steps_while_it_grows, settings, folder)[0]
        np.testing.assert_allclose(losses[name], losses["one"], rtol=1e-5)
        assert parts[name] == parts["one"] and len(parts[name]) > 2
    files = sum(map(len, parts["dp"]))
    assert (
        f"growing {files} files in {len(parts['dp'])} parts" in dict(described(inspect(tmp_path / "dp-runs")))["data"]
    )
    # The run of two ranks goes on in one process, and that of one process as before.
    resumed = []
    for name in ("one", "dp"):
        settings = settings_of(tmp_path / name, {}, run={"steps": 8})
        resumed.append(ranks(1).run(steps_while_it_grows, settings, tmp_path / name, tmp_path / f"{name}-runs", 7)[0])
    np.testing.assert_allclose(resumed[0][0], resumed[1][0], rtol=1e-5)
    assert resumed[0][1] == resumed[1][1] and resumed[0][1][: len(parts["one"])] == parts["one"]
