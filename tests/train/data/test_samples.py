"""Token files, and the samples that are cut from them."""

import itertools
import struct
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops.models.context import IGNORE_INDEX
from parallel_ops.train.data.batches import shares
from parallel_ops.train.data.loader import Loader
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.data.split import split
from parallel_ops.train.data.tokens import TokenStream


def megatron(folder, documents, dtype="<i4", code=4):
    """Writes Megatron-LM's format; every document is two sequences."""
    np.concatenate(documents).astype(dtype).tofile(folder / "corpus.bin")
    lengths = [half for d in documents for half in (len(d) // 2, len(d) - len(d) // 2)]
    pointers = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents) + 1)
    body = np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes()
    (folder / "corpus.idx").write_bytes(head + body + (2 * np.arange(len(documents) + 1)).astype("<i8").tobytes())
    return folder / "corpus.bin"


DOCUMENTS = [np.arange(1, 6), np.arange(10, 13), np.arange(20, 29), np.arange(30, 31)]


def stream(folder, documents=DOCUMENTS):
    return TokenStream([megatron(folder, documents)])


def test_every_format_gives_the_same_documents(tmp_path):
    with_end = np.concatenate([np.append(d, 0) for d in DOCUMENTS])
    np.save(tmp_path / "a.npy", with_end)
    with_end.astype("uint16").tofile(tmp_path / "b.bin")
    (tmp_path / "idx").mkdir()
    indexed = stream(tmp_path / "idx", [np.append(d, 0) for d in DOCUMENTS])
    for path in (tmp_path / "a.npy", tmp_path / "b.bin"):
        read = TokenStream([path], eos_id=0)
        assert read.documents == indexed.documents == 4 and len(read) == len(with_end)
        for number, expected in enumerate(DOCUMENTS):
            assert read.document(number).tolist() == indexed.document(number).tolist() == [*expected, 0]
    both = TokenStream([tmp_path], eos_id=0)
    assert both.documents == 8 and both.document(6, 2, 3).tolist() == [22, 23, 24]


@given(st.data())
def test_an_epoch_has_every_token_once(tmp_path_factory, data):
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(lambda found: sum(found) > 3))
    ends = np.cumsum(lengths)
    documents = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    samples = Samples(
        stream(tmp_path_factory.mktemp("data"), documents), seq_length=3, seed=data.draw(st.integers(0, 9)),
        shuffle=data.draw(st.booleans()),
    )  # fmt: skip
    for epoch in range(2):
        found = samples.samples(range(epoch * samples.in_epoch, (epoch + 1) * samples.in_epoch))
        inputs = np.concatenate([q.tokens[:-1] for q in found])
        assert len(set(inputs.tolist())) == len(inputs) == samples.in_epoch * 3
        for q in found:  # a document begins where the next token is not the next number, or is a first one
            tokens, begins = q.tokens, q.begins
            firsts = {int(end - length) for end, length in zip(ends, lengths, strict=True) if length}
            assert begins.tolist() == [i for i, t in enumerate(tokens) if i == 0 or int(t) in firsts]


@given(st.data())
def test_a_sample_is_the_same_in_any_batch(tmp_path_factory, data):
    """Also in one that goes over the ends of epochs, on a run that begins there, and after a later epoch."""
    length = data.draw(st.integers(2, 40))
    file = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(file, np.arange(length))
    read = TokenStream([file])
    options = {"seq_length": data.draw(st.integers(1, min(4, length - 1))), "seed": data.draw(st.integers(0, 99))}
    whole = [q.tokens.tolist() for q in Samples(read, **options).samples(range(60))]
    first, size = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 20))
    later = Samples(read, **options)
    assert [q.tokens.tolist() for q in later.samples(range(first, first + size))] == whole[first : first + size]
    replicas = data.draw(st.sampled_from([r for r in (1, 2, 4) if size % r == 0]))
    sizes = {"global_batch": size, "micro_batch": 1, "replicas": replicas}
    parts = [numbers for replica in range(replicas) for numbers in shares(first, replica=replica, **sizes)]
    assert [later.batch(numbers).tokens[:, 0].tolist() for numbers in parts] == [
        tokens[:-1] for tokens in whole[first : first + size]
    ]


def test_one_document_is_shuffled_unless_it_stays_as_it_lies(tmp_path):
    """As a raw file is; in another order in each epoch. How random the order is: see ``test_permutation``."""
    np.arange(16001, dtype="uint16").tofile(tmp_path / "raw.bin")
    samples = Samples(TokenStream([tmp_path / "raw.bin"]), seq_length=16, seed=0)
    epochs = [[int(q.tokens[0]) for q in samples.samples(range(1000 * e, 1000 * e + 1000))] for e in (0, 1)]
    in_order = [*range(0, 16000, 16)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == in_order and len({*map(tuple, (*epochs, in_order))}) == 3
    as_they_lie = Samples(samples.stream, seq_length=16, seed=0, shuffle=False)
    assert [int(q.tokens[0]) for q in as_they_lie.samples(range(990, 1010))] == [*in_order[990:], *in_order[:10]]


def test_documents_apart_are_one_packed_row(tmp_path):
    samples = Samples(stream(tmp_path), seq_length=6, seed=3, document_mask=True)
    batch = samples.batch(range(2))
    rows = samples.samples(range(2))
    assert batch.tokens.shape == (12, 1)
    assert batch.tokens[:, 0].tolist() == [*rows[0].tokens[:-1], *rows[1].tokens[:-1]]
    starts = batch.cu_seqlens.tolist()
    assert starts[0] == 0 and starts[-1] == 12 and 6 in starts
    for first, end in itertools.pairwise(starts):
        assert batch.positions[first:end].tolist() == list(range(end - first))
        inside = batch.targets[first : end - 1, 0]
        assert torch.equal(inside, batch.tokens[first + 1 : end, 0])
        if end not in (6, 12):  # the last target of a sequence may be of its own document
            assert batch.targets[end - 1, 0] == IGNORE_INDEX


def test_ranks_share_the_samples_of_a_step():
    sizes = {"global_batch": 24, "micro_batch": 3, "replicas": 4}
    parts = [part for replica in range(4) for part in shares(100, replica=replica, **sizes)]
    assert all(len(part) == 3 for part in parts)
    assert [number for part in parts for number in part] == list(range(100, 124))


def test_a_file_that_is_wrong_is_named(tmp_path):
    path = megatron(tmp_path, DOCUMENTS)
    index = tmp_path / "corpus.idx"
    whole = index.read_bytes()
    for content, message in (
        (whole[:40], "cut off"),
        (b"x" + whole, "not an index"),
        (whole[:17] + b"\x07" + whole[18:], "code 7"),
        (whole[:66] + whole[74:82] + whole[66:74] + whole[82:], "has its sequences in another order"),  # places of two
    ):
        index.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            TokenStream([path])
    index.write_bytes(whole)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"corpus\.idx has 18"):
        TokenStream([path])
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match="3 bytes"):
        TokenStream([tmp_path / "odd.bin"])
    np.save(tmp_path / "torn.npy", np.arange(9))
    array = (tmp_path / "torn.npy").read_bytes()
    for start, content in ((0, b"x"), (10, b"("), (10, bytes(60)), (10, b" {")):
        (tmp_path / "torn.npy").write_bytes(array[:start] + content + array[start + len(content) :])
        with pytest.raises(ValueError, match=r"torn\.npy cannot be read as an array of integers"):
            TokenStream([tmp_path / "torn.npy"])
    np.save(tmp_path / "float.npy", np.zeros(3))
    with pytest.raises(ValueError, match="one dimension of integers"):
        TokenStream([tmp_path / "float.npy"])
    with pytest.raises(FileNotFoundError, match="nothing"):
        TokenStream([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="must end in"):
        TokenStream([index])
    assert len(TokenStream([index], dtype="uint8")) == len(whole)  # the bytes of any file
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("text")
    with pytest.raises(
        ValueError, match=r"no \.bin .*; with the dtype uint8 the bytes of any file are tokens, where its"
    ):
        TokenStream([tmp_path / "empty"])
    np.save(tmp_path / "short.npy", np.arange(4))
    with pytest.raises(ValueError, match="4 tokens, but a sequence needs 5"):
        Samples(TokenStream([tmp_path / "short.npy"]), seq_length=4, seed=0)


def test_documents_of_an_index_have_all_its_tokens(tmp_path):
    """Writers that never end a document, or not the last one, leave the index so."""
    path = megatron(tmp_path, [np.arange(6), np.arange(6, 10), np.arange(10, 18)])  # six sequences
    whole = (tmp_path / "corpus.idx").read_bytes()
    head, body = whole[:26], whole[34:-32]

    def lengths(*firsts):
        content = head + struct.pack("<Q", len(firsts)) + body + np.array(firsts, "<i8").tobytes()
        (tmp_path / "corpus.idx").write_bytes(content)
        return TokenStream([path]).lengths.tolist()

    assert lengths(0, 2, 4, 6) == [6, 4, 8] and lengths(0, 2, 2, 6) == [6, 0, 12]
    assert lengths(0) == lengths() == [3, 3, 2, 2, 4, 4]
    assert lengths(0, 2, 4) == [6, 4, 8] and lengths(0, 2) == [6, 12]
    for wrong in ((0, 4, 2, 6), (0, 2, 7), (0, -1, 6), (-1, 6)):
        with pytest.raises(ValueError, match=r"corpus\.idx has documents that do not lie one behind the other"):
            lengths(*wrong)


def test_hidden_files_suffixes_and_patterns(tmp_path):
    """Names of macOS and of Windows; a pattern reads what a folder of its matches would, and the rest is named."""
    for name in ("a.bin", "B.BIN", "c.NPY", "._a.bin", ".hidden.npy"):
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True)
        np.save(path.open("wb"), np.arange(9)) if path.suffix == ".NPY" else np.arange(9, dtype="u2").tofile(path)
    (tmp_path / "data" / "again.bin").symlink_to(tmp_path / "data" / "a.bin")
    for name in ("a.txt", "alone.idx"):
        (tmp_path / "data" / name).write_text("text")
    np.ones(9, np.uint8).tofile(tmp_path / "data" / "B.MASK")
    for path in (tmp_path / "data", tmp_path / "data" / "*", tmp_path / "da*"):
        found = TokenStream([path])
        assert sorted(file.path.name for file in found.files) == ["B.BIN", "a.bin", "c.NPY"]
        assert [(left.name, why.partition(" ")[0]) for left, why in found.skipped] == [
            ("a.txt", "of"),
            ("again.bin", "the"),
            ("alone.idx", "of"),
        ]
        assert found.masked
    assert TokenStream([tmp_path / "data" / "a.bin"]).skipped == []
    (tmp_path / "data" / "more").mkdir()
    assert (tmp_path / "data" / "more", "a folder") in TokenStream([tmp_path / "data"]).skipped
    with pytest.raises(FileNotFoundError, match=r"b\*\.bin matches nothing"):
        TokenStream([tmp_path / "b*.bin"])


def test_a_mask_beside_any_token_file(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(4))
    np.arange(4, dtype="u2").tofile(tmp_path / "b.bin")
    for name in "ab":
        np.array([0, 1, 1, 1], np.uint8).tofile(tmp_path / f"{name}.mask")
    read = TokenStream([tmp_path])
    assert read.counted(0, 0, 2).tolist() == read.counted(1, 0, 2).tolist() == [False, True]
    assert read.share_counted == 0.75 and read.skipped == [] and not TokenStream([tmp_path], masked=False).masked
    (tmp_path / "b.mask").write_bytes(bytes(3))
    with pytest.raises(ValueError, match=r"b\.mask has 3 bytes, but .*b\.bin has 4 tokens"):
        TokenStream([tmp_path])


def test_a_digest_is_of_documents_tokens_and_masks(tmp_path):
    def digest(documents, mask=(1, 0, 1)):
        path = megatron(tmp_path, documents)
        np.resize(np.array(mask, np.uint8), sum(map(len, documents))).tofile(tmp_path / "corpus.mask")
        return TokenStream([path]).digest

    same, other = digest(DOCUMENTS), [d.copy() for d in DOCUMENTS]
    other[2][4] += 1
    assert same == digest(DOCUMENTS)
    for changed in (other, DOCUMENTS[::-1], [np.concatenate(DOCUMENTS[:2]), *DOCUMENTS[2:]]):
        assert digest(changed)[0] != same[0]
    assert digest(DOCUMENTS, (0, 1, 1))[0] == same[0] and digest(DOCUMENTS, (0, 1, 1))[1] != same[1]
    parts = TokenStream.of([file for part in split(stream(tmp_path), 0.3) for file in part.files])
    assert sum(len(block) for file in parts.files for block, _ in file.blocks()) == len(parts)


def test_a_dataset_on_disk_is_read_like_files(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets, with pyarrow, is no dependency")
    import pyarrow

    table = pyarrow.table({"input_ids": [d.tolist() for d in DOCUMENTS], "n": [0, 1, 2, 3]})
    rows = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="rows")
    rows.save_to_disk(tmp_path / "rows")
    rows.select([3, 1]).save_to_disk(tmp_path / "some")
    read = TokenStream([tmp_path / "rows", tmp_path / "some"])
    assert read.documents == 6 and read.lengths.tolist() == [*map(len, DOCUMENTS), 1, 3]
    for number, expected in enumerate([*DOCUMENTS, DOCUMENTS[3], DOCUMENTS[1]]):
        assert read.document(number).tolist() == expected.tolist()
    assert read.document(2, 3, 2).tolist() == [23, 24]
    assert read.files[0].dtype == np.int64 and read.sizes == [18, 4]
    assert np.concatenate([block for block, _ in read.files[0].blocks()]).tolist() == np.concatenate(DOCUMENTS).tolist()
    with pytest.raises(ValueError, match="has no column 'ids'; it has input_ids, n"):
        TokenStream([tmp_path / "rows"], column="ids")
    with pytest.raises(ValueError, match="column 'n' must have lists of integers, got int64"):
        TokenStream([tmp_path / "rows"], column="n")
    (tmp_path / "rows" / "data-00000-of-00001.arrow").write_bytes(b"torn")
    with pytest.raises(ValueError, match="rows cannot be read"):
        TokenStream([tmp_path / "rows"])
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"has several datasets; name one of .*splits/train"):
        TokenStream([tmp_path / "splits"])


def test_a_dataset_without_its_package(tmp_path, monkeypatch):
    for name in ("dataset_info.json", "state.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="is a Hugging Face dataset; to read it, run: pip install datasets"):
        TokenStream([tmp_path])


def test_the_thread_that_pins_batches_is_on_the_gpu_of_its_rank(tmp_path, monkeypatch):
    device_of: dict[int, int] = {}
    pinned_on = []

    def pin(t):
        pinned_on.append(device_of.get(threading.get_ident(), 0))
        return t

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: device_of.update({threading.get_ident(): device}))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    samples = Samples(stream(tmp_path), seq_length=3, seed=0)
    loader = Loader(samples, global_batch=2, micro_batch=2, replicas=1, replica=0, pinned=True)
    loader.step(0)
    loader.close()
    assert set(pinned_on) == {3} and threading.get_ident() not in device_of
