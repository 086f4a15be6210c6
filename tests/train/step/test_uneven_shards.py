"""Tables whose rows tensor-parallel ranks do not divide, and ``fully_shard`` divides again: the values of one process.

Eight ranks, since four cannot show the fault: two cuts in two parts each are the same from either side.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from parallel_ops.models import Transformer, TransformerConfig
from support.further import thinned
from support.numerics import uneven
from support.ranks.distributed import ranks
from support.runs import trainer as runs

OVER = {"dp_shard": 4, "tp": 2}


# torch's rule is wrong over these ranks for one row more than a multiple of 8. Of 10 rows a rank has none.
@pytest.mark.parametrize(
    ("sizes", "other"),
    thinned(
        [
            ([10, 17, 33, 63, 65, 143], {"dp_shard": 2, "tp": 4}),
            ([13, 25, 41, 64, 129, 257], {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        ]
    ),
    ids=str,
)
def test_tables_of_a_users_own_loop(sizes, other, tmp_path):
    """Drawn, trained by AdamW and Muon, clipped, saved with torch.distributed.checkpoint, and loaded by others."""
    ranks(8).run(uneven.tables, sizes, OVER, other, tmp_path)


def test_folders_are_read_and_written(tmp_path):
    config = TransformerConfig(vocab_size=257, seq_length=33, num_layers=1, hidden_size=16, num_heads=4)
    torch.manual_seed(0)
    one = Transformer(config)
    one.save_pretrained(tmp_path)
    for got in ranks(8).run(uneven.folders, tmp_path, OVER):
        assert all(torch.equal(got[name], p) for name, p in one.named_parameters())
    again = load_file(tmp_path / "again8" / "model.safetensors")
    assert all(torch.equal(again.pop(name), t) for name, t in load_file(tmp_path / "model.safetensors").items())
    assert not again


def test_a_run_trains_saves_and_resumes_as_one_process_does(tmp_path):
    data = runs.data_file(tmp_path)
    model = runs.MODELS["llama"] | {"vocab_size": 33}
    want = runs.steps_of(0, runs.settings_of(data, model=model))

    def settings(**plan):
        return runs.settings_of(data, model=model, parallel=plan, checkpoint={"dir": str(tmp_path / "saved")})

    got = ranks(8).run(runs.steps_of, settings(dp=4, tp=2, zero=3), None, 3)
    np.testing.assert_allclose(got[0], want[:3], rtol=1e-5)
    for plan in ({"dp": 4, "tp": 2, "zero": 2}, {"dp": 2, "tp": 4, "zero": 1, "sequence_parallel": True}):
        resumed = ranks(8).run(runs.steps_of, settings(**plan), tmp_path / "saved" / "step-00000003")
        np.testing.assert_allclose(resumed[0], want[3:], rtol=1e-4)
    alone = runs.settings_of(data, model=model)
    np.testing.assert_allclose(runs.steps_of(0, alone, tmp_path / "saved" / "step-00000003"), want[3:], rtol=1e-4)
