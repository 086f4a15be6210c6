"""Steps and evaluations are the same for every size of micro-batches, whichever targets count in them."""

import numpy as np
import pytest
import torch

from support.runs import trainer as runs

# Auxiliary losses of experts are those of a micro-batch, so there are none here.
EXPERTS = runs.MODELS["experts"]["experts"] | {"aux_loss": 0.0, "z_loss": 0.0}
MODELS = {
    "gpt": runs.MODELS["gpt"],
    "experts": runs.MODELS["experts"] | {"experts": EXPERTS},
    "prediction": runs.MODELS["llama"] | {"prediction_layers": 2},
}


@pytest.fixture(scope="module")
def masked(data, tmp_path_factory):
    """The tokens, of which about a third count, in blocks: some samples have no target."""
    path = tmp_path_factory.mktemp("masked") / "tokens.bin"
    tokens = np.fromfile(data, "uint16")
    tokens.tofile(path)
    counted = np.random.default_rng(0).random(len(tokens) // 10) < 0.3
    np.repeat(counted, 10).astype("uint8").tofile(path.with_suffix(".mask"))
    return path


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mask", [False, True], ids=["packed", "documents"])
def test_micro_batches_add_up(masked, kind, mask):
    found = []
    for size in (1, 2, 8):
        parallel = {"global_batch": 8, "micro_batch": size}
        trainer = runs.trainer_of(
            runs.settings_of(masked, model=MODELS[kind], data={"document_mask": mask}, parallel=parallel)
        )
        steps = [(step.loss, step.grad_norm) for step in runs.taken(trainer, 2)]
        found.append((steps, [p.detach() for p in trainer.model.parameters()]))
    for steps, parameters in found[1:]:
        assert steps == [pytest.approx(step, rel=1e-4) for step in found[0][0]]
        torch.testing.assert_close(parameters, found[0][1], rtol=1e-4, atol=1e-5)


def test_evaluations_do_not_depend_on_micro_batches(masked):
    """Nor where experts have a capacity: what is left over is dropped in training alone."""
    model, found = runs.MODELS["experts"], []
    model = model | {"experts": model["experts"] | {"capacity_factor": 0.5}}
    for size in (1, 3, 8):
        parallel, evaluation = {"global_batch": size, "micro_batch": size}, {"paths": [str(masked)], "sequences": 25}
        with runs.trainer_of(
            runs.settings_of(masked, model=model, parallel=parallel, evaluation=evaluation)
        ) as trainer:
            found.append(trainer.evaluate())
    assert found == [pytest.approx(found[0], rel=1e-6)] * 3
