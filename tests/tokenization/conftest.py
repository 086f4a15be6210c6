import pytest

from support.runs.tokenization import tokenizer_file


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return tokenizer_file(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def small_parts(monkeypatch):
    from parallel_ops.tokenization import documents

    monkeypatch.setattr(documents, "_LEAST_PART", 1000)
