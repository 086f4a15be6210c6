"""``parallel-ops tokenize``: the same tokens from every format, and from the parts of a file."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="tokenizers is no dependency")

from parallel_ops.tokenization import Options
from parallel_ops.tokenization import documents as reading
from parallel_ops.tokenization.documents import Part, documents, parts_of
from parallel_ops.tokenization.run import tokenize
from support.runs.tokenization import END, TEXTS, expected, read, text_of, write_json_lines


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
        whole = Part(str(file), "json" if as_json else "text", 0, file.stat().st_size, True, True, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "_LEAST_PART", most)
            parts = [share for part in parts_of([file], options) for share in part]
        assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
        assert (parts[0].start, parts[0].begins, parts[-1].stop, parts[-1].ends) == (0, True, whole.stop, True)
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
