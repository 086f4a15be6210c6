import pytest


@pytest.fixture
def folder(tmp_path):
    """A folder with a run of two ranks, ``run.toml``, and its tokens."""
    from support.runs import trainer as runs  # needs pydantic

    runs.data_file(tmp_path)
    (tmp_path / "run.toml").write_text(runs.RUN)
    return tmp_path
