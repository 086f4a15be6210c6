"""Hugging Face folders from strangers: safetensors alone are opened, inside of the folder, and no size is believed."""

import json
import os
import pickle
import struct

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors.torch import save_file

from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.models.huggingface.tensor_files import CONFIG, INDEX, SINGLE

SMALL = TransformerConfig(vocab_size=31, seq_length=16, num_layers=1, hidden_size=32, num_heads=4, bias=True)


class Command:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path):
    Transformer(SMALL).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_not_opened(folder, tmp_path, name, listed):
    (folder / SINGLE).unlink()
    (folder / name).write_bytes(pickle.dumps(Command(tmp_path / "flag")))
    message = rf"has neither {SINGLE} nor {INDEX}; {name} can run code when it is opened: convert it to safetensors"
    if listed:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        message = rf"names '{name}', which is not a safetensors file beside it"
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        Transformer.from_pretrained(folder)
    (folder / INDEX).unlink(missing_ok=True)
    (folder / name).rename(folder / SINGLE)
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        Transformer.from_pretrained(folder)
    assert not (tmp_path / "flag").exists()


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/a.safetensors", "b/../a.safetensors", "..", ".", "", 3])
def test_an_index_does_not_leave_its_folder(folder, name):
    (folder / SINGLE).rename(folder.parent / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="which is not a safetensors file beside it"):
        Transformer.from_pretrained(folder)


def header(of, data=b"", size=None):
    text = json.dumps(of).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def tensor(shape, end, start=0):
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


LIES = {
    "a header longer than its file": header({}, size=1 << 20),
    "a header longer than memory": header({}, size=1 << 62),
    "a tensor longer than its file": header({"a": tensor([1 << 40], 1 << 42)}),
    "a shape of more bytes than its range": header({"a": tensor([1 << 40], 8)}, bytes(8)),
    "a shape that overflows": header({"a": tensor([1 << 62, 8], 8)}, bytes(8)),
    "a range that is not of the file": header({"a": tensor([2], 24, start=16)}, bytes(16)),
    "two tensors in one place": header({"a": tensor([2], 8), "b": tensor([2], 8)}, bytes(8)),
    "bytes of no tensor": header({"a": tensor([2], 8)}, bytes(16)),
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie_about_sizes(folder, lie):
    (folder / SINGLE).write_bytes(LIES[lie])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        Transformer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 1 << 22, "n_inner": 1 << 22}, r"must be \[31, 4194304\], got \[31, 32\]"),
        ({"vocab_size": 1 << 40}, r"must be \[1099511627776, 32\], got \[31, 32\]"),
        ({"n_layer": 1 << 40}, r"config\.json has n_layer 1099511627776; supported are at most 10000"),
        ({"n_layer": 9_999}, r"config\.json has 9999 layers, but the folder has only \d+ tensors"),
    ],
)
def test_sizes_are_compared_before_a_model_takes_memory(folder, monkeypatch, changes, message):
    said = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(said | changes))
    monkeypatch.setattr(Transformer, "to_empty", lambda *_, **__: pytest.fail("took memory"))
    with pytest.raises(ValueError, match=message):
        Transformer.from_pretrained(folder)


def test_a_config_that_is_nested_without_end(folder):
    (folder / CONFIG).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        Transformer.from_pretrained(folder)


def test_a_link_to_a_file_elsewhere_is_followed(folder):
    """As the cache of the Hugging Face hub has them: its files are opened as safetensors too."""
    (folder / SINGLE).rename(folder.parent / "blob")
    (folder / SINGLE).symlink_to("../blob")
    assert Transformer.from_pretrained(folder).config.num_layers == 1
    save_file({"a": torch.zeros(1)}, folder.parent / "blob")
    with pytest.raises(ValueError, match="lacks"):
        Transformer.from_pretrained(folder)
