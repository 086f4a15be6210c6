"""What of folders, formats and rows is read, and that whatever is not is named or refused."""

import bz2
import gzip
import json
import lzma
import os

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokenizers is no dependency")

from parallel_ops.tokenization import Options, formats, indexed
from parallel_ops.tokenization.run import tokenize
from parallel_ops.train.data.tokens import TokenStream
from support.runs.tokenization import END, write_json_lines


@pytest.fixture
def texts(tmp_path, tokenizer):
    """Tokenizes inputs and returns the texts of the documents, and the summary."""
    from tokenizers import Tokenizer

    own, calls = Tokenizer.from_file(str(tokenizer)), []

    def call(*inputs, **options):
        calls.append(0)
        output = tmp_path / f"out{len(calls)}.bin"
        found = tokenize(inputs, output, Options(tokenizer, **options), processes=1)
        stream = TokenStream([output])
        read = [own.decode(stream.document(n).tolist(), skip_special_tokens=False) for n in range(stream.documents)]
        return [text.removesuffix(END) for text in read], found

    return call


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def zstd(content):
    return pytest.importorskip("zstandard", reason="zstandard is no dependency").compress(content)


COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


class TestFolders:
    def test_hidden_files_are_left_out_and_others_named(self, tmp_path, texts):
        data = tmp_path / ".hidden" / "data"  # of a path that is given, names may begin with a dot
        put(data / "a.TXT", "one")
        put(data / "deep" / "b.Jsonl", '{"text": "two"}\n')
        for name in (".git/x.txt", "deep/.ipynb_checkpoints/b.jsonl", "._a.txt"):
            put(data / name, "hidden")
        put(data / "c.csv", "text")
        put(data / "deep" / "d.txt.br", "text")
        put(data / "e.parquet.gz", b"")
        (data / "f.txt").symlink_to(data / "nothing")
        os.mkfifo(data / "g.txt")
        found, summary = texts(data)
        assert found == ["one", "two"] and summary.files == 2
        assert [(path.rpartition("/")[2], reason.partition(",")[0]) for path, reason in summary.unread] == [
            ("c.csv", "no text"), ("d.txt.br", "no text"), ("e.parquet.gz", "no text"), ("f.txt", "a link to nothing"),
            ("g.txt", "no regular file"),
        ]  # fmt: skip

    def test_links_are_followed_once(self, tmp_path, texts):
        data = tmp_path / "data"
        put(data / "z" / "a.txt", "one")
        put(tmp_path / "elsewhere" / "b.txt", "two")
        put(tmp_path / "blob", "three")
        (data / "linked").symlink_to(tmp_path / "elsewhere")
        (data / "again").symlink_to(tmp_path / "elsewhere")
        (data / "inner").symlink_to(data / "z")
        (data / "z" / "loop").symlink_to(data)
        (data / "c.txt").symlink_to(tmp_path / "blob")  # as a download of the Hugging Face hub
        (data / "a.txt").symlink_to(data / "z" / "a.txt")
        found, summary = texts(data)
        assert sorted(found) == ["one", "three", "two"]
        unread = {os.path.relpath(path, data): reason for path, reason in summary.unread}
        assert set(unread) == {"a.txt", "inner", "linked", "z/loop"}
        assert unread["a.txt"] == f"the same file as {data / 'z' / 'a.txt'}"
        assert unread["z/loop"] == f"the same folder as {data}"

    def test_a_file_by_two_names_is_refused(self, tmp_path, texts, monkeypatch):
        """As a shell's pattern gives a link, and as a folder and a file in it may be given."""
        own = put(tmp_path / "data" / "a.txt", "one")
        (tmp_path / "data" / "b.txt").symlink_to(own)
        monkeypatch.chdir(tmp_path)
        for again in (tmp_path / "data" / "b.txt", "data/a.txt"):
            with pytest.raises(ValueError, match=rf"{again} is given twice, as {own} too"):
                texts(own, again)
        assert texts("data")[0] == ["one"]

    def test_a_pipe_is_refused(self, tmp_path, texts):
        """As a shell's ``<(zcat a.gz)``: it has no size, and would be read as an empty file."""
        end, begin = os.pipe()
        os.write(begin, b"one")
        os.close(begin)
        with pytest.raises(ValueError, match=rf"/dev/fd/{end} is no regular file"):
            texts(f"/dev/fd/{end}", put(tmp_path / "b.txt", "two"))
        os.close(end)

    def test_patterns_home_and_variables(self, tmp_path, texts, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("CORPUS", "data")
        for name in ("a", "b"):
            put(tmp_path / "data" / f"{name}.txt", name)
        put(tmp_path / "data" / "[1].txt", "as it stands")
        assert texts("~/${CORPUS}/?.txt")[0] == ["a", "b"]
        assert texts(tmp_path / "data" / "[1].txt")[0] == ["as it stands"]
        assert texts("~/dat*")[0] == ["as it stands", "a", "b"]
        with pytest.raises(ValueError, match=r"\$NOTHING/a\.txt: the variable \$NOTHING is not set"):
            texts("$NOTHING/a.txt")
        with pytest.raises(FileNotFoundError, match=r"c\*\.txt matches nothing"):
            texts("~/data/c*.txt")

    def test_messages_leave_out_raw_text(self, tmp_path, texts):
        data = tmp_path / "data"
        put(data / "README.md", "text")
        write_json_lines(put(data / "a.jsonl", ""), [[{"role": "user", "content": "a"}]], "messages")
        _, summary = texts(data, chat=True, key="messages")
        assert [reason for _, reason in summary.unread] == ["raw text, and --chat reads messages"]

    def test_many_small_files_share_parts(self, tmp_path, texts):
        for number in range(3000):
            put(tmp_path / "data" / f"{number % 10}" / f"{number:05}.txt", f"{number}")
        put(tmp_path / "data" / "empty.txt", "")
        found, summary = texts(tmp_path / "data")
        assert sorted(map(int, found)) == list(range(3000)) and summary.parts < 10 and summary.empty == 1


class TestFormats:
    @pytest.mark.parametrize("suffix", COMPRESSIONS)
    def test_a_compressed_file_has_all_its_members(self, tmp_path, texts, suffix):
        compress = COMPRESSIONS[suffix]
        lines = [json.dumps({"text": f"{number} " * 9000}).encode() + b"\n" for number in range(9)]
        whole = b"".join(compress(line) for line in lines)
        file = put(tmp_path / f"a.jsonl{suffix.upper()}", whole)
        assert texts(file)[0] == [f"{number} " * 9000 for number in range(9)]
        empty = put(tmp_path / f"empty.txt{suffix}", b"")
        second = len(compress(lines[0])) + 8
        damaged = whole[:second] + bytes(byte ^ 255 for byte in whole[second : second + 9]) + whole[second + 9 :]
        for content in (whole[:-3], damaged, whole + b"what is this", b"no archive at all", whole[: len(whole) // 2]):
            put(file, content)
            with pytest.raises(ValueError, match=rf"a\.jsonl{suffix.upper()} is not {suffix[1:]}, or (cut|damaged)"):
                texts(file)
        with pytest.raises(ValueError, match="it is empty"):
            texts(empty)

    def test_without_the_package(self, tmp_path, texts, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
        with pytest.raises(ImportError, match=r"needs zstandard; run: pip install zstandard"):
            texts(put(tmp_path / "a.txt.zst", b"x"))

    @pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.TGZ", "a.parquet.zst"])
    def test_archives_of_files(self, tmp_path, texts, name):
        if name.endswith("zst"):
            pytest.importorskip("zstandard", reason="zstandard is no dependency")
        with pytest.raises(ValueError, match=r"unpack it"):
            texts(put(tmp_path / name, b"x"))

    def test_byte_order_marks(self, tmp_path, texts):
        mark = "\ufeff"
        put(tmp_path / "a.jsonl", f'{mark}{{"text": "a"}}\n{mark}{{"text": "b"}}\n')  # two files put together
        put(tmp_path / "b.txt", f"{mark}c")
        put(tmp_path / "c.txt.gz", gzip.compress(f"{mark}d\n---\n{mark}e".encode()))
        assert texts(tmp_path / "a.jsonl", tmp_path / "b.txt")[0] == ["a", "b", "c"]
        assert texts(tmp_path / "c.txt.gz", separator="---")[0] == ["d\n", "e"]
        with pytest.raises(ValueError, match=r"d\.txt is not UTF-8 at byte 0; it is UTF-16: convert it"):
            texts(put(tmp_path / "d.txt", "text".encode("utf-16")))

    def test_null_is_an_empty_document(self, tmp_path, texts):
        lines = write_json_lines(tmp_path / "a.jsonl", ["a", None, "", "b"])
        found, summary = texts(lines)
        assert found == ["a", "b"] and summary.empty == 2
        chat = [None, [{"role": "user", "content": "q"}]]
        assert texts(write_json_lines(lines, chat, "messages"), chat=True, key="messages")[1].empty == 1

    def test_parquet(self, tmp_path, texts):
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is no dependency")
        from pyarrow import parquet

        file = tmp_path / "a.PARQUET"
        parquet.write_table(pyarrow.table({"text": ["a", None, "b"], "labels": [None, None, None]}), file)
        found, summary = texts(file)
        assert found == ["a", "b"] and summary.empty == 1
        parquet.write_table(pyarrow.table({"text": ["a", "b"], "loss_mask": [None, [1]]}), file)
        with pytest.raises(ValueError, match=r"a\.PARQUET row 2 has 'loss_mask', which changes what is learnt"):
            texts(file)
        assert texts(file, ignore=("loss_mask",))[0] == ["a", "b"]
        content = bytearray(file.read_bytes())
        content[8:60] = bytes(52)
        put(file, bytes(content))
        with pytest.raises(ValueError, match=r"a\.PARQUET is damaged after row 0"):
            texts(file)
        with pytest.raises(ValueError, match=r"a\.PARQUET is not Parquet, or damaged"):
            texts(put(file, bytes(content[:-9])))

    @pytest.mark.parametrize("name", ["labels", "attention_mask", "loss_mask", "tools", "weight"])
    def test_keys_that_change_what_is_learnt(self, tmp_path, texts, name):
        row = {"text": "a", name: [1], "id": 3}
        file = put(tmp_path / "a.jsonl", '{"text": "x"}\n' + json.dumps(row))
        with pytest.raises(ValueError, match=rf"line 2 has '{name}', which .*; --ignore {name} leaves it out"):
            texts(file)
        assert texts(file, ignore=(name,))[0] == ["x", "a"]
        assert texts(put(file, json.dumps({**row, name: None})))[0] == ["a"]

    def test_known_suffixes(self, tmp_path):
        assert formats.kind_of(tmp_path / "A.NDJSON.XZ") == "json" and formats.kind_of(tmp_path / "a.tar.gz") is None


class TestAgain:
    def test_a_call_that_fails_at_once_leaves_nothing(self, tmp_path, tokenizer):
        lines = write_json_lines(tmp_path / "a.jsonl", ["a"], "body")
        with pytest.raises(ValueError, match="has no key 'text'"):
            tokenize([lines], tmp_path / "a.bin", Options(tokenizer), processes=1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]
        parts = tmp_path / "a.parts"
        put(parts / ".000000.npz.123.part", "torn")  # of a call that was killed before its first part
        tokenize([lines], tmp_path / "a.bin", Options(tokenizer, key="body"), processes=1)
        assert not parts.exists()

    def test_a_folder_of_somebody_else_is_left_alone(self, tmp_path, tokenizer):
        lines = write_json_lines(tmp_path / "a.jsonl", ["a"])
        own = [put(tmp_path / "a.parts" / name, "x") for name in ("own.npz", "own.txt")]
        tokenize([lines], tmp_path / "a.bin", Options(tokenizer), processes=1)
        assert sorted((tmp_path / "a.parts").iterdir()) == own

    def test_the_index_says_that_there_is_a_mask(self, tmp_path, tokenizer):
        chat = write_json_lines(tmp_path / "a.jsonl", [[{"role": "user", "content": "q"}]], "messages")
        tokenize([chat], tmp_path / "a.bin", Options(tokenizer, chat=True, key="messages"), processes=1)
        with (tmp_path / "b.idx").open("wb") as file:
            indexed.write(file, np.array([3]), np.dtype("uint16"))
        assert indexed.is_masked(tmp_path / "a.idx") and not indexed.is_masked(tmp_path / "b.idx")
        assert TokenStream([tmp_path / "a.bin"]).share_counted == 0
        (tmp_path / "a.mask").unlink()
        with pytest.raises(ValueError, match=r"a\.mask is missing, which says what of .*a\.bin counts in the loss"):
            TokenStream([tmp_path / "a.bin"])
        assert not TokenStream([tmp_path / "a.bin"], masked=False).masked

    def test_special_tokens_are_named(self, tmp_path):
        from tokenizers import Tokenizer, models

        made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        made.add_special_tokens(["<META>", "<SOS>"])
        made.save(str(tmp_path / "tokenizer.json"))
        lines = write_json_lines(tmp_path / "a.jsonl", ["a"])
        with pytest.raises(ValueError, match="name it, or none for no token; its special tokens are <META>, <SOS>"):
            tokenize([lines], tmp_path / "a.bin", Options(tmp_path / "tokenizer.json"), processes=1)
