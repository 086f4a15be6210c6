"""What is held out for evaluation, and what of it is trained on all the same."""

import numpy as np
import pytest

from parallel_ops.train.build import build_samples
from parallel_ops.train.report.description import warnings
from support.runs.trainer import settings_of


def saved(folder, name, first, count):
    folder.mkdir(exist_ok=True)
    np.save(folder / f"{name}.npy", np.arange(first, first + count))
    return str(folder / f"{name}.npy")


@pytest.mark.parametrize("growing", [False, True])
def test_evaluation_data_that_is_trained_on_is_named(tmp_path, growing):
    folder, other = tmp_path / "data", tmp_path / "other"
    a, b, c = saved(folder, "a", 0, 100), saved(folder, "b", 100, 100), saved(other, "c", 200, 100)
    (other / "link.npy").symlink_to(b)

    def found(evaluation, **data):
        built = build_samples(settings_of("x", data={"growing": growing, **data}, evaluation=evaluation), None)
        built[0].reach(1, lambda compute: compute())
        return warnings(*built)

    assert found({"paths": [c]}, paths=[str(folder)]) == []
    for path, name in ((b, b), (str(other / "link.npy"), str(other / "link.npy"))):
        (warning,) = found({"paths": [c, path]}, paths=[str(folder)])
        assert warning == f"warning: evaluation: the data that is trained on has tokens of {name} too"
    if growing:
        return
    for paths, share, named in (
        ([str(folder)], 0.3, []), ([str(folder), a], 0.3, [a]), ([a, str(folder)], 0.3, []), ([a, b, a], 0.9, [a]),
    ):  # fmt: skip
        trained, held_out = build_samples(settings_of("x", data={"paths": paths}, evaluation={"share": share}), None)
        tokens = [{int(t) for file in s.stream.files for block, _ in file.blocks() for t in block}
                  for s in (trained, held_out)]  # fmt: skip
        assert bool(tokens[0] & tokens[1]) == bool(named), paths
        assert [path for path in (a, b) if any(path in warning for warning in warnings(trained, held_out))] == named
    for second, named in (([a], []), ([a, b], [a])):
        sources = [{"paths": [a], "weight": 1.0}, {"paths": second, "weight": 1.0}]
        assert any(a in warning for warning in found({"share": 0.1}, sources=sources)) == bool(named)
