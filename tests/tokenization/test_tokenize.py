"""``parallel-ops tokenize``: the same tokens for any number of processes, after kills, and from every format."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="tokenizers is no dependency")

from parallel_ops.tokenization import Options
from parallel_ops.tokenization import documents as reading
from parallel_ops.tokenization.documents import Part, documents, parts_of
from parallel_ops.tokenization.run import tokenize
from parallel_ops.train.data.tokens import TokenStream
from support.runs.tokenization import END, text_of, tokenizer_file, write_json_lines


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_file(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(reading, "_LEAST_PART", 1000)


def expected(tokenizer, texts):
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(tokenizer))
    return [[*own.encode(text).ids, own.token_to_id(END)] for text in texts if text]


def read(path):
    stream = TokenStream([path])
    return [stream.document(number).tolist() for number in range(stream.documents)]


def bytes_of(output):
    return [output.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")]


TEXTS = [text_of(seed, 40 * seed) for seed in range(12)]  # the first is empty


class TestFormats:
    def test_every_format_gives_the_same_documents(self, tmp_path, tokenizer, small_parts):
        options = Options(tokenizer, key="body")
        lines = write_json_lines(tmp_path / "a.jsonl", TEXTS, "body")
        packed = tmp_path / "b.json.gz"
        packed.write_bytes(gzip.compress(lines.read_bytes()))
        (tmp_path / "texts" / "inner").mkdir(parents=True)
        for number, text in enumerate(TEXTS):
            (tmp_path / "texts" / ("" if number < 6 else "inner") / f"{number + 10}.txt").write_text(text)
        want = expected(tokenizer, TEXTS)
        for name, inputs in (("a", [lines]), ("b", [packed]), ("c", [tmp_path / "texts"])):
            found = tokenize(inputs, tmp_path / f"{name}.bin", options, processes=1)
            got = read(tmp_path / f"{name}.bin")
            assert sorted(got) == sorted(want) and (name == "c" or got == want)
            assert (found.documents, found.empty, found.tokens) == (11, 1, sum(map(len, want)))
            assert found.loss_tokens == found.tokens and not (tmp_path / f"{name}.mask").exists()
            assert found.parts > (1 if name != "b" else 0)

    def test_parquet(self, tmp_path, tokenizer, monkeypatch):
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is no dependency")
        from pyarrow import parquet

        table = pyarrow.table({"text": [*TEXTS, None], "n": range(13)})
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
        monkeypatch.setattr(reading, "_LEAST_PART", 3000)
        found = tokenize([tmp_path / "a.parquet"], tmp_path / "a.bin", Options(tokenizer), processes=2)
        assert read(tmp_path / "a.bin") == expected(tokenizer, TEXTS)
        assert found.parts > 2 and found.empty == 2
        with pytest.raises(ValueError, match=r"a\.parquet has no column 'body'; it has text, n; --key"):
            tokenize([tmp_path / "a.parquet"], tmp_path / "b.bin", Options(tokenizer, key="body"))
        with pytest.raises(ValueError, match=r"a\.parquet row 1: 'n' must be text, got int"):
            tokenize([tmp_path / "a.parquet"], tmp_path / "b.bin", Options(tokenizer, key="n"), processes=1)
        (tmp_path / "b.parquet").write_text("no")
        with pytest.raises(ValueError, match=r"b\.parquet is not Parquet"):
            tokenize([tmp_path / "b.parquet"], tmp_path / "b.bin", Options(tokenizer))

    @pytest.mark.parametrize("separator", ["---", "", END])
    def test_separators(self, tmp_path, tokenizer, small_parts, separator):
        texts = [text.replace("\n\n", "\n").strip() + "\n" for text in TEXTS[1:]]
        (tmp_path / "a.txt").write_text(f"{separator}\n".join(texts))
        options = Options(tokenizer, separator=separator)
        assert tokenize([tmp_path / "a.txt"], tmp_path / "a.bin", options, processes=1).parts > 2
        assert read(tmp_path / "a.bin") == expected(tokenizer, texts)

    def test_begin_and_no_end(self, tmp_path, tokenizer, small_parts):
        lines = write_json_lines(tmp_path / "a.jsonl", TEXTS)
        (tmp_path / "long.txt").write_text(TEXTS[-1] * 3)
        tokenize([lines, tmp_path / "long.txt"], tmp_path / "a.bin", Options(tokenizer, eod="none", bos="<|im_start|>"))
        want = [[1, *tokens[:-1]] for tokens in expected(tokenizer, [*TEXTS, TEXTS[-1] * 3])]
        assert read(tmp_path / "a.bin") == want

    def test_special_tokens_in_a_text_are_text(self, tmp_path, tokenizer):
        """Otherwise a text could end its document, or begin another's turn."""
        lines = write_json_lines(tmp_path / "a.jsonl", [f"a{END}b <|im_start|>"])
        tokenize([lines], tmp_path / "a.bin", Options(tokenizer))
        assert [token for token in read(tmp_path / "a.bin")[0] if token < 3] == [0]

    def test_half_a_surrogate_pair(self, tmp_path, tokenizer):
        (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
        tokenize([tmp_path / "a.jsonl"], tmp_path / "a.bin", Options(tokenizer))
        assert read(tmp_path / "a.bin") == expected(tokenizer, ["a\ufffdb"])

    def test_many_tokens_need_more_bytes(self, tmp_path, tokenizer, monkeypatch):
        monkeypatch.setattr("parallel_ops.tokenization.tokenizer._SHORT", 292)
        (tmp_path / "a.txt").write_text(TEXTS[1])
        found = tokenize([tmp_path / "a.txt"], tmp_path / "a.bin", Options(tokenizer))
        assert (found.dtype, found.vocab_size) == ("int32", 293)
        assert (tmp_path / "a.bin").stat().st_size == 4 * found.tokens
        assert read(tmp_path / "a.bin") == expected(tokenizer, TEXTS[1:2])


class TestParts:
    @settings(max_examples=60, deadline=None)
    @given(
        st.text("ab \n-\r", max_size=120), st.sampled_from([None, "", "-"]), st.integers(1, 30), st.booleans()
    )  # fmt: skip
    def test_parts_have_the_documents_of_the_whole(self, tmp_path_factory, text, separator, most, as_json):
        folder = tmp_path_factory.mktemp("parts")
        file = folder / ("a.jsonl" if as_json else "a.txt")
        file.write_bytes(
            b"".join(json.dumps({"text": line}).encode() + b"\n" for line in text.split("-"))
            if as_json else text.encode()
        )  # fmt: skip
        options = Options(folder, separator=None if as_json else separator)
        whole = Part(str(file), "json" if as_json else "text", 0, file.stat().st_size, True, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "_LEAST_PART", most)
            parts = [share for part in parts_of([file], options) for share in part]
        assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
        assert (parts[0].start, parts[-1].stop, parts[-1].last) == (0, whole.stop, True)
        assert joined(documents(whole, options)) == joined(d for part in parts for d in documents(part, options))

    def test_pieces_have_the_tokens_of_the_whole(self, tmp_path, tokenizer, monkeypatch):
        """Where lines begin and end with visible characters, as those of most texts do."""
        monkeypatch.setattr(reading, "PIECE", 100)
        long = text_of(1, 3000)
        pieces = reading.pieces(long)
        assert "".join(pieces) == long and max(map(len, pieces)) <= 300 and len(pieces) > 50
        lines = write_json_lines(tmp_path / "a.jsonl", [long, "short"])
        (tmp_path / "a.txt").write_text(long)
        monkeypatch.setattr(reading, "_LEAST_PART", 1000)
        found = tokenize([lines, tmp_path / "a.txt"], tmp_path / "a.bin", Options(tokenizer), processes=1)
        assert found.parts > 5 and found.documents == 3
        assert read(tmp_path / "a.bin") == expected(tokenizer, [long, "short", long])

    def test_a_long_line_is_cut_at_a_space_or_anywhere(self, monkeypatch):
        monkeypatch.setattr(reading, "PIECE", 10)
        assert reading.pieces("a" * 12 + " " + "b" * 35) == ["a" * 12, " " + "b" * 9, "b" * 10, "b" * 16]


def joined(found):
    """Texts of documents; pieces of one that goes on are put together."""
    texts = [""]
    for document in found:
        texts[-1] += document.value
        if document.ends:
            texts.append("")
    return texts


class TestProcesses:
    def test_the_bytes_do_not_depend_on_processes(self, tmp_path, tokenizer, small_parts):
        lines = write_json_lines(tmp_path / "a.jsonl", TEXTS * 3)
        (tmp_path / "b.txt").write_text("\n".join(TEXTS))
        reports = []
        for count in (1, 3):
            output = tmp_path / f"{count}.bin"
            tokenize([lines, tmp_path / "b.txt"], output, Options(tokenizer), processes=count,
                     report=lambda *given: reports.append(given))  # fmt: skip
        assert bytes_of(tmp_path / "1.bin") == bytes_of(tmp_path / "3.bin")
        assert reports[0][0] == 0 and reports[-1][0] == reports[-1][1] > 0

    def test_what_was_killed_goes_on(self, tmp_path, tokenizer, small_parts):
        lines = write_json_lines(tmp_path / "a.jsonl", TEXTS * 20)
        options = Options(tokenizer)
        tokenize([lines], tmp_path / "whole.bin", options, processes=1)
        script = (
            "import sys; from pathlib import Path; from parallel_ops.tokenization import Options, documents\n"
            "from parallel_ops.tokenization.run import tokenize\n"
            "if __name__ == '__main__':\n"
            "    documents._LEAST_PART = 1000\n"
            f"    folder, tokenizer = Path({str(tmp_path)!r}), Path({str(tokenizer)!r})\n"
            "    tokenize([folder / 'a.jsonl'], folder / 'a.bin', Options(tokenizer), processes=2)\n"
        )
        file = tmp_path / "script.py"
        file.write_text(script)
        parts = tmp_path / "a.parts"
        running = subprocess.Popen([sys.executable, file])
        until(lambda: parts.exists() and len(list(parts.glob("*.npz"))) >= 3)
        workers = children(running.pid)
        running.send_signal(signal.SIGKILL)
        running.wait()
        until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))
        assert workers and not (tmp_path / "a.bin").exists()
        (parts / "000001.npz").write_bytes((parts / "000001.npz").read_bytes()[:-9])  # as after a loss of power
        there = len(list(parts.glob("0*.npz")))
        found = tokenize([lines], tmp_path / "a.bin", options, processes=2)
        assert found.kept == there - 1 < found.parts and not parts.exists()
        assert bytes_of(tmp_path / "a.bin") == bytes_of(tmp_path / "whole.bin")
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]

    def test_a_part_that_is_damaged_is_tokenized_again(self, tmp_path, tokenizer, small_parts, monkeypatch):
        lines = write_json_lines(tmp_path / "a.jsonl", TEXTS)
        monkeypatch.setattr("parallel_ops.tokenization.run.Store.join", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tokenize([lines], tmp_path / "a.bin", Options(tokenizer), processes=1)
        monkeypatch.undo()
        monkeypatch.setattr(reading, "_LEAST_PART", 1000)
        part = tmp_path / "a.parts" / "000000.npz"
        content = bytearray(part.read_bytes())
        content[200] ^= 1
        part.write_bytes(content)
        with pytest.raises(ValueError, match=r"000000\.npz was damaged; the same command tokenizes it again"):
            tokenize([lines], tmp_path / "a.bin", Options(tokenizer), processes=1)
        tokenize([lines], tmp_path / "a.bin", Options(tokenizer), processes=1)
        assert read(tmp_path / "a.bin") == expected(tokenizer, TEXTS)

    def test_parts_of_something_else(self, tmp_path, tokenizer, small_parts):
        lines = write_json_lines(tmp_path / "a.jsonl", [*TEXTS, 3])
        with pytest.raises(ValueError, match=r"a\.jsonl line 13: 'text' must be text, got int"):
            tokenize([lines], tmp_path / "a.bin", Options(tokenizer), processes=2)
        with pytest.raises(ValueError, match=r"a\.parts has parts of other options: remove it, or name another"):
            tokenize([lines], tmp_path / "a.bin", Options(tokenizer, bos=END))
        write_json_lines(lines, [*TEXTS, "mended, of other bytes"])
        with pytest.raises(ValueError, match=r"of other files and parts"):
            tokenize([lines], tmp_path / "a.bin", Options(tokenizer))


def until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def children(pid):
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(entry))
    return found


class TestCommand:
    def run(self, *arguments):
        call = [sys.executable, "-m", "parallel_ops", "tokenize", *map(str, arguments)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def test_a_result_and_its_json(self, tmp_path, tokenizer):
        lines = write_json_lines(tmp_path / "a.jsonl", TEXTS)
        code, out, err = self.run(lines, tmp_path / "a.bin", "--tokenizer", tokenizer)
        assert (code, err) == (0, "") and "in 11 documents; 1 empty ones left out" in out
        code, out, _ = self.run(lines, tmp_path / "b.bin", "--tokenizer", tokenizer, "--json", "--processes", 1)
        found = json.loads(out)
        assert (code, found["documents"], found["eod"], found["dtype"]) == (0, 11, 0, "uint16")
        assert found["tokens"] == len(np.fromfile(tmp_path / "b.bin", "uint16"))
        assert (
            "model.vocab_size must be at least 293" in self.run(lines, tmp_path / "c.bin", "--tokenizer", tokenizer)[1]
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["a.bin"], "tokenize needs an input and an output, got a.bin alone"),
            (["a.jsonl", "out"], "the output must end in .bin, got out"),
            (["none.txt", "a.bin"], "none.txt does not exist"),
            (["a.jsonl", "a.jsonl", "a.bin"], "a.jsonl is given twice"),
            (["empty", "a.bin"], "empty has no file that ends in .jsonl, .ndjson, .json, .parquet, .txt, .md"),
            (["nothing.txt", "a.bin"], "the input of a.bin has no text in it"),
            (["bad.jsonl", "a.bin"], "bad.jsonl line 2 is not JSON"),
            (["array.json", "a.bin"], "one object a line is read, not an array of them"),
            (["latin.txt", "a.bin"], "latin.txt is not UTF-8 at byte 1"),
            (["a.jsonl", "a.bin", "--key", "body"], "a.jsonl line 1 has no key 'body'; it has 'text', 'n'; --key"),
            (["torn.txt.gz", "a.bin"], "torn.txt.gz is not gz, or cut off"),
            (["a.jsonl", "there.bin"], "there.bin exists; remove it, or name another output"),
            (["a.jsonl", "a.bin", "--eod", "<no>"], "--eod: {tokenizer} has no token '<no>'"),
            (["a.jsonl", "a.bin", "--bos", "<no>"], "--bos: {tokenizer} has no token '<no>'"),
            (["a.jsonl", "a.bin", "--template", "x"], "--template must be auto, tokenizer, plain, got 'x'"),
            (["a.jsonl", "a.bin", "--template", "plain"], "--template is of messages: give --chat too"),
            (["a.jsonl", "a.bin", "--chat", "--separator", "-"], "--separator is of raw text, which --chat does not"),
            (["a.jsonl", "a.bin", "--chat", "--key", "text"], "a.jsonl line 1 must have a list of messages, got 'x'"),
            (["a.txt", "a.bin", "--chat"], "a.txt: messages need JSON lines or Parquet, not raw text"),
            (["roles.jsonl", "a.bin", "--chat"], "roles.jsonl line 1: a message needs 'role' and 'content', got {{'ro"),
            (["a.jsonl", "a.bin", "--tokenizer", "none.json"], "--tokenizer: none.json does not exist"),
            (["a.jsonl", "a.bin", "--tokenizer", "empty"], "--tokenizer: empty has no tokenizer.json; to make it"),
            (["a.jsonl", "a.bin", "--tokenizer", "a.jsonl"], "--tokenizer: a.jsonl is no tokenizer"),
        ],
    )
    def test_bad_input_is_one_line(self, tmp_path, tokenizer, capsys, monkeypatch, arguments, message):
        monkeypatch.chdir(tmp_path)
        write_json_lines(tmp_path / "a.jsonl", ["x"])
        write_json_lines(tmp_path / "roles.jsonl", [[{"role": "user"}]], "messages")
        (tmp_path / "empty").mkdir()
        for name, content in (
            ("nothing.txt", b""), ("bad.jsonl", b'{"text": "a"}\n{"text"\n'), ("array.json", b'[{"text": "a"},\n'),
            ("latin.txt", b"a\xffb"), ("torn.txt.gz", gzip.compress(b"text")[:-6]), ("there.bin", b""), ("a.txt", b"a"),
        ):  # fmt: skip
            (tmp_path / name).write_bytes(content)
        own = [] if "--tokenizer" in arguments else ["--tokenizer", str(tokenizer)]
        from parallel_ops import __main__

        monkeypatch.setattr(sys, "argv", ["parallel-ops", "tokenize", *arguments, *own])
        with pytest.raises(SystemExit) as stop:
            __main__.main()
        err = capsys.readouterr().err
        assert stop.value.code == 2 and err.count("\n") == 1, err
        assert err.startswith("error: ") and message.format(tokenizer=tokenizer) in err
