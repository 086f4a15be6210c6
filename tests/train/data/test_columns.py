"""Columns of datasets beside the tokens: what counts, what is padding, and what cannot be used."""

import shutil

import numpy as np
import pytest

from parallel_ops.train.data.packing import Samples
from parallel_ops.train.data.split import split
from parallel_ops.train.data.tokens import TokenStream


def rows_of(folder, **columns):
    """A dataset on disk."""
    datasets = pytest.importorskip("datasets", reason="datasets, with pyarrow, is no dependency")
    import pyarrow

    shutil.rmtree(folder, ignore_errors=True)
    datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table(columns)), fingerprint="rows").save_to_disk(folder)
    return folder


ROWS = [[5, 6, 7, 8], [], [9, 10]]


def test_what_counts(tmp_path):
    labels = [[-100, -100, 7, 8], [], [-100, 10]]
    mask = [[True, True, True, False], [], [True, True]]
    read = TokenStream([rows_of(tmp_path / "d", input_ids=ROWS, labels=labels, assistant_masks=mask, id=[1, 2, 3])])
    assert read.masked and read.share_counted == 2 / 6 and read.files[0].masks == ["labels", "assistant_masks"]
    assert read.counted(0, 1, 3).tolist() == [False, True, False]
    assert read.counted(2, 0, 2).tolist() == [False, True]
    assert [why for _, why in read.skipped] == ["its column id"]
    assert not TokenStream([tmp_path / "d"], masked=False).masked
    assert TokenStream([tmp_path / "d"], ignore=["labels"]).share_counted == 5 / 6
    parts = [file for part in split(read, 0.5) for file in part.files]
    assert np.concatenate([counts() for file in parts for _, counts in file.blocks()]).sum() == 2
    samples = Samples(read, seq_length=5, seed=None)
    assert samples.ignores and samples.batch(range(1)).targets[:, 0].tolist() == [-100, 7, -100, -100, 10]


def test_padding_is_left_out(tmp_path):
    mask = [[0, 1, 1, 0], [], [1, 1]]
    labels = [[-100, -100, 7, -100], [], [9, 10]]
    read = TokenStream([rows_of(tmp_path / "d", input_ids=ROWS, attention_mask=mask, labels=labels)])
    assert read.lengths.tolist() == [2, 0, 2] and read.document(0).tolist() == [6, 7]
    assert read.counted(0, 0, 2).tolist() == [False, True]
    assert np.concatenate([block for block, _ in read.files[0].blocks()]).tolist() == [6, 7, 9, 10]
    whole = TokenStream([rows_of(tmp_path / "d", input_ids=ROWS, attention_mask=[[1] * 4, [], [1] * 2])])
    assert whole.lengths.tolist() == [4, 0, 2] and not whole.masked


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"labels": [[6, 7, 8, 9], [], [9, 10]]},
            "the column 'labels' has 6 for the token 5; labels are the tokens",
        ),
        ({"loss_mask": [[1], [], [1, 1]]}, "row 0: 'loss_mask' has 1 values for 4 tokens"),
        ({"loss_mask": [[1, None, 0, 1], [], [1, 1]]}, "the column 'loss_mask' has a null in a list, in rows 0 to 2"),
        ({"labels": [1, 0, 1]}, "column 'labels' must have lists of integers, got int64"),
        (
            {"position_ids": [[0], [], [0]]},
            r"has the column 'position_ids', .*; data\.ignore = \[\"position_ids\"\]",
        ),
        ({"tools": ["", "", ""]}, "has the column 'tools', which changes what is learnt and is not used here"),
    ],
)
def test_what_cannot_be_used(tmp_path, columns, message):
    folder = rows_of(tmp_path / "d", input_ids=ROWS, **columns)
    with pytest.raises(ValueError, match=message):
        assert TokenStream([folder]).share_counted
    assert TokenStream([folder], ignore=[*columns]).share_counted == 1
