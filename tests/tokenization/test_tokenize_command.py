"""``parallel-ops tokenize``: the same bytes for any number of processes and after kills; errors are one line."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokenizers is no dependency")

from parallel_ops.tokenization import Options
from parallel_ops.tokenization import documents as reading
from parallel_ops.tokenization.run import tokenize
from support.runs.faults import file_limit
from support.runs.tokenization import END, TEXTS, bytes_of, expected, read, write_json_lines


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

    def test_a_full_disk_is_called_that_with_the_file(self, tmp_path, tokenizer, small_parts):
        lines = write_json_lines(tmp_path / "a.jsonl", TEXTS * 20)
        for limit, file in ((512, "a.parts/000000.npz"), (8192, "a.bin")):
            with file_limit(limit), pytest.raises(OSError, match=f"File too large: '{tmp_path}/{file}'"):
                tokenize([lines], tmp_path / "a.bin", Options(tokenizer), processes=1)
        assert tokenize([lines], tmp_path / "a.bin", Options(tokenizer), processes=1).tokens * 2 > 8192

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
        (tmp_path / ".a.bin.123.part").write_text("torn")  # of a call that was killed as it put parts together
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
            ("latin.txt", b"a\xffb"), ("there.bin", b""), ("a.txt", b"a"),
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
        assert not (tmp_path / "a.parts").exists()
