"""Files from strangers are data: nothing in them is run, and nothing outside of their folder is read."""

import copy
import io
import json
import os
import pickle
import shutil
import sys
import zlib
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from parallel_ops.train import CheckpointError, Trainer
from parallel_ops.train.checkpoint.description import DESCRIPTION, METADATA, checksum
from parallel_ops.train.data.datasets import Dataset
from parallel_ops.train.data.tokens import TokenStream
from support.runs import trainer as runs


class Command:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and the settings of its run."""
    folder = tmp_path_factory.mktemp("saved")
    settings = runs.settings_of(runs.data_file(folder), checkpoint={"dir": str(folder)}, run={"steps": 2})
    return Trainer(settings).train().checkpoint, settings


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "folder" / saved[0].name)


def vouch(path, **changes):
    """Makes ``run.json`` say that the files are as they should be."""
    said = json.loads((path / DESCRIPTION).read_text())
    said["files"] = {name: checksum(path / name) for name in said["files"]} | changes
    del said["checksum"]
    said["checksum"] = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    (path / DESCRIPTION).write_text(json.dumps(said))


def with_metadata(change):
    def act(path, flag):
        metadata = pickle.loads((path / METADATA).read_bytes())
        (path / METADATA).write_bytes(pickle.dumps(change(metadata, flag) or metadata))

    return act


def entry_of(metadata, kind):
    return next(i for i in metadata.storage_data if type(metadata.state_dict_metadata[i.fqn]).__name__ == kind)


def with_data(kind):
    """A tensor, or what says that it is of this kind, is something that torch's planner or ``torch.load`` would run."""

    def act(path, flag):
        file = path / "__0_0.distcp"
        content, data = io.BytesIO(), file.read_bytes()
        torch.save(Command(flag), content)
        file.write_bytes(data + content.getvalue())

        def change(metadata, _):
            entry = entry_of(metadata, "TensorStorageMetadata")
            if kind == "BytesStorageMetadata":
                metadata.state_dict_metadata[entry.fqn] = BytesStorageMetadata()
                metadata.storage_data[MetadataIndex(entry.fqn)] = metadata.storage_data.pop(entry)
                entry = MetadataIndex(entry.fqn)
            place = metadata.storage_data[entry]
            place.offset, place.length = len(data), len(content.getvalue())

        with_metadata(change)(path, flag)

    return act


def place(**values):
    def change(metadata, _):
        index = entry_of(metadata, "TensorStorageMetadata")
        for name, value in values.items():
            setattr(metadata.storage_data[index], name, value)

    return with_metadata(change)


def in_planner_data(metadata, flag):
    metadata.planner_data = {"a": Command(flag)}


def in_a_shape(metadata, flag):
    metadata.state_dict_metadata[entry_of(metadata, "TensorStorageMetadata").fqn].size = Command(flag)


def over_a_class(metadata, flag):
    """A pickle that sets attributes of a class, which would outlast it."""
    return Assigned()


class Assigned:
    def __reduce_ex__(self, protocol):
        from torch.distributed.checkpoint.metadata import Metadata

        return copy.copy, (Metadata,), (None, {"poisoned": True})


ATTACKS = {
    "metadata": (with_metadata(lambda _, flag: Command(flag)), r"\.metadata is damaged: it names posix\.mkdir"),
    "part of metadata": (with_metadata(in_planner_data), r"\.metadata is damaged: it names posix\.mkdir"),
    "a shape": (with_metadata(in_a_shape), r"\.metadata is damaged: it names posix\.mkdir"),
    "class of metadata": (with_metadata(over_a_class), r"\.metadata is damaged: it names copy\.copy"),
    "plain value": (with_data("BytesStorageMetadata"), r"damaged: __0_0\.distcp has something else in it than tensors"),
    "tensor": (with_data("TensorStorageMetadata"), r"damaged: __0_0\.distcp has something else in it than tensors"),
    "place": (place(relative_path="../../tokens.bin"), r"places data in '../../tokens.bin', which is no file of the"),
    "length": (place(length=1 << 60), r"\.metadata is damaged: it places data at \d+ to \d+ of __0_0\.distcp, which"),
    "count": (place(offset=-5), r"\.metadata is damaged: it has -5 in the place of a count"),
    "transform": (place(transform_descriptors=["zip"]), r"\.metadata is damaged: it has transforms of data, \['zip'\]"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_checkpoint_runs_nothing(saved, checkpoint, tmp_path, attack):
    act, message = ATTACKS[attack]
    act(checkpoint, tmp_path / "flag")
    vouch(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        Trainer(saved[1]).resume(checkpoint)
    assert not (tmp_path / "flag").exists()


@pytest.mark.parametrize("name", ["../../secret", "/dev/zero", "..", ""])
def test_a_description_names_files_beside_it(saved, checkpoint, name):
    vouch(checkpoint, **{name: [1 << 40, 0]})
    with pytest.raises(CheckpointError, match=r"run\.json is not of a checkpoint, or damaged: .* is no file beside it"):
        Trainer(saved[1]).resume(checkpoint)


def test_a_description_of_files_that_never_end(saved, checkpoint):
    (checkpoint / "__0_1.distcp").symlink_to("/dev/zero")
    vouch(checkpoint, **{"__0_1.distcp": [1 << 40, 0]})
    with pytest.raises(CheckpointError, match=r"__0_1\.distcp is damaged: it is no regular file"):
        Trainer(saved[1]).resume(checkpoint)
    (checkpoint / DESCRIPTION).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"run\.json is not of a checkpoint, or damaged"):
        Trainer(saved[1]).resume(checkpoint)


def test_what_vouches_for_a_checkpoint_is_enough(saved, checkpoint):
    """The attacks are refused for what they are, not for how they are made."""
    with_metadata(lambda metadata, _: None)(checkpoint, None)
    vouch(checkpoint)
    assert Trainer(saved[1]).resume(checkpoint) == checkpoint


def test_tokens_run_nothing(tmp_path):
    file, flag = tmp_path / "tokens.npy", tmp_path / "flag"
    np.save(file, np.array([Command(flag)], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"tokens\.npy cannot be read as an array of integers"):
        TokenStream([file])
    file.write_bytes(pickle.dumps(Command(flag)))
    with pytest.raises(ValueError, match=r"tokens\.npy cannot be read as an array of integers"):
        TokenStream([file])
    np.savez(tmp_path / "tokens.npz", a=np.arange(3))
    (tmp_path / "tokens.npz").rename(file)
    with pytest.raises(ValueError, match=r"tokens\.npy cannot be read as an array of integers"):
        TokenStream([file])
    assert not flag.exists()


@pytest.mark.parametrize("name", ["../a.arrow", "/etc/a.arrow", "..", 3])
def test_a_dataset_does_not_leave_its_folder(tmp_path, monkeypatch, name):
    load = use_datasets(monkeypatch, "14.0.1")
    write_dataset(tmp_path, name)
    with pytest.raises(ValueError, match=r"state\.json names .*, which is not a file beside it"):
        Dataset(tmp_path, "tokens")
    assert not load.called
    write_dataset(tmp_path, "a.arrow")
    load.side_effect = OSError("it was opened")
    with pytest.raises(ValueError, match="it was opened"):
        Dataset(tmp_path, "tokens")


def test_a_pyarrow_that_unpickles_datasets_is_refused(tmp_path, monkeypatch):
    load = use_datasets(monkeypatch, "14.0.0")
    write_dataset(tmp_path, "a.arrow")
    with pytest.raises(ImportError, match=r"pyarrow 14\.0\.0 runs code that is in a dataset; update it to 14\.0\.1"):
        Dataset(tmp_path, "tokens")
    assert not load.called


def use_datasets(monkeypatch, version):
    """Stands in for ``datasets`` and ``pyarrow``; returns what would open a dataset."""
    load = mock.Mock()
    monkeypatch.setitem(sys.modules, "datasets", mock.Mock(load_from_disk=load))
    monkeypatch.setitem(sys.modules, "pyarrow", mock.Mock(__version__=version))
    return load


def write_dataset(path, file):
    (path / "dataset_info.json").write_text("{}")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": file}]}))


def test_an_array_that_claims_more_than_its_file_has(tmp_path):
    file = tmp_path / "tokens.npy"
    np.save(file, np.arange(8, dtype=np.uint16))
    file.write_bytes(file.read_bytes().replace(b"(8,)", b"(9999999999,)"))
    with pytest.raises(ValueError, match=r"tokens\.npy cannot be read as an array of integers"):
        TokenStream([file])
