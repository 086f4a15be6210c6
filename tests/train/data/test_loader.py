"""What a loader checks of the batches that it reads."""

import numpy as np
import pytest

from parallel_ops.train.data.by_length import ByLength
from parallel_ops.train.data.loader import Loader
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.data.tokens import TokenStream


@pytest.mark.parametrize("token", [9, -3, -100])  # -100 marks what is no target
@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("by_length", [False, True])
def test_a_token_outside_the_vocabulary_is_named_wherever_it_is(tmp_path, token, place, by_length):
    """Also as the last target of a sequence alone, which is none of its inputs."""
    tokens = np.arange(5, dtype=np.int32)
    tokens[place] = token
    np.save(tmp_path / "a.npy", tokens)
    samples = Samples(TokenStream([tmp_path / "a.npy"]), seq_length=4, seed=1, document_mask=True)
    groups = ByLength(2, 0, 1e-4) if by_length else None
    sizes = {"global_batch": 2, "micro_batch": 1, "replicas": 2, "replica": 0}
    loader = Loader(samples, **sizes, vocabulary=9, by_length=groups)
    with pytest.raises(
        ValueError, match=rf"a\.npy has token {token}, in its document 0, outside the model's vocabulary"
    ):
        loader.step(0)
    loader.close()


def test_an_unsigned_token_that_no_int64_has_is_named(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2**64 - 1, 3], np.uint64))
    samples = Samples(TokenStream([tmp_path / "a.npy"]), seq_length=2, seed=1)
    loader = Loader(samples, global_batch=1, micro_batch=1, replicas=1, replica=0, vocabulary=9)
    with pytest.raises(ValueError, match=r"a\.npy has token -1, in its document 0"):
        loader.read(range(1))
